"""`kvsim report`: results as one page. Imports are inside the function, as in `kvsim.cli`."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

PAGE = "report.html"


@click.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)
@click.option("--out", metavar="FILE", help=f"Where the page goes; by default {PAGE} in the first folder.")
@click.option("--overwrite", is_flag=True, help="Replace the file of --out.")
def report(folders: tuple[str, ...], out: str | None, overwrite: bool) -> None:
    """Write one HTML page about results, overlaid.

    FOLDER is what `kvsim run --out` has written. The page needs nothing but a browser. The one in the first folder is
    made from what is there and replaced without asking.
    """
    from kvcore.errors import require
    from kvsim import cli

    paths = [Path(os.path.expanduser(folder)) for folder in folders]
    target = paths[0] / PAGE if out is None else Path(os.path.expanduser(out))
    with cli.mistakes_in_one_line():
        is_free = out is None or overwrite or not os.path.lexists(target)
        require(is_free, "--out", out, "a file that is not there yet, or --overwrite to replace it")
    write_page(paths, target)


def write_page(folders: Sequence[Path], target: Path) -> None:
    """Write the page about these results and print its path; ends the command where either is not possible."""
    from kvsim import cli
    from kvsim.report.page import page

    with cli.mistakes_in_one_line():
        html = page(folders)
    with cli.failing_in_one_line(f"--out = {str(target)!r}"):
        target.write_text(html, encoding="utf-8")
    click.echo(target)

"""`kvsim trace convert`: a trace in another format.

Imports are inside the functions, as in `kvsim.cli`, which has what commands share.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from kvsim import options

STDOUT = "-"


@click.command()
@options.trace_argument
@click.option("--to", "target", type=click.Choice(["mooncake"]), required=True, help="The format to write.")
@click.option(
    "--out", required=True, metavar="FILE", help="A new file (compressed when it ends in .gz), or - to print."
)
@click.option("--overwrite", is_flag=True, help="Replace the file of --out.")
@options.format_option
@options.time_unit_option
@options.no_cache_option
def convert(
    trace: str,
    target: str,
    out: str,
    overwrite: bool,
    trace_format: str | None,
    time_unit: str | None,
    no_cache: bool,
) -> None:
    """Write a trace in another format.

    TRACE is a file, or a folder of sessions. What the format written cannot say is told on standard error.
    """
    from kvcore.errors import require
    from kvsim import cli
    from kvsim.workload.files import is_stream
    from kvsim.workload.mooncake_writer import MooncakeRows

    path = Path(os.path.expanduser(out))
    with cli.mistakes_in_one_line():
        is_free = out == STDOUT or overwrite or is_stream(path) or not os.path.lexists(path)
        require(is_free, "--out", out, "a file that is not there yet, or --overwrite to replace it")
        rows = MooncakeRows(cli.load_trace(trace, trace_format, no_cache, time_unit))
    with cli.failing_in_one_line(f"--out = {out!r}"):
        if out == STDOUT:
            sys.stdout.writelines(line.decode() for line in rows)
            sys.stdout.flush()
        else:
            write(path, rows)
    for loss in rows.losses():
        print(f"not in the {target} format: {loss}", file=sys.stderr)


def write(path: Path, lines: Iterable[bytes]) -> None:
    """The lines as the file, which appears whole or not at all unless it is a pipe; raises OSError."""
    import gzip

    from kvsim.workload.files import is_stream

    if is_stream(path):
        with path.open("wb") as stream:
            stream.writelines(lines)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed:
                    packed.writelines(lines)
            else:
                stream.writelines(lines)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

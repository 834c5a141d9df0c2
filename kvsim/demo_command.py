"""`kvsim demo`: what a pool does, in a table and a page. Imports are inside the functions, as in `kvsim.cli`."""

from itertools import count
from pathlib import Path

import click

from kvsim.report_command import PAGE, write_page

DEMO = ("nopool-16", "pool-16")


@click.command()
def demo() -> None:
    """The shipped scenarios, without a pool and with one.

    Prints a table and the path of a page, in a new folder below out/.
    """
    from kvsim import cli, results, tables
    from kvsim.run import simulation

    with cli.failing_in_one_line("out/demo"):
        folder = new_folder(Path("out"))
    compared = []
    for name in DEMO:
        config = cli.load_scenario(name, [], None, None, None)
        trace = cli.load_workload(config, no_cache=True)
        running = simulation(config, trace)
        cli.run_to_end(running, as_json=False)
        compared.append(results.document(running, cli.FAST, cli.process_age_s))
        cli.write_out(results.claim(str(folder / name)), running, compared[-1], trace)
    tables.console().print(tables.comparison(*compared))
    write_page([folder / name for name in DEMO], folder / PAGE)


def new_folder(parent: Path) -> Path:
    """A folder that was not there before; raises OSError."""
    for number in count(1):
        folder = parent / ("demo" if number == 1 else f"demo-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("a folder has some number")

"""The command line's `kvsim trace generate WORKLOAD`: a generated workload as a file in kvtwin's own trace format.

Imports are inside the functions, as in `kvsim.cli`.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvsim.workload.trace import Trace

out_option = click.option(
    "--out", metavar="FILE", required=True, help="Where to write it; compressed when its name ends with .gz."
)


@click.group()
def generate() -> None:
    """Write a generated workload into a file.

    The file is a trace for `kvsim run SCENARIO --trace FILE`, `hits` and `trace stats`.
    """


@generate.command()
@click.option("--sessions", type=int, default=610, show_default=True, help="The published table has 610.")
@click.option(
    "--shared-len", type=int, help="Tokens that all prompts share: 902 as replayed  [default: 11520, as served]"
)
@click.option("--missed-len", type=float, help="Tokens a call that the provider is to have missed  [default: 1791]")
@click.option("--answers", type=click.Choice(("recorded", "generated")), help="In the next prompt  [default: recorded]")
@click.option("--start-spread-s", type=float, help="Sessions start within this time  [default: all at once]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@out_option
def codex(
    sessions: int,
    shared_len: int | None,
    missed_len: float | None,
    answers: str | None,
    start_spread_s: float | None,
    seed: int,
    out: str,
) -> None:
    """Codex on SWE-bench Pro: coding agents, from published percentiles (docs/WORKLOADS.md)."""
    from kvsim.cli import mistakes_in_one_line
    from kvsim.workload.codex import Codex, generate

    options: dict[str, Any] = {
        "sessions": sessions,
        "shared_len": shared_len,
        "missed_len": missed_len,
        "answers": answers,
        "start_spread_s": start_spread_s,
    }
    with mistakes_in_one_line():
        trace = generate(Codex(**{name: value for name, value in options.items() if value is not None}), seed)
    write_out(trace, out)


def write_out(trace: "Trace", out: str) -> None:
    """Write the file and say what is in it."""
    from kvsim.cli import failing_in_one_line
    from kvsim.trace_commands import write
    from kvsim.workload import native

    path = Path(os.path.expanduser(out))
    with failing_in_one_line(f"--out = {out!r}"):
        write(path, native.lines(trace))
    click.echo(f"{path}: {trace.num_requests:,} requests of {trace.num_sessions:,} sessions", err=True)

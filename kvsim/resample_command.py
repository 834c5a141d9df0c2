"""`kvsim trace resample`: a bigger fleet's trace out of recorded sessions.

Imports are inside the functions, as in `kvsim.cli`, which has what commands share.
"""

import click

from kvsim import options
from kvsim.generate_command import make, out_option, seed_option


@click.command()
@options.trace_argument
@click.option("--sessions", type=int, required=True, help="Copies to draw.")
@click.option(
    "--share",
    type=click.Choice(("none", "system", "recorded")),
    help="What copies have in common  [default: none, system with --shared-prefix]",
)
@click.option("--shared-prefix", "shared_len", type=int, help="Tokens of one system prompt that all copies begin with.")
@click.option("--draw", type=click.Choice(("stratified", "independent")), default="stratified", show_default=True)
@click.option(
    "--start-spread-s", type=float, default=0.0, help="Sessions start within this time  [default: all at once]"
)
@seed_option
@options.format_option
@options.time_unit_option
@options.no_cache_option
@out_option
def resample(
    trace: str,
    sessions: int,
    share: str | None,
    shared_len: int | None,
    draw: str,
    start_spread_s: float,
    seed: int,
    trace_format: str | None,
    time_unit: str | None,
    no_cache: bool,
    out: str,
) -> None:
    """Draw sessions of a trace, with replacement, each copy with content of its own (docs/WORKLOADS.md).

    TRACE is a file, or a folder of sessions. The file written is in kvtwin's own format.
    """
    from typing import cast

    from kvsim import cli
    from kvsim.workload.resample import Draw, Resample, Share
    from kvsim.workload.resample import resample as drawn

    shared = share or ("none" if shared_len is None else "system")
    with cli.mistakes_in_one_line():
        how = Resample(sessions, cast(Share, shared), shared_len or 0, cast(Draw, draw), start_spread_s)
        recorded = cli.load_trace(trace, trace_format, no_cache, time_unit)
    make(lambda: drawn(recorded, how, seed), out)

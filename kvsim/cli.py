"""The command line: `kvsim run`, `hits`, `trace stats`, `scenarios`, `demo`.

Results on standard output (a table, or with --json exactly one JSON document), everything else on standard error.
Exit codes: 0; 1 when no request completed, when the disk does not take --out, or for a bug (with its traceback); 2 for
a mistake of the caller's, said in one line. A trace's path counts from where the command runs.
Imports are inside the functions: --help and `hits` start without the simulator.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.document import Document, to_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsim.run import Simulation
    from kvsim.scenario import Scenario
    from kvsim.workload.trace import Trace

DEMO = ("nopool-16", "pool-16")

app = typer.Typer(
    help="Simulate a fleet of LLM inference engines with a shared pool of KV blocks.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
trace_app = typer.Typer(help="Look at traces.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(trace_app, name="trace")


class Format(StrEnum):
    """Names of trace formats."""

    MOONCAKE = "mooncake"
    CLAUDE_CODE = "claude-code"


class Engine(StrEnum):
    """What schedules: the fast engine, or the installed vLLM's own scheduler."""

    FAST = "fast"
    VLLM = "vllm"


TracePath = Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or a folder of sessions.")]
FormatOption = Annotated[Format | None, typer.Option("--format", help="The trace's format; its content tells.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Parse the trace anew.")]


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough ends this quietly
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


@app.command()
def run(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A TOML file, or a name `kvsim scenarios` shows.")
    ],
    trace: Annotated[str | None, typer.Option("--trace", help="Serve this trace instead of the scenario's.")] = None,
    trace_format: FormatOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Instead of the scenario's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result into this new or empty folder.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Repeatable.")
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="Who schedules.")] = Engine.FAST,
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Simulate a scenario."""
    from kvsim import results

    with mistakes_in_one_line():
        overrides = [*(settings or ()), *([] if seed is None else [f"scenario.seed={seed}"])]
        config = load_scenario(scenario, overrides, trace, trace_format)
        simulate = engine_for(engine, config)
        if out is not None:
            results.claim(out)
        simulation = simulate(config, load_workload(config, no_cache))
    run_to_end(simulation, as_json)
    result = results.document(simulation, engine, process_age_s)
    try:
        if out is not None:
            write_out(out, simulation, result)
    finally:
        show(result, "run", as_json)
    if not result["requests_completed"]:
        raise typer.Exit(1)


@app.command()
def hits(
    trace: TracePath,
    capacity_blocks: Annotated[str, typer.Option("--capacity-blocks", metavar="N,N,...", help="Sizes of the cache.")],
    policy: Annotated[str, typer.Option("--policy", metavar="NAME,...", help="lru, fifo, opt.")] = "lru",
    trace_format: FormatOption = None,
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Hit rates of a cache, by capacity and policy."""
    from kvcore.errors import require
    from kvsim import hits as curves

    with mistakes_in_one_line():
        capacities = [positive("--capacity-blocks", text) for text in capacity_blocks.split(",")]
        policies = policy.split(",")
        for name in policies:
            require(name in curves.CURVES, "--policy", name, f"one of {', '.join(curves.CURVES)}")
        loaded = load_trace(trace, trace_format, no_cache)
    show(curves.hits(loaded, capacities, policies).to_json(), "hits", as_json)


@trace_app.command("stats")
def trace_stats(
    trace: TracePath, trace_format: FormatOption = None, as_json: AsJson = False, no_cache: NoCache = False
) -> None:
    """What a trace holds: counts, lengths, reuse."""
    with mistakes_in_one_line():
        loaded = load_trace(trace, trace_format, no_cache)
    from kvsim.workload.stats import stats

    show(stats(loaded), "trace_stats", as_json)


@app.command()
def scenarios(as_json: AsJson = False) -> None:
    """Shipped scenarios."""
    from kvsim import scenario

    show(scenario.scenarios(), "scenarios", as_json)


@app.command()
def demo() -> None:
    """The shipped scenarios, with and without a pool."""
    from kvsim import results, tables
    from kvsim.run import simulation

    compared = []
    for name in DEMO:
        config = load_scenario(name, [], None, None)
        running = simulation(config, load_workload(config, no_cache=True))
        run_to_end(running, as_json=False)
        compared.append(results.document(running, Engine.FAST, process_age_s))
    tables.console().print(tables.comparison(*compared))


# --- input ------------------------------------------------------------------------------------------------------------


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """A mistake in what the caller gave ends the command with one line and exit code 2; a bug keeps its traceback."""
    try:
        yield
    except ValueError as error:
        from kvcore.errors import InvalidArgument
        from kvsim.workload.trace import TraceError

        if not isinstance(error, InvalidArgument | TraceError):
            raise
        print(one_line(str(error)), file=sys.stderr)
        raise typer.Exit(2) from None


def one_line(message: str) -> str:
    """The message with everything that would break or move a terminal's line escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def positive(option: str, text: str) -> int:
    """The positive integer that `text` is; raises InvalidArgument."""
    from kvcore.errors import require

    require(
        text.isascii() and text.isdigit() and int(text) > 0, option, text, "integers of at least 1, as in 1000,20000"
    )
    return int(text)


def load_scenario(source: str, overrides: Sequence[str], trace: str | None, fmt: Format | None) -> "Scenario":
    """The scenario, serving `trace` when there is one; raises InvalidArgument."""
    from kvcore.errors import require
    from kvsim import scenario, toml

    if trace is None:
        require(fmt is None, "--format", str(fmt), "--trace with it")
        return scenario.load(source, overrides)
    given = {"trace": trace, "format": None if fmt is None else fmt.value}
    return scenario.load(source, overrides, toml.validate(scenario.TraceWorkload, given, "--trace"))


def load_trace(path: str, fmt: Format | None, no_cache: bool) -> "Trace":
    """The trace at `path`; raises TraceError."""
    from kvsim.workload.load import load_trace

    return load_trace(path, fmt, use_cache=not no_cache)


def load_workload(config: "Scenario", no_cache: bool) -> "Trace":
    """The scenario's trace; raises TraceError."""
    from kvsim.workload.source import trace_of

    return trace_of(config, use_cache=not no_cache)


def engine_for(engine: Engine, config: "Scenario") -> Callable[["Scenario", "Trace"], "Simulation"]:
    """What makes a simulation with this engine; raises InvalidArgument when it cannot here."""
    if engine is Engine.FAST:
        from kvsim.run import simulation

        return simulation
    return vllm_engine(config)


def vllm_engine(config: "Scenario") -> Callable[["Scenario", "Trace"], "Simulation"]:
    """The same with vLLM's scheduler, for a scenario without a pool."""
    from kvcore.errors import InvalidArgument, require

    require(config.pool is None, "--engine", "vllm", "a scenario without [pool] and [link], such as nopool-16")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to standard output
    try:
        from kvsim.reference import reference_simulation
    except ModuleNotFoundError as error:
        if error.name not in ("vllm", "torch"):
            raise
        fix = "vLLM installed here: pip install 'kvtwin[connector]', or 'kvtwin[connector-cpu]' without a GPU"
        raise InvalidArgument("--engine", "vllm", fix) from None
    return reference_simulation


# --- running and showing ----------------------------------------------------------------------------------------------


def run_to_end(simulation: "Simulation", as_json: bool) -> None:
    """Run, with a progress bar where somebody is looking."""
    import gc

    gc.set_threshold(100_000, 50, 50)  # a simulation makes many small objects, and next to no cycles
    with progress(simulation) if sys.stderr.isatty() and not as_json else nullcontext():
        simulation.run()


def write_out(folder: Path, simulation: "Simulation", result: Document) -> None:
    """Write the result into the folder; a disk that does not take it ends the command with one line and exit code 1."""
    from kvsim import results

    try:
        results.write(folder, simulation, result)
    except OSError as error:
        print(one_line(f"--out = {str(folder)!r}: not written: {error.strerror}"), file=sys.stderr)
        raise typer.Exit(1) from None


def progress(simulation: "Simulation") -> Any:
    """The bar, on standard error."""
    from kvsim.progress import RunProgress
    from kvsim.tables import console

    return RunProgress(simulation, console(stderr=True))


def show(result: Document, table: str, as_json: bool) -> None:
    """Print as JSON, or as the table of this name in `kvsim.tables`."""
    if as_json:
        sys.stdout.write(to_json(result))
        return
    from kvsim import tables

    render: Callable[[Document], RenderableType] = getattr(tables, table)
    tables.console().print(render(result))


def process_age_s() -> float:
    """Seconds since this process began, interpreter start and imports included."""
    try:
        # Field 22 of proc_pid_stat(5), counted from after the name, which may hold anything but a closing bracket.
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")

"""The command line: `kvsim run`, `report`, `hits`, `trace`, `scenarios`, `models`, `demo`.

Results on standard output (a table, or with --json exactly one JSON document), everything else on standard error.
Exit codes: 0; 1 when no request completed, when what was to be written could not be, or for a bug (with its traceback);
2 for a mistake of the caller's, said in one line (wrong usage in click's few). A trace's path counts from where the
command runs.
Imports are inside the functions: --help and `hits` start without the simulator and what it stands on.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvsim.demo_command import demo
from kvsim.document import Document, to_json
from kvsim.generate_command import generate
from kvsim.models_command import models
from kvsim.options import format_option, json_option, no_cache_option, time_unit_option, trace_argument
from kvsim.report_command import report
from kvsim.resample_command import resample
from kvsim.trace_commands import convert

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvsim.run import Simulation
    from kvsim.scenario import Scenario
    from kvsim.workload.trace import Trace

FAST, VLLM = "fast", "vllm"


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough ends this quietly
    signal.signal(signal.SIGINT, end_quietly)
    sys.stdout, sys.stderr = sys.stdout or StringIO(), sys.stderr or StringIO()  # closed by the caller: None
    if not __debug__:
        refuse("kvsim checks its results by assertions, which PYTHONOPTIMIZE takes out: run it without")
    app()


def end_quietly(number: int, _frame: object) -> None:
    """A signal's handler: what is open is left in order, and the exit code is a shell's."""
    sys.exit(128 + number)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtwin", message="kvtwin %(version)s")
def app() -> None:
    """Simulate a fleet of LLM inference engines with a shared pool of KV blocks."""


@app.command()
@click.argument("scenario", metavar="SCENARIO")
@click.option("--trace", metavar="PATH", help="Serve this trace instead of the scenario's workload.")
@format_option
@time_unit_option
@click.option("--seed", type=int, help="Instead of the scenario's.")
@click.option("--out", metavar="FOLDER", help="Write the result into this new or empty folder.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Change the scenario; repeatable.")
@click.option("--engine", type=click.Choice([FAST, VLLM]), default=FAST, show_default=True, help="Who schedules.")
@json_option
@no_cache_option
def run(
    scenario: str,
    trace: str | None,
    trace_format: str | None,
    time_unit: str | None,
    seed: int | None,
    out: str | None,
    settings: tuple[str, ...],
    engine: str,
    as_json: bool,
    no_cache: bool,
) -> None:
    """Simulate a scenario.

    SCENARIO is a TOML file, or a name that `kvsim scenarios` shows.
    """
    from kvsim import results

    with mistakes_in_one_line():
        overrides = [*settings, *([] if seed is None else [f"scenario.seed={seed}"])]
        config = load_scenario(scenario, overrides, trace, trace_format, time_unit)
        simulate = engine_for(engine, config)
        folder = None if out is None else results.claim(os.path.expanduser(out))
        requests = load_workload(config, no_cache)
        simulation = simulate(config, requests)
    run_to_end(simulation, as_json)
    result = results.document(simulation, engine, process_age_s)
    try:
        if folder is not None:
            write_out(folder, simulation, result, requests)
    finally:
        show(result, "run", as_json)
    if not result["requests_completed"]:
        sys.exit(1)


@app.command()
@trace_argument
@click.option("--capacity-blocks", required=True, metavar="N,N,...", help="Sizes of the cache, in blocks of the trace.")
@click.option("--policy", default="lru", show_default=True, metavar="A,B", help="Of lru, fifo, leaf, session, opt.")
@format_option
@time_unit_option
@json_option
@no_cache_option
def hits(
    trace: str,
    capacity_blocks: str,
    policy: str,
    trace_format: str | None,
    time_unit: str | None,
    as_json: bool,
    no_cache: bool,
) -> None:
    """Hit rates of a cache, by capacity and policy.

    TRACE is a file, or a folder of sessions. Its blocks are 512 tokens (mooncake), 64 (claude-code), what decision
    logs and kvcache-ai files say, and 16 in the other formats.
    """
    from kvcore.errors import require
    from kvsim import hits as curves

    with mistakes_in_one_line():
        capacities = [positive("--capacity-blocks", text) for text in capacity_blocks.split(",")]
        policies = policy.split(",")
        for name in policies:
            require(name in curves.CURVES, "--policy", name, f"one of {', '.join(curves.CURVES)}")
        loaded = load_trace(trace, trace_format, no_cache, time_unit)
    report = curves.hits(loaded, capacities, policies).to_json()
    show(report, "hits", as_json, loaded.granule_len)


@app.group("trace")
def trace_group() -> None:
    """Look at traces, make and convert them."""


trace_group.add_command(convert)
trace_group.add_command(generate)
trace_group.add_command(resample)


@trace_group.command("stats")
@trace_argument
@format_option
@time_unit_option
@json_option
@no_cache_option
def trace_stats(trace: str, trace_format: str | None, time_unit: str | None, as_json: bool, no_cache: bool) -> None:
    """What a trace holds: counts, lengths, reuse.

    TRACE is a file, or a folder of sessions.
    """
    from kvsim.workload.stats import stats

    with mistakes_in_one_line():
        loaded = load_trace(trace, trace_format, no_cache, time_unit)
    show(stats(loaded), "trace_stats", as_json)


@app.command()
@click.argument("name", required=False)
@json_option
def scenarios(name: str | None, as_json: bool) -> None:
    """Shipped scenarios, or the file of the one called NAME, to begin your own with."""
    from kvsim import scenario

    if name is None:
        show(scenario.scenarios(), "scenarios", as_json)
    else:
        with mistakes_in_one_line():
            click.echo(scenario.text(name), nl=False)


app.add_command(models)
app.add_command(report)
app.add_command(demo)


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
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    """End the command for a mistake of the caller's."""
    print(one_line(message), file=sys.stderr)
    sys.exit(2)


def one_line(message: str) -> str:
    """The message with everything that would break or move a terminal's line escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def positive(option: str, text: str) -> int:
    """The positive integer that `text` is; raises InvalidArgument."""
    from kvcore.errors import require

    is_number = text.isascii() and text.isdigit() and len(text) <= 18
    require(is_number and int(text) > 0, option, text, "integers, 1 <= N < 10**18, as in 1000,20000")
    return int(text)


def load_scenario(
    source: str, overrides: Sequence[str], trace: str | None, fmt: str | None, time_unit: str | None
) -> "Scenario":
    """The scenario, serving `trace` when there is one; raises InvalidArgument."""
    from kvcore.errors import require
    from kvsim import scenario, toml
    from kvsim.config.workload import TraceWorkload

    if trace is None:
        require(fmt is None, "--format", fmt, "--trace with it")
        require(time_unit is None, "--time-unit", time_unit, "--trace with it")
        return scenario.load(source, overrides)
    workload = toml.validate(TraceWorkload, {"trace": trace, "format": fmt, "time_unit": time_unit}, "--trace")
    return scenario.load(source, overrides, workload)


def load_trace(path: str, fmt: str | None, no_cache: bool, time_unit: str | None) -> "Trace":
    """The trace at `path`; raises TraceError."""
    from kvcore.errors import require
    from kvsim.workload.load import load_trace

    require(path, "TRACE", path, "a file, or a folder of sessions")
    return load_trace(os.path.expanduser(path), fmt, time_unit=time_unit, use_cache=not no_cache)


def load_workload(config: "Scenario", no_cache: bool) -> "Trace":
    """The scenario's trace; raises TraceError."""
    from kvsim.workload.source import trace_of

    return trace_of(config, use_cache=not no_cache)


def engine_for(engine: str, config: "Scenario") -> Callable[["Scenario", "Trace"], "Simulation"]:
    """What makes a simulation with this engine; raises InvalidArgument when it cannot here."""
    if engine == FAST:
        from kvsim.run import simulation

        return simulation
    return vllm_engine(config)


def vllm_engine(config: "Scenario") -> Callable[["Scenario", "Trace"], "Simulation"]:
    """The same with vLLM's scheduler, for a scenario without a pool."""
    from kvcore.errors import InvalidArgument, require

    fix = "a scenario without [pool], [link] and host.cpu_bytes_to_use, such as nopool-16"
    require(config.offloading is None, "--engine", "vllm", fix)
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
    """Run, with a progress bar where somebody is looking; times that no clock holds are a mistake of the caller's."""
    import gc

    from kvsim.rows import TooLong

    if simulation.instances:  # whose run rests the collector, which would look through all it leaves at once
        gc.disable()
    try:
        with progress(simulation) if sys.stderr.isatty() and not as_json else nullcontext():
            simulation.run()
    except TooLong as error:
        refuse(str(error))
    finally:
        gc.freeze()  # what is left is no garbage: neither now nor at exit need anybody look for it
        gc.enable()


def write_out(folder: Path, simulation: "Simulation", result: Document, trace: "Trace") -> None:
    """Write the result into the folder."""
    from kvsim import results

    with failing_in_one_line(f"--out = {str(folder)!r}"):
        results.write(folder, simulation, result, trace)


@contextmanager
def failing_in_one_line(target: str) -> Iterator[None]:
    """A disk that does not take what is written ends the command with one line and exit code 1."""
    try:
        yield
    except OSError as error:
        print(one_line(f"{target}: not written: {error.strerror}"), file=sys.stderr)
        sys.exit(1)


def progress(simulation: "Simulation") -> Any:
    """The bar, on standard error."""
    from kvsim.progress import RunProgress
    from kvsim.tables import console

    return RunProgress(simulation, console(stderr=True))


def show(result: Document, table: str, as_json: bool, *context: int) -> None:
    """Print as JSON, or as the table of this name in `kvsim.tables`, which may need some context."""
    with failing_in_one_line("standard output"):
        if as_json:
            print(to_json(result), end="", flush=True)
            return
        from kvsim import tables

        render: Callable[..., RenderableType] = getattr(tables, table)
        tables.console().print(render(result, *context))


def process_age_s() -> float:
    """Seconds since this process began, interpreter start and imports included."""
    try:
        # Field 22 of proc_pid_stat(5), counted from after the name, which may hold anything but a closing bracket.
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")

"""A run's result: the document that `kvsim run --json` prints, and the folder that `--out` asks for."""

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from kvcore.errors import InvalidArgument
from kvsim import invariants
from kvsim.config.workload import TraceWorkload
from kvsim.document import Document
from kvsim.events import EventLog
from kvsim.metrics import measure
from kvsim.pool.disks import Disks
from kvsim.pool.store import MooncakePool
from kvsim.run import Simulation, decisions_digest
from kvsim.scenario import Scenario
from kvsim.workload.trace import Trace

COUNTS = ("requests_completed", "requests_rejected", "simulated_s")
OUT_EXPECTED = "a new or empty folder; nothing is ever overwritten"


def document(simulation: Simulation, engine: str, wall_s: Callable[[], float]) -> Document:
    """Everything about a run that is over, in the order in which it is printed; raises InvariantBroken.

    `wall_s` is asked last, so that it counts everything here. `events` are those of the log.
    """
    scenario = simulation.scenario
    checked = invariants.check(simulation)
    metrics = asdict(measure(simulation.log, scenario.num_gpus))
    rejected_reasons = metrics.pop("rejected_reasons")
    decided = decisions_digest(simulation.decisions())
    head = {
        "scenario": scenario.scenario.name,
        "engine": engine,
        "seed": scenario.scenario.seed,
        "digest": digest(simulation.log, decided),
        "decisions_digest": decided,
    }
    counts = {name: metrics.pop(name) for name in COUNTS}
    stopped = metrics.pop("requests_stopped")
    tail = {name: metrics.pop(name) for name in ("preemptions", "late_misses")}
    size = {"wall_s": wall_s(), "events": len(simulation.log)}
    return {
        **head,
        **counts,
        **size,
        **metrics,
        "num_gpus": scenario.num_gpus,
        **tail,
        "invariants": checked,
        "mode": scenario.workload.chosen(),
        "requests_stopped": stopped,
        "rejected_reasons": rejected_reasons,
        "pool": None if simulation.pool is None or scenario.pool is None else _pool(simulation.pool.store),
    }


def digest(log: EventLog, decided: str) -> str:
    """16 hex digits over everything that happened and everything that was decided."""
    return sha256(f"{log.digest()} {decided}".encode()).hexdigest()[:16]


def claim(path: str) -> Path:
    """The folder that results can go into; raises InvalidArgument unless it is new or empty."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise InvalidArgument("--out", str(folder), f"a folder that can be made ({error.strerror})") from None
    if not is_empty:
        raise InvalidArgument("--out", str(folder), OUT_EXPECTED)
    return folder


def write(folder: Path, simulation: Simulation, result: Document, trace: Trace) -> None:
    """Write the folder that `kvsim.result_folder` describes; raises OSError."""
    from kvsim import result_folder

    result_folder.write(folder, simulation, result, trace, scenario_toml(simulation.scenario))


def scenario_toml(scenario: Scenario) -> str:
    """The scenario with every default spelled out and the trace by its absolute path."""
    tables = scenario.model_dump(exclude_none=True)
    if isinstance(scenario.workload, TraceWorkload):
        tables["workload"]["trace"] = str(Path(scenario.workload.trace).absolute())
    return "\n".join(_toml_table(name, table) for name, table in tables.items())


def _toml_table(name: str, table: dict[str, object] | tuple[dict[str, object], ...]) -> str:
    """One table, or as many of an array."""
    if isinstance(table, tuple):
        return "\n".join(f"[[{name}]]\n{_toml_values(each)}" for each in table)
    return f"[{name}]\n{_toml_values(table)}"


def _toml_values(table: dict[str, object]) -> str:
    # JSON writes strings, integers, finite floats and booleans as TOML does, but for DEL.
    values = {key: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for key, value in table.items()}
    return "".join([f"{key} = {value}\n" for key, value in values.items()])


def _pool(store: MooncakePool) -> Document:
    """What is there at the end, of memory and disks, and what was counted."""
    size = {"capacity_bytes": store.capacity_bytes, "used_bytes": store.used_bytes}
    return {**size, "objects": store.num_objects, **_disks(store.disks), **asdict(store.counters)}


def _disks(disks: Disks | None) -> Document:
    if disks is None:
        return {"disk_capacity_bytes": 0, "disk_used_bytes": 0, "disk_objects": 0}
    size = {"disk_capacity_bytes": disks.capacity_bytes, "disk_used_bytes": disks.used_bytes}
    return {**size, "disk_objects": disks.num_objects}

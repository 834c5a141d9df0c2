"""A result as a folder: what `kvsim run --out` writes and `kvsim report` reads. The columns are in docs/REPORT.md.

scenario.toml       a run of it gives this result again
metrics.json        what `kvsim run --json` prints
run.json            what served: trace, machines, their links and memories, and the curve over capacity
events.parquet      what happened to requests (`kvsim.events`)
steps.parquet, transfers.parquet, loads.parquet, fills.parquet      what machines did meanwhile (`kvsim.usage`)
"""

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument
from kvsim import parquet
from kvsim.capacity import capacity_curve
from kvsim.document import Document, to_json
from kvsim.events import Kind
from kvsim.links.parcel import TIERS
from kvsim.metrics import Events
from kvsim.parquet import Named, Table
from kvsim.usage import HOST_MEMORY, Usage
from kvsim.workload.trace import Trace

if TYPE_CHECKING:
    from kvsim.run import Simulation

VERSION = 1
"""Counts changes of what is in a folder."""

TABLES = ("events", "steps", "transfers", "loads", "fills")
"""Each a Parquet file of its name."""

Column: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Result:
    """A folder, read."""

    folder: Path
    scenario: dict[str, Any]
    metrics: Document
    run: Document
    events: Table
    steps: Table
    transfers: Table
    loads: Table
    fills: Table


def write(folder: Path, simulation: "Simulation", metrics: Document, trace: Trace, scenario: str) -> None:
    """Write the result of a simulation that has run; `scenario` is the text of its file. Raises OSError."""
    usage, events = simulation.log.usage, Events(simulation.log)
    (folder / "scenario.toml").write_text(scenario, encoding="utf-8")
    (folder / "metrics.json").write_text(to_json(metrics), encoding="utf-8")
    (folder / "run.json").write_text(to_json(_about(simulation, events, trace)), encoding="utf-8")
    for name, table in _tables(events, usage).items():
        parquet.write(folder / f"{name}.parquet", name, VERSION, table)


def read(folder: Path) -> Result:
    """The result in the folder; raises InvalidArgument for anything that `write` has not written."""
    scenario = _parsed(folder, "scenario.toml", tomllib.loads)
    metrics, run = (_parsed(folder, name, json.loads) for name in ("metrics.json", "run.json"))
    if run.get("version") != VERSION:
        fix = f"{VERSION} in {folder / 'run.json'}: run the scenario again"
        raise InvalidArgument("version", run.get("version"), fix)
    tables = (parquet.read(folder / f"{name}.parquet", name, VERSION) for name in TABLES)
    return Result(folder, scenario, metrics, run, *tables)


def _parsed(folder: Path, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = f"a folder that `kvsim run --out` has written ({name}: {reason})"
        raise InvalidArgument("folder", str(folder), fix) from None
    return found


def _about(simulation: "Simulation", events: Events, trace: Trace) -> Document:
    scenario, usage = simulation.scenario, simulation.log.usage
    is_served = np.ones(trace.num_requests, dtype=np.bool_)
    is_served[events.of(Kind.REJECTED).request] = False
    return {
        "version": VERSION,
        "kvtwin": version("kvtwin"),
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "requests": trace.num_requests,
            "sessions": trace.num_sessions,
        },
        "instances": scenario.cluster.instances,
        "num_gpus": scenario.num_gpus,
        "block_size": scenario.engine.block_size,
        "block_bytes": max(1, scenario.kv_bytes_per_token * scenario.engine.block_size),
        "gpu_blocks_per_instance": scenario.num_gpu_blocks - 1,
        "host_bytes": sum(memory.capacity_bytes for memory in usage.memories if memory.kind == HOST_MEMORY),
        "pool_bytes": sum(memory.capacity_bytes for memory in usage.memories if memory.kind != HOST_MEMORY),
        "links": [asdict(link) for link in usage.links],
        "memories": [asdict(memory) for memory in usage.memories],
        "capacity": capacity_curve(trace, scenario.engine.block_size, is_served).to_json(),
    }


def _tables(events: Events, usage: Usage) -> dict[str, Table]:
    every = events.all
    kinds = Named(tuple(kind.name for kind in Kind), every.kind)
    transfers, loads, fills = usage.transfers.columns(), usage.loads.columns(), usage.fills.columns()
    link, memory, tier = transfers.pop("link"), fills.pop("memory"), loads.pop("tier")
    instances = np.array([info.instance for info in usage.links], dtype=np.int64)
    return {
        "events": {"time_ps": every.time_ps, "kind": kinds, "request": every.request, "a": every.a, "b": every.b},
        "steps": {**usage.steps.columns()},
        "transfers": {
            **transfers,
            "link": _named([info.kind for info in usage.links], link),
            "instance": instances[link],
        },
        "loads": {**loads, "tier": Named(tuple(tier.value for tier in TIERS), tier)},
        "fills": {**fills, "memory": _named([info.kind for info in usage.memories], memory)},
    }


def _named(kinds: Sequence[str], number: Column) -> Named:
    """Each row's kind, of the number of what is of that kind."""
    names = tuple(dict.fromkeys(kinds))
    code_of = np.array([names.index(kind) for kind in kinds], dtype=np.int64)
    return Named(names, code_of[number])

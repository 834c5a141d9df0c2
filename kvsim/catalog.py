"""The numbers of models and devices, read from `models/*/*.toml`; each section says where its numbers come from.

A wheel carries the folder as `kvsim/models`; a checkout has it as `models/` beside `kvsim/`.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from kvcore.errors import InvalidArgument
from kvsim import toml
from kvsim.llm.model import LlmModel as LlmModel
from kvsim.sourced import Sourced
from kvsim.toml import PositiveCount, Table

Percent = Annotated[int, Field(gt=0, le=100)]


class Compute(Sourced):
    """Peak dense rates of one GPU."""

    bf16_flops_per_s: PositiveCount
    fp8_flops_per_s: PositiveCount | None = None
    """None where there are no such units."""
    fp4_flops_per_s: PositiveCount | None = None


class Memory(Sourced):
    """HBM of one GPU."""

    capacity_bytes: PositiveCount
    bandwidth_bytes_per_s: PositiveCount


class Network(Sourced):
    """Links of one GPU, per direction."""

    nvlink_bytes_per_s: PositiveCount
    """Of PCIe where there is no NVLink."""
    nic_bytes_per_s: PositiveCount
    pcie_bytes_per_s: PositiveCount
    gpus_per_node: PositiveCount


class Host(Sourced):
    """A CPU that shares its memory with its GPUs."""

    memory_bytes: PositiveCount
    gpus_per_cpu: PositiveCount
    c2c_bytes_per_s: PositiveCount
    """Between the CPU and all of its GPUs, per direction."""


class Kernels(Sourced):
    """What kernels reach of the peaks."""

    prefill_flops_utilisation_percent: Percent
    decode_flops_utilisation_percent: Percent
    memory_utilisation_percent: Percent
    small_op_latency_ns: PositiveCount


class Device(Table):
    """One GPU."""

    name: str
    description: str
    compute: Compute
    memory: Memory
    network: Network
    host: Host | None = None
    """None where the host is any server behind PCIe."""
    kernels: Kernels


class Measured(Sourced):
    """What a table of step times was measured on."""

    model: str
    device: str
    tensor_parallel_size: PositiveCount
    data_parallel_size: PositiveCount
    enable_expert_parallel: bool
    """Of no meaning, and false, where there are no experts."""


class StepTable(Table):
    """Step times of one model on one kind of instance; the numbers lie beside it, see `step_times`."""

    name: str
    description: str
    measured: Measured


EntryT = TypeVar("EntryT", LlmModel, Device, StepTable)


def llm_model(name: str) -> LlmModel:
    """The model of that name; raises InvalidArgument when there is none, InvalidToml when its file is wrong."""
    return _load(LlmModel, "llm", name)


def device(name: str) -> Device:
    """The device of that name; raises InvalidArgument when there is none, InvalidToml when its file is wrong."""
    return _load(Device, "devices", name)


def step_table(name: str) -> StepTable:
    """The table of that name; raises InvalidArgument when there is none, InvalidToml when its file is wrong."""
    return _load(StepTable, "step_times", name)


def step_times(name: str, phase: str) -> str:
    """The CSV text of the table's `prefill` or `decode`, see models/step_times/README.md."""
    return (_root() / "step_times" / f"{name}_{phase}.csv").read_text(encoding="utf-8")


def llm_models() -> list[str]:
    """Names of all models."""
    return _names("llm")


def devices() -> list[str]:
    """Names of all devices."""
    return _names("devices")


def step_tables() -> list[str]:
    """Names of all tables of step times."""
    return _names("step_times")


def _load(table: type[EntryT], folder: str, name: str) -> EntryT:
    known = _names(folder)
    if name not in known:
        raise InvalidArgument("name", name, f"one of {', '.join(known)}, or a new file models/{folder}/{name}.toml")
    entry = toml.load(table, _root() / folder / f"{name}.toml")
    if entry.name != name:
        raise toml.InvalidToml(f"models/{folder}/{name}.toml", "name", entry.name, f"the file's own name, {name!r}")
    return entry


def _names(folder: str) -> list[str]:
    paths = (_root() / folder).iterdir()
    return sorted(path.name.removesuffix(".toml") for path in paths if path.name.endswith(".toml"))


def _root() -> Traversable:
    packaged = files("kvsim") / "models"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent / "models"

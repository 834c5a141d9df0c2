"""The one configuration object of a simulation: a TOML file or a shipped name, plus `section.key=value` overrides."""

import os
import tomllib
from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from kvcore.engine.blocks import require_simulated
from kvcore.errors import InvalidArgument, clipped
from kvcore.masks import Retention
from kvcore.spec import ModelSpec
from kvsim import catalog, toml
from kvsim.catalog import Device, LlmModel
from kvsim.config.cluster import ClusterConfig, DeviceChoice, EngineConfig, ModelChoice, RoutingConfig
from kvsim.config.faults import FaultConfig
from kvsim.config.links import DriveConfig, HostConfig, LinkConfig, NetworkConfig
from kvsim.config.mode import Mode
from kvsim.config.pool import PoolConfig
from kvsim.config.workload import TraceWorkload, Workload
from kvsim.cost.backends import make_step_time
from kvsim.cost.step_time import StepTimeModel
from kvsim.llm.groups import KVGroup, gpu_block_bytes
from kvsim.llm.model import ExpertPlacement, RankWeights
from kvsim.toml import Count, InvalidToml, Table


class About(Table):
    """What the scenario is."""

    name: str
    description: str
    seed: Count = 0


class Scenario(Table):
    """Everything a run depends on. Sections are TOML tables; [pool] comes with [link] or [network]."""

    scenario: About
    model: ModelChoice
    device: DeviceChoice
    cluster: ClusterConfig
    routing: RoutingConfig = RoutingConfig()
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig | None = None
    link: LinkConfig | None = None
    network: NetworkConfig | None = None
    host: HostConfig = HostConfig()
    nvme: DriveConfig | None = None
    workload: Workload
    faults: Annotated[tuple[FaultConfig, ...], BeforeValidator(tuple)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        self._check_division()
        self._check_groups()
        ways = (self.link is not None) + (self.network is not None)
        if self.pool is None and (ways or self.nvme is not None):
            raise ValueError("[pool] beside [link], [network] and [nvme], or none of them")
        if self.pool is not None and ways != 1:
            found = "both" if ways else "neither"
            raise ValueError(f"one way to the pool beside [pool], [link] or [network], not {found}")
        if self.nvme is not None and self.pool is not None and not self.pool.enable_offload:
            raise ValueError("pool.enable_offload = true beside [nvme]")
        _ = self.step_time
        self._check_gpu_memory()
        if self.pool is not None:
            self._check_retention(self.pool.retention_interval)
            self._check_segments(self.pool)
        self._check_faults()
        return self

    def _check_division(self) -> None:
        try:
            _ = self.kv_groups, self.rank_weights
        except InvalidArgument as error:
            raise ValueError(f"engine.{error.argument} to be {error.expected}, not {error.value}") from None

    def _check_gpu_memory(self) -> None:
        if self.num_gpu_blocks >= 2:
            return
        sizes = (self._usable_bytes, self.rank_weights.size_bytes, self.engine.reserved_bytes)
        usable_gb, weights_gb, reserved_gb = (f"{size_bytes / 1e9:.1f} GB" for size_bytes in sizes)
        raise ValueError(
            f"room for two KV blocks: of {usable_gb} of a GPU ({self.device.name} x engine.gpu_memory_utilization)"
            f" weights take {weights_gb} and engine.reserved_bytes {reserved_gb}; raise engine.tensor_parallel_size,"
            " or take a larger device"
        )

    def _check_segments(self, pool: PoolConfig) -> None:
        whole, parts = pool.segment_bytes_per_instance, pool.segments_per_instance
        if whole < parts:
            raise ValueError(
                f"pool.segment_bytes_per_instance of at least {parts} (segments_per_instance), not {whole}"
            )

    def _check_faults(self) -> None:
        if self.faults and self.pool is None:
            raise ValueError("[pool] beside [[faults]]")
        for fault in self.faults:
            if fault.instance >= self.cluster.instances:
                below = self.cluster.instances
                raise ValueError(f"faults.instance below {below} (cluster.instances), not {fault.instance}")

    def _check_groups(self) -> None:
        try:
            require_simulated(self.kv_model)
        except InvalidArgument as error:
            raise ValueError(f"{error.expected}; a group of {self.model.name} is {error.value}") from None
        engine, step = self.engine, self.kv_model.alignment
        retention = engine.prefix_cache_retention_interval
        if retention and retention % step:
            raise ValueError(
                f"engine.prefix_cache_retention_interval to be a multiple of {step} tokens, not {retention}"
            )

    def _check_retention(self, retention: Retention) -> None:
        model = self.kv_model
        intervals = retention if isinstance(retention, tuple) else (retention,) * len(model.groups)
        if len(intervals) != len(model.groups):
            raise ValueError(f"{len(model.groups)} pool.retention_interval, one for each group, not {len(intervals)}")
        for interval in intervals:
            if interval is not None and interval % model.alignment:
                multiple = f"a multiple of {model.alignment} tokens (engine.block_size)"
                raise ValueError(f"pool.retention_interval to be {multiple}, not {interval}")

    @cached_property
    def llm(self) -> LlmModel:
        """The chosen model."""
        return catalog.llm_model(self.model.name)

    @cached_property
    def gpu(self) -> Device:
        """The chosen device."""
        return catalog.device(self.device.name)

    @cached_property
    def step_time(self) -> StepTimeModel:
        """How long a step of one instance takes."""
        return make_step_time(self.engine, self.llm, self.gpu)

    @cached_property
    def kv_model(self) -> ModelSpec:
        """The same groups, for kvcore."""
        return ModelSpec(tuple(group.spec for group in self.kv_groups))

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV cache groups of the model in this engine, as vLLM makes them."""
        dtype = self.engine.kv_cache_dtype
        asked = None if dtype == "auto" else dtype
        return self.llm.kv_groups(self.engine.block_size, self.engine.tensor_parallel_size, asked)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Per group, what one block (or the states at one boundary) takes in the pool: of all ranks, replicas once."""
        return tuple(group.pool_bytes for group in self.kv_groups)

    @cached_property
    def gpu_block_bytes(self) -> int:
        """What one block takes of each GPU's memory, whichever group has it."""
        return gpu_block_bytes(self.kv_groups)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """In the pool, of the groups that need all of the past."""
        closed = self.kv_model.closed_groups
        return sum(self.block_bytes[group] // self.kv_model.groups[group].block_size for group in closed)

    @cached_property
    def rank_weights(self) -> RankWeights:
        """The weights of one GPU."""
        engine = self.engine
        placement = ExpertPlacement.WHOLE if engine.enable_expert_parallel else ExpertPlacement.CUT
        return self.llm.rank_weights(engine.tensor_parallel_size, engine.data_parallel_size, placement)

    @cached_property
    def num_gpu_blocks(self) -> int:
        """KV blocks of one instance: the override, else what weights and reserve leave of the memory it may use."""
        if self.engine.num_gpu_blocks is not None:
            return self.engine.num_gpu_blocks
        free_bytes = self._usable_bytes - self.rank_weights.size_bytes - self.engine.reserved_bytes
        return free_bytes // self.gpu_block_bytes * self.engine.data_parallel_size

    @property
    def _usable_bytes(self) -> int:
        """Of each GPU's memory."""
        return int(self.gpu.memory.capacity_bytes * Fraction(str(self.engine.gpu_memory_utilization)))

    @property
    def num_gpus(self) -> int:
        """GPUs of the cluster."""
        return self.cluster.instances * self.engine.num_gpus

    @property
    def offloading(self) -> PoolConfig | None:
        """What requests load from and store to: the pool, or a private cache alone, with a pool's patience; or None."""
        alone = PoolConfig(segment_bytes_per_instance=1) if self.host.cpu_bytes_to_use else None
        return self.pool or alone

    @property
    def pool_capacity_bytes(self) -> int:
        """Host memory of the whole pool; 0 without one."""
        return 0 if self.pool is None else self.pool.segment_bytes_per_instance * self.cluster.instances


def load(source: str, overrides: Iterable[str] = (), trace: TraceWorkload | None = None) -> Scenario:
    """The scenario of a file or a shipped name, after `section.key=value` overrides; `trace` replaces the workload,
    whose mode can be set all the same.

    Raises InvalidToml, whose message is one line.
    """
    path = _path(source)
    data = toml.read(path)
    origin = path.name if path.name.removesuffix(".toml") == source else source
    if trace is not None:
        data["workload"] = trace.model_dump(exclude_defaults=True)
    for override in overrides:
        section, _, key = override.partition("=")[0].strip().partition(".")
        if trace is not None and section == "workload" and key not in Mode.model_fields:
            modes = ", ".join(Mode.model_fields)
            raise _wrong(override, f"no setting of [workload] beside a trace, which replaces it, but {modes}")
        _apply(data, override)
    return toml.validate(Scenario, data, origin)


def scenarios() -> dict[str, str]:
    """Name and description of every shipped scenario."""
    return {name: load(name).scenario.description for name in _shipped_names()}


def text(name: str) -> str:
    """The file of a shipped scenario, to begin one's own with; raises InvalidToml for another name."""
    if name not in _shipped_names():
        raise InvalidToml(clipped(name), "", None, f"a shipped scenario: {toml.hint(name, _shipped_names())}")
    return _path(name).read_text(encoding="utf-8")


def _path(source: str) -> Traversable:
    if source in _shipped_names():
        return _shipped() / f"{source}.toml"
    if source.endswith(".toml") or os.path.exists(source):  # which takes any text, Path.exists() does not
        return Path(source)
    raise InvalidToml(clipped(source), "", None, f"a .toml file or {toml.hint(source, _shipped_names())}")


def _shipped() -> Traversable:
    return files("kvsim") / "scenarios"


def _shipped_names() -> list[str]:
    names = (path.name for path in _shipped().iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `data`; the value in TOML syntax, else taken as text."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise _wrong(override, "section.key=value")
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise _wrong(override, f"a section, and {key} is a value")
    data[keys[-1]] = _value(text.strip())


def _wrong(override: str, expected: str) -> InvalidToml:
    return InvalidToml(f"--set {clipped(override)}", "", None, expected)


def _value(text: str) -> object:
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text

"""The one configuration object of a simulation: a TOML file or a shipped name, plus `section.key=value` overrides."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from kvcore.errors import clipped
from kvcore.masks import Retention
from kvcore.spec import FullAttention, ModelSpec
from kvsim import catalog, toml
from kvsim.catalog import Device, LlmModel
from kvsim.pool_config import LinkConfig, PoolConfig
from kvsim.toml import Count, InvalidToml, PositiveCount, PositiveRatio, Ratio, Table
from kvsim.workload.names import FormatName, TimeUnit


class About(Table):
    """What the scenario is."""

    name: str
    description: str
    seed: Count = 0


class ModelChoice(Table):
    """A model of the catalogue."""

    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return toml.one_of(name, catalog.llm_models())


class DeviceChoice(Table):
    """A device of the catalogue."""

    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return toml.one_of(name, catalog.devices())


ROUTINGS = ("round_robin", "least_loaded", "session_affinity", "prefix_aware", "pool_aware")
"""Routing policies by name; see docs/POLICIES.md."""


class ClusterConfig(Table):
    """Identical instances behind one router."""

    instances: Annotated[PositiveCount, Field(le=65_536)]
    gpus_per_instance: Literal[1] = 1
    routing: str = "round_robin"

    @field_validator("routing")
    @classmethod
    def _known(cls, name: str) -> str:
        return toml.one_of(name, ROUTINGS)


class RoutingConfig(Table):
    """Parameters of the routing policies, under their sources' names; each policy reads its own."""

    snapshot_interval_ms: Count = 50
    """How old loads and cached prefixes may be: llm-d's `--refresh-metrics-interval` (50 ms); vLLM's data-parallel
    coordinator reports every 100 ms."""
    overlap_score_credit: Ratio = 1.0
    """prefix_aware, Dynamo's `--router-kv-overlap-score-credit`: how much of a cached token counts as computed."""
    prefill_load_scale: Annotated[float, Field(ge=0)] = 1.0
    """prefix_aware, Dynamo's `--router-prefill-load-scale`: a token to compute against one to decode over."""
    prefill_ns_per_token: Count | None = None
    """pool_aware: time to compute a token; by default that of a full step of the scenario's model on its device."""
    transfer_ns_per_token: Count | None = None
    """pool_aware: time to fetch a token; by default that of the scenario's link, alone on it."""


class EngineConfig(Table):
    """One engine; names and defaults of vLLM's EngineArgs where it has them."""

    block_size: PositiveCount = 16
    max_num_seqs: PositiveCount = 1024
    max_num_batched_tokens: PositiveCount = 8192
    gpu_memory_utilization: PositiveRatio = 0.9
    reserved_bytes: Count = 3_274_912_563
    """GPU memory that is neither weights nor KV: activation peak 1.26 GiB + non-torch 1.79 GiB, as vLLM's profiling run
    printed for an 8B Llama on one H100 (github.com/vllm-project/vllm/pull/10511, 2024-12-14)."""
    num_gpu_blocks: Annotated[PositiveCount, Field(ge=2)] | None = None
    """Overrides the number derived from memory. One of them holds nothing, vLLM's null block."""
    watermark: Ratio = 0.0
    """Share of the blocks kept free when a waiting request is admitted; vLLM's KVCacheManager(watermark=0.0)."""


GENERATORS = ("agentic", "codex")


class AgenticWorkload(Table):
    """Sessions that never shrink: turn t's prompt is all before it plus `turn_len` new tokens."""

    generator: str
    sessions: PositiveCount
    turns: PositiveCount
    common_len: Count
    """Tokens all sessions share (system prompt and tools)."""
    first_len: Count
    """Tokens of a session's own first input, after the common ones."""
    turn_len: PositiveCount
    """New input tokens of each later turn, after the last answer."""
    output_len: PositiveCount
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    """Pause between an answer and the session's next turn."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Sessions start uniformly at random in [0, start_spread_s); 0 starts all at once."""

    @field_validator("generator")
    @classmethod
    def _known(cls, name: str) -> str:
        return toml.one_of(name, GENERATORS)


class CodexWorkload(Table):
    """Codex on SWE-bench Pro, as `kvsim.workload.codex` generates it; what is not set has that module's default."""

    generator: Literal["codex"]
    sessions: Annotated[PositiveCount, Field(le=100_000)]
    shared_len: Annotated[Count, Field(le=11_520)] | None = None
    """Tokens all sessions share: 11,520 as at the provider, 902 as the published texts replay."""
    missed_len: Annotated[float, Field(ge=0)] | None = None
    """Tokens a call that the provider is to have missed; changes reports only."""
    answers: Literal["recorded", "generated"] | None = None
    """What the next prompt holds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Sessions start uniformly at random in [0, start_spread_s); 0 starts all at once."""


class TraceWorkload(Table):
    """A recorded trace; the format is sniffed by content when not given."""

    trace: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), AfterValidator(os.path.expanduser)]
    format: FormatName | None = None
    time_unit: TimeUnit | None = None
    """What the trace's times count, instead of its format's unit."""


def _workload_kind(data: object) -> str:
    is_trace = isinstance(data, TraceWorkload) or (isinstance(data, Mapping) and "trace" in data)
    is_codex = isinstance(data, CodexWorkload) or (isinstance(data, Mapping) and data.get("generator") == "codex")
    return "<trace>" if is_trace else "<codex>" if is_codex else "<agentic>"


Workload = Annotated[
    Annotated[AgenticWorkload, Tag("<agentic>")]
    | Annotated[CodexWorkload, Tag("<codex>")]
    | Annotated[TraceWorkload, Tag("<trace>")],
    Discriminator(_workload_kind),
]


class Scenario(Table):
    """Everything a run depends on. Sections are TOML tables; [pool] and [link] come together or not at all."""

    scenario: About
    model: ModelChoice
    device: DeviceChoice
    cluster: ClusterConfig
    routing: RoutingConfig = RoutingConfig()
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig | None = None
    link: LinkConfig | None = None
    workload: Workload

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        if (self.pool is None) != (self.link is None):
            raise ValueError("both [pool] and [link], or neither")
        if self.num_gpu_blocks < 2:
            raise ValueError("weights and engine.reserved_bytes below device memory x engine.gpu_memory_utilization")
        if self.pool is not None:
            self._check_retention(self.pool.retention_interval)
        return self

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
    def kv_model(self) -> ModelSpec:
        """The KV cache groups of the model."""
        return ModelSpec((FullAttention(self.engine.block_size),))

    @cached_property
    def block_bytes(self) -> int:
        """KV of one block over all layers."""
        return self.llm.kv_bytes_per_token * self.engine.block_size

    @cached_property
    def num_gpu_blocks(self) -> int:
        """KV blocks of one instance: the override, else what weights and reserve leave of the memory it may use."""
        if self.engine.num_gpu_blocks is not None:
            return self.engine.num_gpu_blocks
        usable_bytes = int(self.gpu.memory.capacity_bytes * Fraction(str(self.engine.gpu_memory_utilization)))
        return (usable_bytes - self.llm.weight_bytes - self.engine.reserved_bytes) // self.block_bytes

    @property
    def num_gpus(self) -> int:
        """GPUs of the cluster."""
        return self.cluster.instances * self.cluster.gpus_per_instance

    @property
    def pool_capacity_bytes(self) -> int:
        """Host memory of the whole pool; 0 without one."""
        return 0 if self.pool is None else self.pool.segment_bytes_per_instance * self.cluster.instances


def load(source: str, overrides: Iterable[str] = (), trace: TraceWorkload | None = None) -> Scenario:
    """The scenario of a file or a shipped name, after `section.key=value` overrides; `trace` replaces the workload.

    Raises InvalidToml, whose message is one line.
    """
    path = _path(source)
    data = toml.read(path)
    origin = path.name if path.name.removesuffix(".toml") == source else source
    for override in overrides:
        if trace is not None and override.lstrip().startswith("workload."):
            raise _wrong(override, "no setting of [workload] beside a trace, which replaces it")
        _apply(data, override)
    if trace is not None:
        data["workload"] = trace
    return toml.validate(Scenario, data, origin)


def scenarios() -> dict[str, str]:
    """Name and description of every shipped scenario."""
    return {name: load(name).scenario.description for name in _shipped_names()}


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

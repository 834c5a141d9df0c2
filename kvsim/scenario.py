"""The one configuration object of a simulation: a TOML file or a shipped name, plus `section.key=value` overrides."""

import difflib
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
    PlainValidator,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvcore.errors import clipped
from kvcore.masks import Retention
from kvcore.plans import PoolPolicy
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import NS_PER_MS
from kvsim import catalog, toml
from kvsim.catalog import Device, LlmModel
from kvsim.clock import PS_PER_NS, PS_PER_US
from kvsim.toml import Count, InvalidToml, PositiveCount, Table

_PATIENCE = PoolPolicy()
"""What the connector's patience with the pool is unless told otherwise."""

Ratio = Annotated[float, Field(ge=0, le=1)]
PositiveRatio = Annotated[float, Field(gt=0, le=1)]


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
        return _one_of(name, catalog.llm_models())


class DeviceChoice(Table):
    """A device of the catalogue."""

    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return _one_of(name, catalog.devices())


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
        return _one_of(name, [*ROUTINGS])


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


EVICTIONS = ("mooncake", "lru", "leaf_first", "session_aware")
ADMISSIONS = ("all", "second_touch", "cheaper")
LOADINGS = ("always", "cheaper", "in_time")
"""Policies of the pool by name; see docs/POLICIES.md."""


def _retention(value: object) -> Retention:
    """Intervals as TOML can write them, which has no null: "all" keeps every length resumable."""
    return tuple(map(_interval, value)) if isinstance(value, list | tuple) else _interval(value)


def _interval(value: object) -> int | None:
    if value is None or value == "all":
        return None
    value = toml.whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError('"all", 0 or a number of tokens, or a list with one of these for each group')
    return value


class PoolConfig(Table):
    """The shared store; names and defaults of `mooncake_master` 0.3.13.post1 (0.3.7 had a TTL of 5,000 ms and 0.95)."""

    segment_bytes_per_instance: PositiveCount
    """Host memory each instance gives to the pool."""
    lookup_rtt_us: Count = 50
    """Round trip of a lookup of one key: `batch_is_exist` against a master on loopback (0.3.13.post1, 2 cores, p50 of
    200 calls, 2026-11-29); add the network's own."""
    lookup_per_key_ns: Count = 1_000
    """Slope of the same measurement: 8,192 present keys took 8.0 ms (absent ones 4.5 ms)."""
    lookup_deadline_ms: PositiveCount = _PATIENCE.lookup_deadline_ns // NS_PER_MS
    """A lookup that takes longer is a miss."""
    offer_ttl_ms: PositiveCount = _PATIENCE.offer_ttl_ns // NS_PER_MS
    """How long a request that finds no room is offered the same hit before the pool is asked again."""
    max_load_attempts: PositiveCount = _PATIENCE.max_load_attempts
    """After so many failed loads a request recomputes what it was promised."""
    lease_ttl_ms: Count = 10_000
    """`default_kv_lease_ttl`: an object found by a lookup is not evicted for this long."""
    eviction_high_watermark_ratio: PositiveRatio = 0.9
    eviction_ratio: PositiveRatio = 0.05
    eviction: str = "mooncake"
    """Which of the objects that may go goes first: the one the master takes, or (what if) another policy's choice."""
    retention_interval: Annotated[Retention, PlainValidator(_retention)] = None
    """Tokens between the boundaries that a writer of a sparse group keeps, of all groups or of each; "all" keeps every
    boundary, 0 the replay boundary only. A group of full attention always keeps all blocks."""
    session_pin: Literal["none", "soft"] = "none"
    """Whether what a session stores is soft-pinned until the session ends (the store knows its end: every one of its
    requests has completed), or until `session_ttl_s`."""
    session_ttl_s: PositiveCount = 1_800
    """`default_kv_soft_pin_ttl`: how long a soft pin lasts, counted from the put."""
    allow_evict_soft_pinned_objects: bool = True
    """Whether soft-pinned objects go when the others do not suffice."""
    admission: str = "all"
    """Which blocks are stored: all, those had before (`second_touch`), or those `cheaper` to fetch than to compute."""
    loading: str = "always"
    """Which hits are loaded: all, those `cheaper` to fetch than to compute, or also those that are there `in_time`."""
    load_budget_ms: Annotated[Count | None, Field(validate_default=True)] = None
    """What a load may take and be in time, alone on its link."""

    @field_validator("eviction")
    @classmethod
    def _known_eviction(cls, name: str) -> str:
        return _one_of(name, [*EVICTIONS])

    @field_validator("admission")
    @classmethod
    def _known_admission(cls, name: str) -> str:
        return _one_of(name, [*ADMISSIONS])

    @field_validator("loading")
    @classmethod
    def _known_loading(cls, name: str) -> str:
        return _one_of(name, [*LOADINGS])

    @field_validator("load_budget_ms")
    @classmethod
    def _has_a_use(cls, load_budget_ms: int | None, others: ValidationInfo) -> int | None:
        if (load_budget_ms is not None) != (others.data.get("loading") == "in_time"):
            raise ValueError('a number of milliseconds with pool.loading = "in_time", and no such key without it')
        return load_budget_ms

    def lookup_ps(self, num_keys: int) -> int:
        """How long the master takes to answer for `num_keys` keys."""
        return self.lookup_rtt_us * PS_PER_US + self.lookup_per_key_ns * PS_PER_NS * num_keys


class LinkConfig(Table):
    """The path between one instance and the pool, per direction; concurrent transfers share it equally."""

    latency_us: Count = 10
    """Point-to-point latency of aiconfigurator 0.12.0 (p2p_latency of its system files)."""
    bandwidth_bytes_per_s: PositiveCount = 9_878_424_780
    """9.2 GiB/s, a vLLM instance's measured get from the Mooncake store (public notes of fork ivanium/vllm, PR 5, April
    2026). The NIC's line rate is 50e9 per H100; the bare transfer engine has reached 23.75e9 per 400 Gb/s NIC."""


class AgenticWorkload(Table):
    """Sessions that never shrink: turn t's prompt is all before it plus `turn_len` new tokens."""

    generator: Literal["agentic"]
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


class TraceWorkload(Table):
    """A recorded trace; the format is sniffed by content when not given."""

    trace: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), AfterValidator(os.path.expanduser)]
    format: Literal["mooncake", "claude-code", "decision-log"] | None = None


def _workload_kind(data: object) -> str:
    is_trace = isinstance(data, TraceWorkload) or (isinstance(data, Mapping) and "trace" in data)
    return "<trace>" if is_trace else "<agentic>"


Workload = Annotated[
    Annotated[AgenticWorkload, Tag("<agentic>")] | Annotated[TraceWorkload, Tag("<trace>")],
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
    raise InvalidToml(clipped(source), "", None, f"a .toml file or {_hint(source, _shipped_names())}")


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


def _one_of(name: str, known: list[str]) -> str:
    if name not in known:
        raise ValueError(_hint(name, known))
    return name


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"a known name; did you mean {near[0]}?" if near else f"one of {', '.join(known)}"

"""The shared pool and the way to it in a scenario: the tables `[pool]` and `[link]`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator

from kvcore.hints import MAX_PRIORITY
from kvcore.masks import Retention
from kvcore.plans import DEFAULT_STORING_SHARE, PoolPolicy
from kvcore.units import NS_PER_MS
from kvsim import toml
from kvsim.clock import PS_PER_NS, PS_PER_US
from kvsim.config.retention import retention
from kvsim.toml import Count, PositiveCount, PositiveRatio, Table

_PATIENCE = PoolPolicy()
"""What the connector's patience with the pool is unless told otherwise."""

EVICTIONS = ("mooncake", "lru", "leaf_first", "session_aware")
ADMISSIONS = ("all", "second_touch", "cheaper")
LOADINGS = ("always", "cheaper", "in_time")
STRATEGIES = ("random", "free_ratio_first", "local_first")
"""Policies of the pool by name; see docs/POLICIES.md."""


Priority = Annotated[Count, Field(le=MAX_PRIORITY)]


def _each(value: object) -> object:
    """A tuple, of one where TOML has no list."""
    if not isinstance(value, list | tuple):
        return (value,)
    if not value:
        raise ValueError(f"a number from 0 to {MAX_PRIORITY}, or a list with one or more of these")
    return tuple(value)


class PoolConfig(Table):
    """The shared store; names and defaults of `mooncake_master` 0.3.13.post1 (0.3.7 had a TTL of 5,000 ms and 0.95)."""

    segment_bytes_per_instance: PositiveCount
    """Host memory each instance gives to the pool."""
    segments_per_instance: Annotated[PositiveCount, Field(le=1_024)] = 1
    """In how many segments of one size that is, each of a client of its own: as many as ranks, say."""
    allocation_strategy: Annotated[str, toml.one_of(STRATEGIES)] = "random"
    """`allocation_strategy`: which segment an object goes to; `cxl` and `ssd_free_ratio_first` are not simulated."""
    replica_num: PositiveCount = 1
    """`replica_num` of a put: copies, in segments of their own; fewer where there is no room for more."""
    preferred_segment: Literal["none", "own"] = "none"
    """`preferred_segment` of a put: none, or that of the instance that stores, as long as there is room."""
    client_ttl_s: PositiveCount = 10
    """`client_ttl`: how long the master believes in a client that is dead."""
    enable_offload: bool = False
    """`enable_offload`: whether there is a disk below each instance's memory."""
    offload_on_evict: bool = False
    """`offload_on_evict`: whether an object is written to disk when memory evicts it; otherwise when it is stored."""
    offload_force_evict: bool = False
    """`offload_force_evict`: whether memory evicts what no disk takes; otherwise it stays there."""
    disk_bytes_per_instance: PositiveCount = 2_199_023_255_552
    """`MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES` of the client, of all its clients together."""
    bucket_eviction_policy: Literal["none", "fifo", "lru"] = "none"
    """`MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY`: what goes from a full disk; none: it takes nothing more."""
    offload_local_buffer_bytes: PositiveCount = 1_342_177_280
    """`MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES`: what of one load a client can read from its disk; the rest fails."""
    offload_heartbeat_interval_s: PositiveCount = 10
    """`MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS`: how often a client takes what is to be promoted."""
    promotion_on_hit: bool = False
    """`promotion_on_hit`: whether what is read from disk comes back to memory, too."""
    promotion_admission_threshold: PositiveCount = 2
    """`promotion_admission_threshold`: at which read."""
    promotion_max_per_heartbeat: PositiveCount = 1
    """`promotion_max_per_heartbeat`: how many objects of each client."""
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
    max_storing_share: PositiveRatio = DEFAULT_STORING_SHARE
    """Of an instance's blocks, what stores in flight may pin; what finds no room is offered again later."""
    lease_ttl_ms: Count = 10_000
    """`default_kv_lease_ttl`: an object found by a lookup is not evicted for this long."""
    eviction_high_watermark_ratio: PositiveRatio = 0.9
    eviction_ratio: PositiveRatio = 0.05
    eviction: Annotated[str, toml.one_of(EVICTIONS)] = "mooncake"
    """Which of the objects that may go goes first: the one the master takes, or (what if) another policy's choice."""
    retention_interval: Annotated[Retention, PlainValidator(retention)] = None
    """Tokens between the boundaries that a writer of a sparse group keeps, of all groups or of each; "all" keeps every
    boundary, 0 the replay boundary only. A group of full attention always keeps all blocks."""
    session_pin: Literal["none", "soft", "hard"] = "none"
    """How what a session stores is pinned until the session ends (the store knows its end: every one of its requests
    has completed). A soft pin also ends after `session_ttl_s`. What is pinned hard is not evicted: puts are refused."""
    session_ttl_s: PositiveCount = 1_800
    """`default_kv_soft_pin_ttl`: how long a soft pin lasts, counted from the put."""
    session_priority: Annotated[tuple[Priority, ...], BeforeValidator(_each)] = (0,)
    """Of blocks pinned alike, those of less priority go first: one number for all sessions, or a list that they take
    theirs from in turn. It outlasts the session."""
    allow_evict_soft_pinned_objects: bool = True
    """Whether soft-pinned objects go when the others do not suffice."""
    admission: Annotated[str, toml.one_of(ADMISSIONS)] = "all"
    """Which blocks are stored: all, those had before (`second_touch`), or those `cheaper` to fetch than to compute."""
    loading: Annotated[str, toml.one_of(LOADINGS)] = "always"
    """Which hits are loaded: all, those `cheaper` to fetch than to compute, or also those that are there `in_time`."""
    load_budget_ms: Annotated[Count | None, Field(validate_default=True)] = None
    """How long after the request was first considered a load is in time, if it is alone on its link."""

    @field_validator("offload_on_evict", "offload_force_evict", "promotion_on_hit")
    @classmethod
    def _has_a_disk(cls, wanted: object, others: ValidationInfo) -> object:
        if wanted and not others.data.get("enable_offload"):
            raise ValueError("false, or pool.enable_offload = true beside it")
        return wanted

    @field_validator("load_budget_ms")
    @classmethod
    def _has_a_use(cls, load_budget_ms: int | None, others: ValidationInfo) -> int | None:
        if (load_budget_ms is not None) != (others.data.get("loading") == "in_time"):
            raise ValueError('a number of milliseconds with pool.loading = "in_time", and no such key without it')
        return load_budget_ms

    def lookup_ps(self, num_keys: int) -> int:
        """How long the master takes to answer for `num_keys` keys."""
        return self.lookup_rtt_us * PS_PER_US + self.lookup_per_key_ns * PS_PER_NS * num_keys

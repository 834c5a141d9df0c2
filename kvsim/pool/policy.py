"""The decisions about a scenario's pool: what `[pool]` says, with costs from the scenario's paths and step times."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from kvcore.admission import Admission, AdmitAll, AdmitCheaper, AdmitSecondTouch
from kvcore.costs import Costs
from kvcore.eviction.leaf_first import LeafFirstRuns
from kvcore.eviction.lru import LruRuns
from kvcore.eviction.runs import RunPolicy
from kvcore.eviction.session_aware import SessionAwareRuns
from kvcore.loading import LoadAlways, LoadCheaper, Loading, LoadInTime
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy, storing_blocks
from kvcore.units import NS_PER_MS, NS_PER_S
from kvsim.clock import PS_PER_NS
from kvsim.config.pool import PoolConfig
from kvsim.links.wiring import alone_block_ns, alone_latency_ns
from kvsim.pool.disks import DiskEviction, Disks, Offload, Promotion, Unwritten
from kvsim.pool.memory import Memory, Preferred, SegmentedMemory, Strategy
from kvsim.pool.no_pool import NoPool
from kvsim.pool.pins import SoftPins
from kvsim.pool.policy_pool import PolicyPool
from kvsim.pool.store import MooncakePool
from kvsim.scenario import Scenario


def make_planner(scenario: Scenario, pool: PoolConfig) -> Planner:
    """What is looked up, loaded and stored."""
    return Planner(scenario.kv_model, pool.retention_interval)


def make_policy(scenario: Scenario, pool: PoolConfig) -> PoolPolicy:
    """The patience, and the policies by name."""
    planner, costs = make_planner(scenario, pool), make_costs(scenario)
    return PoolPolicy(
        lookup_deadline_ns=pool.lookup_deadline_ms * NS_PER_MS,
        offer_ttl_ns=pool.offer_ttl_ms * NS_PER_MS,
        max_load_attempts=pool.max_load_attempts,
        max_storing_blocks=storing_blocks(pool.max_storing_share, scenario.num_gpu_blocks),
        admission=_ADMISSIONS[pool.admission](planner, costs),
        loading=_LOADINGS[pool.loading](costs, pool),
    )


def make_store(scenario: Scenario, pool: PoolConfig) -> MooncakePool:
    """An empty pool; `mooncake` is the master's own eviction, the others are what if."""
    if scenario.pool is None:
        return NoPool(scenario.block_bytes)
    shape = (
        _memory(scenario, pool),
        scenario.block_bytes,
        pool.lease_ttl_ms * NS_PER_MS,
        pool.eviction_high_watermark_ratio,
        pool.eviction_ratio,
        SoftPins.GO_LAST if pool.allow_evict_soft_pinned_objects else SoftPins.STAY,
    )
    below = _disks(scenario, pool), pool.client_ttl_s * NS_PER_S
    policy = _EVICTIONS[pool.eviction]
    return MooncakePool(*shape, *below) if policy is None else PolicyPool(*shape, policy(), *below)


def _memory(scenario: Scenario, pool: PoolConfig) -> Memory:
    """Segment by segment where one may be full or gone while others are not."""
    num_clients, each = scenario.cluster.instances, pool.segments_per_instance
    strategy, preferred = Strategy(pool.allocation_strategy), Preferred(pool.preferred_segment)
    is_even = strategy is Strategy.RANDOM and preferred is Preferred.NONE and pool.replica_num == 1
    if is_even and not scenario.faults:
        return Memory(scenario.pool_capacity_bytes, scenario.block_bytes, num_clients, each)
    segment_bytes = pool.segment_bytes_per_instance // each
    rules = strategy, pool.replica_num, preferred
    return SegmentedMemory(segment_bytes, num_clients, scenario.block_bytes, *rules, each)


def _disks(scenario: Scenario, pool: PoolConfig) -> Disks | None:
    if not pool.enable_offload:
        return None
    rules = pool.promotion_admission_threshold, pool.promotion_max_per_heartbeat * pool.segments_per_instance
    return Disks(
        pool.disk_bytes_per_instance,
        scenario.cluster.instances,
        scenario.block_bytes,
        pool.offload_local_buffer_bytes,
        DiskEviction(pool.bucket_eviction_policy),
        Offload.ON_EVICT if pool.offload_on_evict else Offload.ON_PUT,
        Unwritten.GOES if pool.offload_force_evict else Unwritten.STAYS,
        Promotion(*rules, pool.offload_heartbeat_interval_s * NS_PER_S) if pool.promotion_on_hit else None,
    )


def make_costs(scenario: Scenario) -> Costs:
    """Of one engine: a block from the pool when nobody else is on the way, a prefill in a step of its own per chunk."""
    block_ns = tuple(alone_block_ns(scenario, kind.group) for kind in scenario.kv_model.kinds)
    step_time = scenario.step_time
    budget = scenario.engine.max_num_batched_tokens

    @lru_cache(_REMEMBERED)
    def chunk_ps(start_len: int, num_tokens: int) -> int:
        return step_time.step_ps([(start_len, num_tokens)], 0, 0)

    @lru_cache(_REMEMBERED)
    def prefill_ns(start_len: int, end_len: int) -> int:
        starts = range(start_len, end_len, budget)
        return sum(chunk_ps(start, min(budget, end_len - start)) for start in starts) // PS_PER_NS

    return Costs(prefill_ns, block_ns, alone_latency_ns(scenario))


def _load_in_time(costs: Costs, pool: PoolConfig) -> Loading:
    assert pool.load_budget_ms is not None
    return LoadInTime(costs, pool.load_budget_ms * NS_PER_MS)


_REMEMBERED = 1 << 16
"""Step times: of prompts of many lengths, all chunks but the last are the same."""

_EVICTIONS: Mapping[str, Callable[[], RunPolicy] | None] = {
    "mooncake": None,
    "lru": LruRuns,
    "leaf_first": LeafFirstRuns,
    "session_aware": SessionAwareRuns,
}
_ADMISSIONS: Mapping[str, Callable[[Planner, Costs], Admission]] = {
    "all": lambda _planner, _costs: AdmitAll(),
    "second_touch": lambda _planner, _costs: AdmitSecondTouch(),
    "cheaper": AdmitCheaper,
}
_LOADINGS: Mapping[str, Callable[[Costs, PoolConfig], Loading]] = {
    "always": lambda _costs, _pool: LoadAlways(),
    "cheaper": lambda costs, _pool: LoadCheaper(costs),
    "in_time": _load_in_time,
}

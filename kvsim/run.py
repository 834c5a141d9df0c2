"""A run: scenario and trace in, the log of what happened out. Start reading here."""

from dataclasses import dataclass

from kvcore.planner import Planner
from kvcore.request import PoolPolicy
from kvcore.routing import RoundRobin
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import NS_PER_MS
from kvsim.clock import PS_PER_US, Clock
from kvsim.cluster import Cluster, SharedPool
from kvsim.cost.roofline import Roofline
from kvsim.events import EventLog
from kvsim.link import FairLink
from kvsim.pool_client import Path
from kvsim.scenario import LinkConfig, PoolConfig, Scenario
from kvsim.scheduler import Limits
from kvsim.store import MooncakePool
from kvsim.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Simulation:
    """A cluster that is ready to run, or has run."""

    clock: Clock
    cluster: Cluster

    @property
    def log(self) -> EventLog:
        """What happened so far."""
        return self.cluster.log

    def run(self) -> None:
        """To the end."""
        self.cluster.run()


def simulation(scenario: Scenario, trace: Trace, max_jump: int | None = None) -> Simulation:
    """The scenario's cluster, about to serve the trace; `max_jump` as in `kvsim.instance.Instance`."""
    clock = Clock()
    step_time = Roofline(scenario.llm, scenario.gpu)
    cluster = Cluster(
        clock,
        trace,
        limits(scenario),
        step_time,
        scenario.cluster.instances,
        RoundRobin(),
        _shared_pool(scenario, clock),
        max_jump,
    )
    return Simulation(clock, cluster)


def limits(scenario: Scenario) -> Limits:
    """The bounds of one instance; the engine keeps one of its blocks as the null block."""
    engine = scenario.engine
    return Limits(
        block_size=engine.block_size,
        num_blocks=scenario.num_gpu_blocks - 1,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        watermark_blocks=int(engine.watermark * scenario.num_gpu_blocks),
    )


def _shared_pool(scenario: Scenario, clock: Clock) -> SharedPool | None:
    pool, link = scenario.pool, scenario.link
    if pool is None or link is None:
        return None
    store = MooncakePool(
        scenario.pool_capacity_bytes,
        (scenario.block_bytes,),
        pool.lease_ttl_ms * NS_PER_MS,
        pool.eviction_high_watermark_ratio,
        pool.eviction_ratio,
    )
    planner = Planner(ModelSpec((FullAttention(scenario.engine.block_size),)), pool.retention_interval)
    policy = PoolPolicy(
        lookup_deadline_ns=pool.lookup_deadline_ms * NS_PER_MS,
        offer_ttl_ns=max(1, pool.lease_ttl_ms * NS_PER_MS),
        max_load_attempts=link.max_load_attempts,
    )
    paths = tuple(_path(pool, link, scenario.block_bytes, clock) for _ in range(scenario.cluster.instances))
    return SharedPool(store, planner, policy, paths)


def _path(pool: PoolConfig, link: LinkConfig, block_bytes: int, clock: Clock) -> Path:
    def make_link() -> FairLink:
        return FairLink(clock, link.latency_us * PS_PER_US, link.bandwidth_bytes_per_s)

    return Path(pool.lookup_ps, make_link(), make_link(), (block_bytes,))

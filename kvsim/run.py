"""A run: scenario and trace in, what happened and what was decided out. Start reading here."""

import gc
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from operator import itemgetter
from typing import NamedTuple

from kvcore.gpu_cache import Names, block_names
from kvcore.hints import Pin
from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.runs import single
from kvcore.types import GroupId, Run, Segments, StreamId
from kvcore.units import NS_PER_MS, NS_PER_S
from kvsim.clock import PS_PER_S, Clock
from kvsim.cluster import Cluster, MakeEngine, MakeMachine, OnFinished
from kvsim.config.faults import FaultConfig
from kvsim.config.pool import PoolConfig
from kvsim.dispatcher import Dispatcher, Fleet, PoolHit
from kvsim.events import EventLog
from kvsim.instance import Instance
from kvsim.limits import Limits
from kvsim.links.paths import Path, SharedLink
from kvsim.links.wiring import asks_where, make_paths, make_threads, packing, put_sites
from kvsim.pool.client import Means, PoolClient
from kvsim.pool.host_cache import HostCache
from kvsim.pool.policy import make_planner, make_policy, make_store
from kvsim.pool.store import MooncakePool
from kvsim.routers import make_router
from kvsim.scenario import Scenario
from kvsim.scheduler import Scheduler
from kvsim.sequence import Sequence
from kvsim.sessions import Sessions
from kvsim.usage import HOST_MEMORY, POOL_MEMORY, POOL_SSD, LinkInfo, MemoryInfo, RecordFill, Usage
from kvsim.workload.trace import Trace

_START = itemgetter(1)


class Decision(NamedTuple):
    """What was decided for a request at its first admission, in tokens."""

    local_hit_len: int
    external_hit_len: int
    granted_len: int


@dataclass(slots=True)
class Simulation:
    """A cluster that is ready to run, or has run; `instances`, `pool` and links are there to be audited."""

    scenario: Scenario
    clock: Clock
    cluster: Cluster
    instances: list[Instance]
    pool: "SharedPool | None"

    @property
    def log(self) -> EventLog:
        """What happened so far."""
        return self.cluster.log

    def run(self) -> None:
        """To the end. What fast engines make is never in a cycle, so nobody looks for garbage meanwhile."""
        with _collector_off() if self.instances else nullcontext():
            self.cluster.run()

    def decisions(self) -> list[Decision | None]:
        """Per request; None for one that was rejected."""
        return [None if sequence is None else _decision(sequence) for sequence in self.cluster.sequences]


@dataclass(frozen=True, slots=True)
class SharedPool:
    """The pool and the decisions about it; `means` and `experiences` have one entry per instance."""

    store: MooncakePool
    planner: Planner
    policy: PoolPolicy
    means: tuple[Means, ...]
    experiences: tuple[Experience, ...]
    sessions: Sessions

    def machine(self, engine: int, sequence: Sequence) -> KVRequest:
        """The machine of a new request of the instance."""
        names_of = partial(_names, block_names(self.planner.model, sequence.segments))
        hints = self.sessions.hints(sequence.index)
        return KVRequest(self.planner, self.policy, sequence.input_len, self.experiences[engine], names_of, hints)

    def finished(self, sequence: Sequence) -> None:
        """A request completed; with it its session may have."""
        session = self.sessions.finished(sequence.index)
        if session is not None:
            self.store.end_session(session)

    def hit_blocks(self, segments: Segments, limit_blocks: int) -> int:
        """The prefix of a sequence that a hit could use now, of at most `limit_blocks`, all in hash units."""
        model = self.planner.model
        limit_len = limit_blocks * model.hashed_step
        ends = [limit_len // group.block_size for group in model.groups]
        present = [
            self.store.holds(GroupId(group), names, single((0, end)))
            for group, (names, end) in enumerate(zip(block_names(model, segments), ends, strict=True))
        ]
        return self.planner.hit(0, limit_len + 1, tuple(present)) // model.hashed_step

    @property
    def paths(self) -> tuple[Path, ...]:
        """By instance."""
        return tuple(means.path for means in self.means)

    def links(self) -> Iterator[SharedLink]:
        """Every link and drive that bytes of the pool cross."""
        return (link for path in self.paths for _, link in path.links())


def simulation(scenario: Scenario, trace: Trace, max_jump: int | None = None) -> Simulation:
    """The scenario's cluster of fast engines, about to serve the trace; `max_jump` as in `kvsim.instance.Instance`."""
    clock = Clock()
    pool = _shared_pool(scenario, clock, trace)
    step_time = scenario.step_time
    instances: list[Instance] = []

    def make_engine(index: int, log: EventLog, on_finished: OnFinished) -> Instance:
        finished = on_finished if pool is None else partial(_finished, pool, on_finished)
        instance = Instance(index, clock, Scheduler(limits(scenario)), step_time, log, finished, max_jump)
        if pool is not None:
            instance.attach(PoolClient(clock, pool.store, pool.means[index], instance, log))
        instances.append(instance)
        return instance

    make_machine, pool_hit = (_no_machine, None) if pool is None else (pool.machine, pool.hit_blocks)
    cluster = make_cluster(scenario, trace, clock, make_engine, make_machine, pool_hit)
    if pool is not None:
        _record_links(pool, cluster.log.usage)
        if scenario.pool is not None:
            _record_store(pool.store, cluster.log.usage)
        _record_hosts(instances, scenario.host.cpu_bytes_to_use, cluster.log.usage)
    return Simulation(scenario, clock, cluster, instances, pool)


def make_cluster(
    scenario: Scenario,
    trace: Trace,
    clock: Clock,
    make_engine: MakeEngine,
    make_machine: MakeMachine,
    pool_hit: PoolHit | None = None,
) -> Cluster:
    """The scenario's cluster of whatever engines `make_engine` makes, behind the scenario's router."""
    bounds = limits(scenario)
    fleet = Fleet(scenario.cluster.instances, bounds.block_size, bounds.num_blocks, pool_hit)
    interval_ns = scenario.routing.snapshot_interval_ms * NS_PER_MS
    return Cluster(
        clock,
        trace,
        scenario.workload,
        bounds.block_size,
        bounds.capacity_tokens,
        scenario.cluster.instances,
        Dispatcher(clock, make_router(scenario), fleet, interval_ns),
        make_engine,
        make_machine,
    )


def limits(scenario: Scenario) -> Limits:
    """The bounds of one instance; the engine keeps one of its blocks as the null block."""
    engine = scenario.engine
    return Limits(
        model=scenario.kv_model,
        num_blocks=scenario.num_gpu_blocks - 1,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        watermark_blocks=int(engine.watermark * scenario.num_gpu_blocks),
        retention=engine.prefix_cache_retention_interval,
    )


def decisions_digest(decisions: list[Decision | None]) -> str:
    """16 hex digits over every decision, in request order; equal for two engines that decide alike."""
    lines = ("rejected" if decision is None else ",".join(map(str, decision)) for decision in decisions)
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


@contextmanager
def _collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decision(sequence: Sequence) -> Decision:
    if sequence.kv is None:
        return Decision(sequence.local_hit_len, 0, 0)
    made = sequence.kv.decisions
    return Decision(made.local_hit_len, made.external_hit_len, made.granted_len)


def _finished(pool: SharedPool, on_finished: OnFinished, sequence: Sequence) -> None:
    pool.finished(sequence)
    on_finished(sequence)


def _at_once(_num_keys: int) -> int:
    return 0


def _no_machine(_engine: int, _sequence: Sequence) -> None:
    return None


def _names(by_group: Names, group: int, run: Run) -> tuple[StreamId, ...]:
    """The stream of each block: `kvcore.memory.NamesOf` of one sequence."""
    names: tuple[StreamId, ...] = ()
    segments = by_group[group]
    start, end = run
    at = bisect_right(segments, start, key=_START) - 1
    while start < end:
        stream, _, segment_end = segments[at]
        names += (stream,) * (min(segment_end, end) - start)
        start, at = segment_end, at + 1
    return names


def _shared_pool(scenario: Scenario, clock: Clock, trace: Trace) -> SharedPool | None:
    pool = scenario.offloading
    if pool is None:
        return None
    store = make_store(scenario, pool)
    for fault in scenario.faults:
        clock.at(fault.at_s * PS_PER_S, partial(_fail, store, clock, fault))
    planner, policy = make_planner(scenario, pool), make_policy(scenario, pool)
    instances = range(scenario.cluster.instances)
    paths = enumerate(make_paths(scenario, clock))
    means = tuple(_means(scenario, pool, clock, index, path) for index, path in paths)
    sessions = _sessions(pool, trace, limits(scenario).capacity_tokens)
    return SharedPool(store, planner, policy, means, tuple(Experience() for _ in instances), sessions)


def _fail(store: MooncakePool, clock: Clock, fault: FaultConfig) -> None:
    call = store.lose_client if fault.kind == "pool_client_dies" else store.mount
    call(fault.instance, clock.now_ns)


def _record_links(pool: SharedPool, usage: Usage) -> None:
    """Let what the bytes cross tell what it carries."""
    for index, path in enumerate(pool.paths):
        for kind, link in path.links():
            link.record = usage.record_link(LinkInfo(kind, index, link.bandwidth_bytes_per_s, link.full_when_busy))


def _record_store(store: MooncakePool, usage: Usage) -> None:
    """Let the pool tell how full it is."""
    memories = [MemoryInfo(POOL_MEMORY, store.capacity_bytes)]
    if store.disks is not None:
        memories.append(MemoryInfo(POOL_SSD, store.disks.capacity_bytes))
    store.on_put = partial(_record_fills, store, [usage.record_memory(memory) for memory in memories])


def _record_fills(store: MooncakePool, records: list[RecordFill], time_ps: int) -> None:
    records[0](time_ps, store.used_bytes)
    if store.disks is not None:
        records[1](time_ps, store.disks.used_bytes)


def _record_hosts(instances: list[Instance], each_bytes: int, usage: Usage) -> None:
    """Let the private caches tell how full they are, all together."""
    if each_bytes:
        record = usage.record_memories(MemoryInfo(HOST_MEMORY, each_bytes * len(instances)))
        for instance in instances:
            assert instance.client is not None
            instance.client.record_host = record


def _sessions(pool: PoolConfig, trace: Trace, capacity_tokens: int) -> Sessions:
    pin = Pin(pool.session_pin)
    ttl_ns = pool.session_ttl_s * NS_PER_S if pin is Pin.SOFT else None
    return Sessions(trace, capacity_tokens, pin, ttl_ns, pool.session_priority)


def _means(scenario: Scenario, pool: PoolConfig, clock: Clock, index: int, path: Path) -> Means:
    packed, host_bytes = packing(scenario), scenario.host.cpu_bytes_to_use
    return Means(
        pool.lookup_ps if scenario.pool is not None else _at_once,
        packed,
        path,
        *make_threads(scenario, clock),
        HostCache(host_bytes, packed.block_bytes) if host_bytes else None,
        scenario.host.keeps_loaded,
        index,
        asks_where(scenario),
        put_sites(scenario),
    )

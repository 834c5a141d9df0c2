"""An instance's side of the pool: carries out plans on the simulated tiers and paths, and reports back.

Before the pool an instance may have a private cache in its own host memory (`kvsim.pool.host_cache`). It is no
business of the decisions: it answers first, what it has is not asked of the pool and comes from nearer, and what is
stored goes to both.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from kvcore.group_runs import GroupRuns, count_blocks, minus, plus
from kvcore.holding import Holding
from kvcore.plans import Load, Lookup, Store
from kvcore.types import GroupId, Runs, Segments
from kvsim.clock import PS_PER_NS, Action, Clock, nothing
from kvsim.events import EventLog, Kind
from kvsim.links.parcel import HOST, LOCAL, POOL, TIERS, Packing, Parcel, Site, Tier, divided
from kvsim.links.paths import Path
from kvsim.links.threads import IoThreads
from kvsim.pool.host_cache import HostCache
from kvsim.pool.sources import ReplicaType, Source
from kvsim.pool.store import MooncakePool
from kvsim.scheduler import Scheduler
from kvsim.sequence import Sequence

StoreCall: TypeAlias = Callable[[GroupId, Segments, Runs, int], Runs]
"""(group, segments, runs, now_ns) -> runs: one call of the simulated store for one group."""


Move: TypeAlias = Callable[[Site, Parcel, Action], None]
"""One parcel from or to a site, then the action."""

Shipment: TypeAlias = tuple[Site, Parcel]
"""Where something comes from or goes to, and what."""

MANY_OWNERS = 4
"""What comes from more than so many others is taken as spread over all of them in equal parts."""


@dataclass(frozen=True, slots=True)
class Means:
    """What one instance has to reach the tiers with."""

    lookup_ps: Callable[[int], int]
    """Duration of a lookup of so many keys in the pool."""
    packing: Packing
    path: Path
    load_threads: IoThreads
    store_threads: IoThreads
    host: HostCache | None = None
    """The private cache in front of the pool."""
    keeps_loaded: bool = False
    """Whether it keeps what came from the pool, too."""
    index: int = 0
    """The instance's number."""
    asks_where: bool = False
    """Whether it matters where in the pool something lies."""
    puts_to: tuple[tuple[Site, int], ...] = ((POOL, 1),)
    """Where in the pool stores go, and the weight of each."""


class Engine(Protocol):
    """What the client needs of its instance."""

    def post(self, action: Action) -> None:
        """Do `action` between two steps, and schedule then."""

    def release(self, action: Action) -> None:
        """Do `action`, which gives blocks back, between two steps."""

    scheduler: Scheduler


@dataclass(slots=True)
class Moved:
    """What parcels come to."""

    num_bytes: int = 0
    num_blocks: int = 0

    def add(self, parcel: Parcel) -> None:
        """One more."""
        self.num_bytes += parcel.size_bytes
        self.num_blocks += parcel.num_objects


class PoolClient:
    """One instance's client of the pool; implements `kvsim.scheduler.Pool`."""

    def __init__(self, clock: Clock, store: MooncakePool, means: Means, engine: Engine, log: EventLog) -> None:
        self._clock = clock
        self._store = store
        self._means = means
        self._path = means.path
        self._host = means.host
        self.record_host: Callable[[int, int], None] | None = None
        """Told (time_ps, change of its used bytes) when something was put into the private cache."""
        self._engine = engine
        self._log = log
        self._planned_stores: list[tuple[Sequence, Store, list[Holding]]] = []
        self._wakes: set[tuple[Sequence, int]] = set()
        self._answer_at_ps: dict[Sequence, int] = {}
        self.num_asked = 0
        """Different keys of each dialogue, over those that have ended."""
        self.num_found = 0
        """Those of them that the pool or the private cache had."""
        self.num_near = 0
        """Those of them that the private cache had, so that the pool was not asked."""
        self.loaded = {tier: Moved() for tier in Tier}
        """What loads brought, by where it lay."""
        self.stored = {tier: Moved() for tier in Tier}
        """What stores took away, by where it went."""

    def lookup(self, sequence: Sequence, plan: Lookup) -> None:
        """Put the next question: what the private cache has is known, the master's answer is as of its arrival."""
        question = plan.dialogue.question
        near = None if self._host is None else self._host.exists(sequence.names, question)
        far = question if near is None else minus(question, near)
        answer_ps = self._clock.now_ps + (self._means.lookup_ps(count_blocks(far)) if any(far) else 0)
        self._answer_at_ps[sequence] = answer_ps
        self._clock.at(answer_ps, partial(self._answer, sequence, plan, near, far))

    def wake_at(self, sequence: Sequence, at_ns: int) -> None:
        """Let the instance schedule at that time, if the sequence is still to be considered again then."""
        at_ps = max(at_ns * PS_PER_NS, self._clock.now_ps)
        answered_before = self._answer_at_ps.get(sequence, at_ps) < at_ps
        if not answered_before and (sequence, at_ns) not in self._wakes:
            self._wakes.add((sequence, at_ns))
            self._clock.at(at_ps, partial(self._wake, sequence, at_ns))

    def load(self, sequence: Sequence, plan: Load) -> None:
        """Fetch what the tiers still hold; what they lost since the lookup stays unwritten and is reported."""
        self._means.load_threads.run(partial(self._fetch, sequence, plan))

    def store(self, sequence: Sequence, plan: Store) -> None:
        """Pin the blocks now; the bytes leave when the step that fills them has run (`start_stores`)."""
        pinned = self._engine.scheduler.pin(sequence, plan.blocks)
        self._planned_stores.append((sequence, plan, pinned))

    def start_stores(self) -> None:
        """A step has ended: write what it filled."""
        for sequence, plan, pinned in self._planned_stores:
            self._means.store_threads.run(partial(self._send, sequence, plan, pinned))
        self._planned_stores.clear()

    def _wake(self, sequence: Sequence, at_ns: int) -> None:
        self._wakes.discard((sequence, at_ns))
        assert sequence.kv is not None
        if sequence.kv.reconsider_at_ns == at_ns:
            self._engine.post(nothing)

    def _answer(self, sequence: Sequence, plan: Lookup, near: GroupRuns | None, far: GroupRuns) -> None:
        found = self._per_group(self._store.exists, sequence, far)
        if near is not None:
            self.num_near += count_blocks(near)
            found = plus(near, found)
        plan.dialogue.answered(found)
        assert sequence.kv is not None
        if self._answer_at_ps.get(sequence) == self._clock.now_ps:
            del self._answer_at_ps[sequence]
        if plan.dialogue.open and sequence.kv.awaits(plan.ticket):
            self.lookup(sequence, plan)
            self.wake_at(sequence, plan.deadline_ns)
            return
        self.num_asked += count_blocks(plan.dialogue.asked)
        self.num_found += count_blocks(plan.dialogue.present)
        self._engine.post(partial(sequence.kv.lookup_answered, plan.ticket, self._clock.now_ns))

    # --- loads --------------------------------------------------------------------------------------------------------

    def _fetch(self, sequence: Sequence, plan: Load, end_job: Action) -> None:
        """A thread has the load: look what is where, and bring it, the nearest first."""
        near = None if self._host is None else self._host.get(sequence.names, plan.blocks)
        wanted = plan.blocks if near is None else minus(plan.blocks, near)
        far = self._per_group(partial(self._store.get, reader=self._means.index), sequence, wanted)
        shipments: list[Shipment] = []
        if near is not None and any(near):
            shipments.append((HOST, self._means.packing.loaded(near)))
        if any(far) or (near is None and not shipments):
            shipments += self._from_pool(sequence, far)
        done = partial(self._fetched, sequence, plan, shipments, far, minus(wanted, far), end_job)
        self._ship(self._path.fetch, shipments, done)

    def _from_pool(self, sequence: Sequence, blocks: GroupRuns) -> list[Shipment]:
        """In parts by where they lie, if that matters."""
        parcel = self._means.packing.loaded(blocks)
        if not self._means.asks_where:
            return [(POOL, parcel)]
        read = Counter[Source]()
        for group, runs in enumerate(blocks):
            read += self._store.sources(GroupId(group), sequence.names[group], runs, self._means.index)
        weights = sites_of(read, self._means.index)
        return list(zip(weights, divided(parcel, tuple(weights.values())), strict=True)) or [(POOL, parcel)]

    def _fetched(
        self,
        sequence: Sequence,
        plan: Load,
        shipments: list[Shipment],
        from_pool: GroupRuns,
        failed: GroupRuns,
        end_job: Action,
    ) -> None:
        for site, parcel in shipments:
            self.loaded[site.tier].add(parcel)
            self._log.usage.loads.add(self._clock.now_ps, sequence.index, TIERS.index(site.tier), parcel.size_bytes)
        if self._host is not None and self._means.keeps_loaded:
            self._keep(sequence, from_pool)
        self._engine.post(partial(self._loaded, sequence, plan, failed))
        end_job()

    def _keep(self, sequence: Sequence, blocks: GroupRuns) -> None:
        """What came from the pool is copied out of the GPU's blocks, which hold it for longer than that takes."""
        assert self._host is not None
        absent = minus(blocks, self._host.holds(sequence.names, blocks))
        if any(absent):
            parcel = self._means.packing.stored(absent)
            self.stored[Tier.HOST].add(parcel)
            self._path.send(HOST, parcel, partial(self._put_near, self._host, sequence, absent))

    def _put_near(self, host: HostCache, sequence: Sequence, blocks: GroupRuns) -> None:
        before_bytes = host.used_bytes
        host.put(sequence.names, blocks)
        if self.record_host is not None:
            self.record_host(self._clock.now_ps, host.used_bytes - before_bytes)

    def _loaded(self, sequence: Sequence, plan: Load, failed: GroupRuns) -> None:
        assert sequence.kv is not None
        valid_len = sequence.kv.load_finished(plan.ticket, failed, self._clock.now_ns)
        assert valid_len is not None
        self._log.add(self._clock.now_ps, Kind.LOADED, sequence.index, valid_len, count_blocks(failed))
        self._engine.scheduler.load_finished(sequence, valid_len)

    # --- stores -------------------------------------------------------------------------------------------------------

    def _send(self, sequence: Sequence, plan: Store, pinned: list[Holding], end_job: Action) -> None:
        """A thread has the store: the pool gets all, the private cache what it has not."""
        shipments = self._to_pool(self._means.packing.stored(plan.blocks))
        if self._host is not None:
            absent = minus(plan.blocks, self._host.holds(sequence.names, plan.blocks))
            shipments += [(HOST, self._means.packing.stored(absent))] if any(absent) else []
        self._ship(self._path.send, shipments, partial(self._written, sequence, plan, pinned, shipments, end_job))

    def _to_pool(self, parcel: Parcel) -> list[Shipment]:
        """In parts by where it goes."""
        puts_to = self._means.puts_to
        if len(puts_to) == 1:
            return [(puts_to[0][0], parcel)]
        parts = divided(parcel, [weight for _, weight in puts_to])
        return [(site, part) for (site, _), part in zip(puts_to, parts, strict=True)]

    def _written(
        self, sequence: Sequence, plan: Store, pinned: list[Holding], shipments: list[Shipment], end_job: Action
    ) -> None:
        for site, parcel in shipments:
            self.stored[site.tier].add(parcel)
        if self._host is not None:
            self._put_near(self._host, sequence, plan.blocks)
        put = partial(self._store.put, hints=plan.hints, writer=self._means.index)
        num_on_disk = self._store.counters.offloaded
        rejected = self._per_group(put, sequence, plan.blocks)
        if self._store.counters.offloaded > num_on_disk:
            self._spill(self._store.counters.offloaded - num_on_disk, plan.blocks)
        lost = count_blocks(rejected)
        self._log.add(self._clock.now_ps, Kind.STORED, sequence.index, count_blocks(plan.blocks) - lost, lost)
        self._engine.release(partial(self._stored, sequence, plan, pinned, rejected, self._clock.now_ns))
        end_job()

    def _spill(self, num_objects: int, stored: GroupRuns) -> None:
        """The store made the pool write so many objects to disk: charge them to the own drives, as large as its own.

        They are written by whose memory they were in; where all store alike, each has as much to write.
        """
        parcel = self._means.packing.stored(stored)
        size_bytes = parcel.size_bytes * num_objects // parcel.num_objects
        self._path.spill(Parcel(size_bytes, num_objects, num_objects))

    def _stored(
        self, sequence: Sequence, plan: Store, pinned: list[Holding], rejected: GroupRuns, ended_ns: int
    ) -> None:
        self._engine.scheduler.unpin(pinned)
        assert sequence.kv is not None
        sequence.kv.store_finished(plan.ticket, rejected, ended_ns)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _ship(self, move: Move, shipments: list[Shipment], on_done: Action) -> None:
        """The thread's own work first, then all at once; `on_done` when the last is through."""
        thread_ps = sum([self._path.thread_ps(site, parcel) for site, parcel in shipments])
        if not shipments:
            on_done()
            return
        done = on_done if len(shipments) == 1 else Countdown(len(shipments), on_done)
        begin = partial(_begin, move, shipments, done)
        if thread_ps:
            self._clock.after(thread_ps, begin)
        else:
            begin()

    def _per_group(self, call: StoreCall, sequence: Sequence, blocks: GroupRuns) -> GroupRuns:
        now_ns = self._clock.now_ns
        return tuple([call(GroupId(group), sequence.names[group], runs, now_ns) for group, runs in enumerate(blocks)])


class Countdown:
    """Does `action` when it has been called `count` times."""

    __slots__ = ("_action", "_left")

    def __init__(self, count: int, action: Action) -> None:
        self._left = count
        self._action = action

    def __call__(self) -> None:
        """One less to wait for."""
        self._left -= 1
        if not self._left:
            self._action()


def sites_of(read: Counter[Source], reader: int) -> dict[Site, int]:
    """Bytes by site as the reader sees them; of many others as if they were all others."""
    weights: dict[Site, int] = {}
    others = {source.client for source in read if source.replica_type is ReplicaType.MEMORY and source.client != reader}
    for source, num_bytes in sorted(read.items(), key=_by_client):
        site = Site(Tier.DISK, source.client)
        if source.replica_type is ReplicaType.MEMORY:
            site = POOL if len(others) > MANY_OWNERS else Site(Tier.REMOTE, source.client)
            site = LOCAL if source.client == reader else site
        weights[site] = weights.get(site, 0) + num_bytes
    return weights


def _by_client(read: tuple[Source, int]) -> tuple[int, str]:
    return read[0].client, read[0].replica_type.value


def _begin(move: Move, shipments: list[Shipment], on_done: Action) -> None:
    for site, parcel in shipments:
        move(site, parcel, on_done)

"""An instance's side of the pool: carries out plans on the simulated store and links, and reports back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from kvcore.group_runs import GroupRuns, count_blocks, minus
from kvcore.plans import Load, Lookup, Store
from kvcore.pool import Holding
from kvcore.runs import num_blocks
from kvcore.types import GroupId, Runs, Segments
from kvsim.clock import PS_PER_NS, Action, Clock
from kvsim.events import EventLog, Kind
from kvsim.links.fair_link import FairLink
from kvsim.pool.store import MooncakePool
from kvsim.scheduler import Scheduler
from kvsim.sequence import Sequence

StoreCall: TypeAlias = Callable[[GroupId, Segments, Runs, int], Runs]
"""(group, segments, runs, now_ns) -> runs: one call of the simulated store for one group."""


@dataclass(frozen=True, slots=True)
class Path:
    """The way to the pool: what an answer takes, the two directions of the link, and what a block of a group weighs."""

    lookup_ps: Callable[[int], int]
    """Duration of a lookup of so many keys."""
    get_link: FairLink
    put_link: FairLink
    block_bytes: tuple[int, ...]

    def size_bytes(self, blocks: GroupRuns) -> int:
        """Bytes of all the blocks."""
        return sum(num_blocks(runs) * size for runs, size in zip(blocks, self.block_bytes, strict=True))


class Engine(Protocol):
    """What the client needs of its instance."""

    def post(self, action: Action) -> None:
        """Do `action` between two steps, and schedule then."""

    def release(self, action: Action) -> None:
        """Do `action`, which gives blocks back, between two steps."""

    scheduler: Scheduler


class PoolClient:
    """One instance's client of the pool; implements `kvsim.scheduler.Pool`."""

    def __init__(self, clock: Clock, store: MooncakePool, path: Path, engine: Engine, log: EventLog) -> None:
        self._clock = clock
        self._store = store
        self._path = path
        self._engine = engine
        self._log = log
        self._planned_stores: list[tuple[Sequence, Store, list[Holding]]] = []
        self._wakes: set[tuple[Sequence, int]] = set()
        self._answer_at_ps: dict[Sequence, int] = {}
        self.num_asked = 0
        """Different keys of each dialogue, over those that have ended."""
        self.num_found = 0
        """Those of them that the pool had."""

    def lookup(self, sequence: Sequence, plan: Lookup) -> None:
        """Put the next question to the master; its answer is as of the moment it arrives."""
        answer_ps = self._clock.now_ps + self._path.lookup_ps(count_blocks(plan.dialogue.question))
        self._answer_at_ps[sequence] = answer_ps
        self._clock.at(answer_ps, partial(self._answer, sequence, plan))

    def wake_at(self, sequence: Sequence, at_ns: int) -> None:
        """Let the instance schedule at that time, if the sequence is still to be considered again then."""
        at_ps = max(at_ns * PS_PER_NS, self._clock.now_ps)
        answered_before = self._answer_at_ps.get(sequence, at_ps) < at_ps
        if not answered_before and (sequence, at_ns) not in self._wakes:
            self._wakes.add((sequence, at_ns))
            self._clock.at(at_ps, partial(self._wake, sequence, at_ns))

    def load(self, sequence: Sequence, plan: Load) -> None:
        """Fetch what the pool still holds; what it lost since the lookup stays unwritten and is reported."""
        present = self._per_group(self._store.get, sequence, plan.blocks)
        done = partial(self._engine.post, partial(self._loaded, sequence, plan, minus(plan.blocks, present)))
        self._path.get_link.transfer(self._path.size_bytes(present), done)

    def store(self, sequence: Sequence, plan: Store) -> None:
        """Pin the blocks now; the bytes leave when the step that fills them has run (`start_stores`)."""
        pinned = self._engine.scheduler.pin(sequence, plan.blocks)
        self._planned_stores.append((sequence, plan, pinned))

    def start_stores(self) -> None:
        """A step has ended: write what it filled."""
        for sequence, plan, pinned in self._planned_stores:
            done = partial(self._written, sequence, plan, pinned)
            self._path.put_link.transfer(self._path.size_bytes(plan.blocks), done)
        self._planned_stores.clear()

    def _wake(self, sequence: Sequence, at_ns: int) -> None:
        self._wakes.discard((sequence, at_ns))
        assert sequence.kv is not None
        if sequence.kv.reconsider_at_ns == at_ns:
            self._engine.post(_nothing)

    def _answer(self, sequence: Sequence, plan: Lookup) -> None:
        plan.dialogue.answered(self._per_group(self._store.exists, sequence, plan.dialogue.question))
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

    def _loaded(self, sequence: Sequence, plan: Load, failed: GroupRuns) -> None:
        assert sequence.kv is not None
        valid_len = sequence.kv.load_finished(plan.ticket, failed, self._clock.now_ns)
        assert valid_len is not None
        self._log.add(self._clock.now_ps, Kind.LOADED, sequence.index, valid_len, count_blocks(failed))
        self._engine.scheduler.load_finished(sequence, valid_len)

    def _written(self, sequence: Sequence, plan: Store, pinned: list[Holding]) -> None:
        put = partial(self._store.put, hints=plan.hints)
        rejected = self._per_group(put, sequence, plan.blocks)
        lost = count_blocks(rejected)
        self._log.add(self._clock.now_ps, Kind.STORED, sequence.index, count_blocks(plan.blocks) - lost, lost)
        self._engine.release(partial(self._stored, sequence, plan, pinned, rejected, self._clock.now_ns))

    def _stored(
        self, sequence: Sequence, plan: Store, pinned: list[Holding], rejected: GroupRuns, ended_ns: int
    ) -> None:
        self._engine.scheduler.unpin(pinned)
        assert sequence.kv is not None
        sequence.kv.store_finished(plan.ticket, rejected, ended_ns)

    def _per_group(self, call: StoreCall, sequence: Sequence, blocks: GroupRuns) -> GroupRuns:
        now_ns = self._clock.now_ns
        return tuple([call(GroupId(group), sequence.segments, runs, now_ns) for group, runs in enumerate(blocks)])


def _nothing() -> None:
    """Only the wake-up matters."""

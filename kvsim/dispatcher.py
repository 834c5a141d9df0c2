"""The front of a fleet: tells the router what a real one could know of request and instances, and takes its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvcore.routing.prefix_index import PrefixIndex
from kvcore.routing.router import Arrival, Fact, InstanceId, Router, Snapshot
from kvcore.types import Segments
from kvsim.clock import Clock
from kvsim.sequence import Sequence, Status

PoolHit: TypeAlias = Callable[[Segments, int], int]
"""(segments, at most so many blocks) -> blocks of the prefix that the pool holds now."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is routed to: `num_instances` caches of `num_blocks` blocks, and whom to ask about the pool, if any."""

    num_instances: int
    block_size: int
    num_blocks: int
    pool_hit: PoolHit | None = None


class Dispatcher:
    """Routes arrivals; gathers only what the router reads.

    Loads and prefixes are as of the last refresh: an arrival that finds them `snapshot_interval_ns` old or older
    refreshes them. Loads count in what was sent since, prefixes do not. Loads are exact then, for all requests of this
    front that have not ended; of one whose computation has not begun it is taken that it will compute what it was
    thought to when it was sent. Prefixes are the books of `PrefixIndex`, not events of the instances. The pool is asked
    when the request arrives, without a lease.
    """

    def __init__(self, clock: Clock, router: Router, fleet: Fleet, snapshot_interval_ns: int) -> None:
        self._clock = clock
        self._router = router
        self._fleet = fleet
        self._interval_ns = snapshot_interval_ns
        self._num_routed = 0
        self._is_tracking = bool(router.reads & {Fact.LOAD, Fact.PREFIX})
        self._snapshots = [Snapshot(InstanceId(index)) for index in range(fleet.num_instances)]
        self._refresh_at_ns = 0
        self._in_flight: dict[Sequence, tuple[int, int]] = {}  # instance, tokens it was thought to compute
        self._news: list[tuple[int, Segments, int]] = []
        self._prefixes = PrefixIndex(fleet.num_instances if Fact.PREFIX in router.reads else 0, fleet.num_blocks)

    def choose(self, sequence: Sequence, session: str) -> int:
        """The instance that takes this sequence, which arrived now."""
        if self._is_tracking and self._clock.now_ns >= self._refresh_at_ns:
            self._refresh()
        arrival = self._arrival(sequence, session)
        chosen = self._router.choose(arrival, self._snapshots)
        self._num_routed += 1
        if self._is_tracking:
            self._track(sequence, arrival, chosen)
        return chosen

    def finished(self, sequence: Sequence) -> None:
        """The answer is complete, and with it the sequence's last full block."""
        if self._is_tracking:
            instance, _ = self._in_flight.pop(sequence)
            self._add_news(instance, sequence, sequence.num_computed)

    def _arrival(self, sequence: Sequence, session: str) -> Arrival:
        reads, pool_hit, block_size = self._router.reads, self._fleet.pool_hit, self._fleet.block_size
        limit_blocks = (sequence.input_len - 1) // block_size
        cached: tuple[int, ...] = ()
        if Fact.PREFIX in reads:
            cached = self._prefixes.cached_blocks(sequence.segments, limit_blocks)
        return Arrival(
            self._num_routed,
            sequence.input_len,
            session if Fact.SESSION in reads else None,
            tuple(num_blocks * block_size for num_blocks in cached),
            pool_hit(sequence.segments, limit_blocks) * block_size if pool_hit and Fact.POOL in reads else None,
        )

    def _track(self, sequence: Sequence, arrival: Arrival, chosen: int) -> None:
        cached_len = arrival.cached_lens[chosen] if arrival.cached_lens else 0
        queued_len = arrival.prompt_len - max(cached_len, arrival.pool_hit_len or 0)
        self._snapshots[chosen] = self._snapshots[chosen].sent(arrival.prompt_len, queued_len)
        self._in_flight[sequence] = (chosen, queued_len)
        self._add_news(chosen, sequence, sequence.input_len)

    def _add_news(self, instance: int, sequence: Sequence, num_tokens: int) -> None:
        if Fact.PREFIX in self._router.reads:
            self._news.append((instance, sequence.segments, num_tokens // self._fleet.block_size))

    def _refresh(self) -> None:
        """Learn everything that has happened up to now."""
        now_ns = self._clock.now_ns
        self._refresh_at_ns = now_ns + self._interval_ns
        loads = [_Load() for _ in self._snapshots]
        for sequence, (instance, queued_len) in self._in_flight.items():
            loads[instance].count(sequence, queued_len)
        self._snapshots = [load.snapshot(InstanceId(index), now_ns) for index, load in enumerate(loads)]
        for news in self._news:
            self._prefixes.add(*news)
        self._news.clear()


class _Load:
    """Adds up one instance's requests."""

    __slots__ = ("num_prompt_tokens", "num_queued_tokens", "num_running", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = self.num_running = self.num_queued_tokens = self.num_prompt_tokens = 0

    def count(self, sequence: Sequence, queued_len: int) -> None:
        """One more; of its prompt at most `queued_len` tokens were to be computed."""
        if sequence.status is Status.RUNNING:
            self.num_running += 1
        else:
            self.num_waiting += 1
        # In a jump over decode steps num_computed lags, but then all of the prompt is computed.
        self.num_queued_tokens += min(queued_len, max(0, sequence.input_len - sequence.num_computed))
        self.num_prompt_tokens += sequence.input_len

    def snapshot(self, instance: InstanceId, taken_at_ns: int) -> Snapshot:
        """The sums."""
        sums = self.num_waiting, self.num_running, self.num_queued_tokens, self.num_prompt_tokens
        return Snapshot(instance, taken_at_ns, *sums)

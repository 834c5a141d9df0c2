"""The front of a fleet: tells the router what a real one could know, and takes its answer."""

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
    refreshes them all. They are what a front knows of the requests it sent and of their progress:

    - loads are exact when refreshed, and count in what was sent since; until it has a first token, a request is thought
      to have all of its prompt to compute that was neither cached nor pooled when it was sent;
    - prefixes are the books of `PrefixIndex`, prompts from their sending on, answers when they are complete; they are
      not the instances' own events, whose cached blocks change in the middle of a jump;
    - the pool is asked when the request arrives, without a lease.
    """

    def __init__(self, clock: Clock, router: Router, fleet: Fleet, snapshot_interval_ns: int) -> None:
        self._clock = clock
        self._router = router
        self._block_size = fleet.block_size
        self._interval_ns = snapshot_interval_ns
        self._num_routed = 0
        self._tells_session = Fact.SESSION in router.reads
        self._tells_prefixes = Fact.PREFIX in router.reads
        self._pool_hit = fleet.pool_hit if Fact.POOL in router.reads else None
        self._is_tracking = self._tells_prefixes or Fact.LOAD in router.reads
        self._snapshots = [Snapshot(InstanceId(index)) for index in range(fleet.num_instances)]
        self._refresh_at_ns = 0
        self._in_flight: dict[Sequence, tuple[int, int]] = {}  # instance, uncached tokens
        self._news: list[tuple[int, Segments, int]] = []
        self._prefixes = PrefixIndex(fleet.num_instances if self._tells_prefixes else 0, fleet.num_blocks)

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
        return Arrival(
            self._num_routed,
            sequence.input_len,
            session if self._tells_session else None,
            self._cached_lens(sequence) if self._tells_prefixes else (),
            self._pool_hit_len(sequence, self._pool_hit) if self._pool_hit is not None else None,
        )

    def _cached_lens(self, sequence: Sequence) -> tuple[int, ...]:
        cached = self._prefixes.cached_blocks(sequence.segments, self._limit_blocks(sequence))
        return tuple(num_blocks * self._block_size for num_blocks in cached)

    def _pool_hit_len(self, sequence: Sequence, pool_hit: PoolHit) -> int:
        return pool_hit(sequence.segments, self._limit_blocks(sequence)) * self._block_size

    def _limit_blocks(self, sequence: Sequence) -> int:
        """At least one token of a prompt is computed."""
        return (sequence.input_len - 1) // self._block_size

    def _track(self, sequence: Sequence, arrival: Arrival, chosen: int) -> None:
        uncached_len = arrival.uncached_len(chosen)
        self._snapshots[chosen] = self._snapshots[chosen].sent(arrival.prompt_len, uncached_len)
        self._in_flight[sequence] = (chosen, uncached_len)
        self._add_news(chosen, sequence, sequence.input_len)

    def _add_news(self, instance: int, sequence: Sequence, num_tokens: int) -> None:
        if self._tells_prefixes:
            self._news.append((instance, sequence.segments, num_tokens // self._block_size))

    def _refresh(self) -> None:
        """Learn everything that has happened up to now."""
        now_ns = self._clock.now_ns
        self._refresh_at_ns = now_ns + self._interval_ns
        loads = [_Load() for _ in self._snapshots]
        for sequence, (instance, uncached_len) in self._in_flight.items():
            loads[instance].count(sequence, uncached_len)
        self._snapshots = [load.snapshot(InstanceId(index), now_ns) for index, load in enumerate(loads)]
        for news in self._news:
            self._prefixes.add(*news)
        self._news.clear()


class _Load:
    """Adds up one instance's requests."""

    __slots__ = ("num_prompt_tokens", "num_queued_tokens", "num_running", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = self.num_running = self.num_queued_tokens = self.num_prompt_tokens = 0

    def count(self, sequence: Sequence, uncached_len: int) -> None:
        """One more, with `uncached_len` prompt tokens to compute; once it has a first token, that is done."""
        if sequence.status is Status.RUNNING:
            self.num_running += 1
        else:
            self.num_waiting += 1
        if not sequence.num_output:
            self.num_queued_tokens += uncached_len
        self.num_prompt_tokens += sequence.input_len

    def snapshot(self, instance: InstanceId, taken_at_ns: int) -> Snapshot:
        """The sums."""
        sums = self.num_waiting, self.num_running, self.num_queued_tokens, self.num_prompt_tokens
        return Snapshot(instance, taken_at_ns, *sums)

"""The GPU block pool on runs: what is cached, what is free, and in which order free blocks are evicted.

Equal, block for block, to the engine's pool of single blocks (vllm/v1/core/block_pool.py with the FreeKVCacheBlockQueue
of kv_cache_utils.py, for one full-attention group), at a cost per operation of the runs it touches. Block ids are not
modelled: blocks without identity are a number, cached blocks are pieces of lanes (kvcore/lane.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from kvcore.errors import require
from kvcore.free_queue import FreeQueue
from kvcore.lane import Lane
from kvcore.types import Run, Segment, Segments, StreamId

Span: TypeAlias = tuple[Lane, int, int]
"""(lane, start, end): the physical copies of blocks [start, end) that one lane has."""


class BlockPool:
    """Reference-counted blocks of one full-attention group, reused in the engine's order.

        holding = pool.hold(pool.match(segments, limit_blocks))     # reuse the cached prefix
        pool.allocate(holding, n)                                   # room for the next tokens, n <= pool.num_free
        pool.cache(holding, segments, upto)                         # full blocks become cached
        pool.free(holding)                                          # finished or preempted

    The engine's null block is not counted: `num_blocks` is what requests can use, one less than the engine's
    `num_gpu_blocks`. Breaking a precondition is a bug and asserts.
    """

    __slots__ = ("_lanes", "_queue", "num_blocks", "num_cached", "num_evicted")

    def __init__(self, num_blocks: int) -> None:
        """A pool of num_blocks free blocks without identity; InvalidArgument unless num_blocks >= 1."""
        require(num_blocks >= 1, "num_blocks", num_blocks, "at least 1 block")
        self.num_blocks = num_blocks
        self.num_cached = 0
        """Physical blocks with an identity, free or held; two copies of one block count twice."""
        self.num_evicted = 0
        """Blocks that lost their identity so far, to an allocation or a reset."""
        self._queue = FreeQueue(num_blocks)
        # Lanes of a stream are ordered: the first one that has a block has the copy of it that was inserted first.
        self._lanes: dict[StreamId, list[Lane]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or not: what `allocate` can give."""
        return self._queue.num_anonymous + self._queue.num_cached

    @property
    def num_anonymous(self) -> int:
        """Free blocks without identity: what `allocate` can give before it evicts."""
        return self._queue.num_anonymous

    def match(self, segments: Segments, limit_blocks: int) -> Match:
        """The longest cached prefix of a sequence, of at most limit_blocks; changes nothing.

        Of several copies of a block it takes the one inserted first. The engine's limit is `hit_limit`.
        """
        spans: list[Span] = []
        at = num_free = 0
        for stream, _, end in segments:
            end = min(end, limit_blocks)
            while at < end:
                lane, stop, free = self._first_copy(stream, at, end)
                if lane is None:
                    return Match(at, num_free, tuple(spans), self.num_evicted)
                spans.append((lane, at, stop))
                at = stop
                num_free += free
        return Match(at, num_free, tuple(spans), self.num_evicted)

    def hold(self, match: Match) -> Holding:
        """Take the matched blocks for one request: free ones leave the queue, each gains a reference.

        The match must have been made since the last eviction.
        """
        assert match.num_evicted == self.num_evicted, "match is older than the last eviction"
        for span in match.spans:
            self._take(span)
        return Holding(list(match.spans), 0, match.num_blocks)

    def allocate(self, holding: Holding, n: int) -> None:
        """Append n blocks without identity to the holding, from the front of the queue; needs n <= num_free."""
        assert 0 <= n <= self.num_free, (n, self.num_free)
        anonymous = min(n, self._queue.num_anonymous)
        self._queue.num_anonymous -= anonymous
        if n > anonymous:
            self._evict(n - anonymous)
        holding.end += n

    def cache(self, holding: Holding, segments: Segments, upto: int) -> None:
        """Give the holding's blocks before `upto` the identities that the sequence's segments name them by.

        Blocks cached already keep theirs. A block whose identity exists becomes another copy, after the existing ones.
        Needs upto <= holding.end, and segments that cover the new blocks.
        """
        assert upto <= holding.end, (upto, holding.end)
        start = holding.cached_end
        for stream, _, end in segments:
            if start < end and start < upto:
                self._insert(holding, stream, start, min(end, upto))
                start = holding.cached_end
        assert start >= upto, f"segments end at block {start}, before {upto}"

    def free(self, holding: Holding) -> None:
        """Give up every block of a holding, which is empty afterwards.

        Blocks that nobody else holds become free: those without identity at the front of the queue, cached ones at the
        back, last block first, so that a sequence is evicted from its tail.
        """
        self._queue.num_anonymous += holding.num_anonymous
        for span in reversed(holding.spans):
            self._release(span)
        holding.clear()

    def pin(self, holding: Holding, run: Run) -> Holding:
        """Another holding of the cached blocks `run` of this one, for a reader that may outlive it."""
        start, end = run
        assert holding.start <= start < end <= holding.cached_end, (run, holding)
        spans = [(lane, max(a, start), min(b, end)) for lane, a, b in holding.spans if a < end and start < b]
        for span in spans:
            self._take(span)
        return Holding(spans, start, end)

    def reset(self) -> bool:
        """Forget every identity, unless some block is held; whether it did."""
        if self.num_free != self.num_blocks:
            return False
        self.num_evicted += self.num_cached
        self.num_cached = 0
        self._lanes.clear()
        self._queue = FreeQueue(self.num_blocks)
        return True

    def eviction_order(self) -> tuple[int, list[Segment]]:
        """The free queue: how many blocks without identity go first, then cached runs, each from its end downwards."""
        return self._queue.num_anonymous, [(piece.lane.stream, piece.start, piece.end) for piece in self._queue]

    def audit(self, holdings: Iterable[Holding]) -> None:
        """Assert that index, queue, counters and references agree, given all holdings not freed yet.

        Costs the number of pieces: for the end of a simulation, and for tests.
        """
        holdings = tuple(holdings)
        lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        pieces = [piece for lane in lanes for piece in lane.pieces]
        queued = list(self._queue)
        ref_counts = _ref_counts(holdings)
        assert ref_counts.keys() <= set(lanes), "a holding refers to a lane that is gone"
        assert all(self._lanes.values()) and all(lane.pieces for lane in lanes), "an empty lane or stream is kept"
        for lane in lanes:
            bounds = [bound for piece in lane.pieces for bound in (piece.start, piece.end)]
            assert bounds[::2] == lane.starts and bounds == sorted(bounds), f"pieces out of order: {bounds}"
            held = [(piece.start, piece.end, piece.ref_cnt) for piece in lane.pieces if piece.ref_cnt]
            assert held == ref_counts.get(lane, []), f"references of {held} are not those of the holdings"
        assert len(queued) == len(set(queued)) and set(queued) == {piece for piece in pieces if not piece.ref_cnt}
        assert all(piece.start < piece.end for piece in pieces), "an empty piece is kept"
        assert self._queue.num_cached == sum(piece.end - piece.start for piece in queued)
        assert self.num_cached == sum(piece.end - piece.start for piece in pieces)
        num_held = sum(piece.end - piece.start for piece in pieces if piece.ref_cnt)
        num_held += sum(holding.num_anonymous for holding in holdings)
        assert self.num_free + num_held == self.num_blocks, "blocks are lost or invented"

    # --- inside: lanes and references ---

    def _first_copy(self, stream: StreamId, at: int, end: int) -> tuple[Lane | None, int, int]:
        """The lane with the oldest copy of block `at`, where in [at, end) that stops holding, and how many are free."""
        for lane in self._lanes.get(stream, ()):
            stop, num_free = lane.reach(at, end)
            if stop > at:
                return lane, stop, num_free
            end = lane.next_start(at, end)
        return None, at, 0

    def _insert(self, holding: Holding, stream: StreamId, start: int, end: int) -> None:
        """Blocks [start, end) of the holding, right after its cached ones, become cached in the stream."""
        lane = self._lane_for(stream, start, end)
        lane.add(start, end)
        if holding.spans and holding.spans[-1][0] is lane:
            start = holding.spans.pop()[1]
        holding.spans.append((lane, start, end))
        self.num_cached += end - holding.cached_end
        holding.cached_end = end

    def _lane_for(self, stream: StreamId, start: int, end: int) -> Lane:
        """The first lane that has none of [start, end) and comes after all that have some."""
        lanes = self._lanes.setdefault(stream, [])
        chosen = None
        for lane in reversed(lanes):
            if lane.overlaps(start, end):
                break
            chosen = lane
        if chosen is None:
            chosen = Lane(stream)
            lanes.append(chosen)
        return chosen

    def _take(self, span: Span) -> None:
        """One more reference for each block of the span; those without any leave the queue."""
        lane, start, end = span
        first, last = lane.cut(start), lane.cut(end)
        for piece in lane.pieces[first:last]:
            if not piece.ref_cnt:
                self._queue.remove(piece)
            piece.ref_cnt += 1
        lane.join(first, last)

    def _release(self, span: Span) -> None:
        """One reference less for each block of the span; those left with none go to the back of the queue."""
        lane, start, end = span
        first, last = lane.cut(start), lane.cut(end)
        for piece in reversed(lane.pieces[first:last]):
            piece.ref_cnt -= 1
            if not piece.ref_cnt:
                self._queue.append(piece)
        lane.join(first, last)

    def _evict(self, n: int) -> None:
        """The n cached blocks at the front of the queue lose their identity."""
        self.num_cached -= n
        self.num_evicted += n
        for piece in self._queue.pop_cached(n):
            piece.lane.remove(piece)
            if not piece.lane.pieces:
                self._drop(piece.lane)

    def _drop(self, lane: Lane) -> None:
        """Forget a lane without blocks, and its stream with the last one."""
        lanes = self._lanes[lane.stream]
        lanes.remove(lane)
        if not lanes:
            del self._lanes[lane.stream]


class Match(NamedTuple):
    """A cached prefix, as of one moment; `spans` and `num_evicted` are the pool's own."""

    num_blocks: int
    """Length of the prefix."""
    num_free: int
    """How many of its blocks are in the free queue: holding it lowers the pool's num_free by this."""
    spans: tuple[Span, ...]
    num_evicted: int


class Holding:
    """The blocks [start, end) of a sequence that one request, or one reader, has references to.

    [start, cached_end) have an identity, [cached_end, end) have none yet. Only the pool changes it, or reads `spans`.
    """

    __slots__ = ("cached_end", "end", "spans", "start")

    def __init__(self, spans: list[Span], start: int, cached_end: int) -> None:
        self.spans = spans
        self.start = start
        self.cached_end = cached_end
        self.end = cached_end

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self.end - self.start

    @property
    def num_anonymous(self) -> int:
        """Blocks without identity."""
        return self.end - self.cached_end

    def clear(self) -> None:
        """Hold nothing."""
        self.spans = []
        self.start = self.cached_end = self.end = 0


def hit_limit(num_tokens: int, block_size: int) -> int:
    """Blocks that a hit of `num_tokens` (at least 1) can have at most: one token is always left to compute."""
    return (num_tokens - 1) // block_size


def _ref_counts(holdings: Iterable[Holding]) -> dict[Lane, list[tuple[int, int, int]]]:
    """Per lane, (start, end, ref_cnt) of the blocks that the holdings refer to, in as few steps as there are."""
    changes: defaultdict[Lane, Counter[int]] = defaultdict(Counter)
    for lane, start, end in (span for holding in holdings for span in holding.spans):
        changes[lane].update({start: 1})
        changes[lane].subtract({end: 1})
    steps = {}
    for lane, change in changes.items():
        bounds = sorted(at for at in change if change[at])
        ref_cnts = accumulate(change[at] for at in bounds)
        steps[lane] = [step for step in zip(bounds, bounds[1:], ref_cnts, strict=False) if step[2]]
    return steps

"""The GPU block pool on runs: what is cached, what is free, and in which order free blocks are evicted.

Equal, block for block, to the engine's pool of single blocks (vllm/v1/core/block_pool.py with the FreeKVCacheBlockQueue
of kv_cache_utils.py), at a cost per operation of the runs it touches. Block ids are not modelled: blocks without
identity are a number, cached blocks are pieces of lanes (kvcore/lane.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from kvcore.errors import require
from kvcore.free_queue import FreeQueue
from kvcore.holding import Holding, Match, Pin, Span
from kvcore.lane import Lane
from kvcore.runs import normalize, subtract
from kvcore.types import Run, Runs, Segment, Segments, StreamId


class BlockPool:
    """Reference-counted blocks that the groups of a model share, reused in the engine's order.

        holding = pool.hold(pool.match(segments, limit_blocks))     # reuse the cached prefix
        pool.allocate(holding, n)                                   # room for the next tokens, n <= pool.num_free
        pool.cache(holding, segments, upto)                         # full blocks become cached
        pool.drop(holding, before)                                  # out of a window
        pool.free(holding)                                          # finished or preempted

    The engine's null block is not counted: `num_blocks` is what requests can use, one less than the engine's
    `num_gpu_blocks`. Breaking a precondition is a bug and asserts.
    """

    __slots__ = ("_lanes", "_queue", "num_blocks", "num_cached", "num_evicted")

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        """A pool of num_blocks free blocks without identity; InvalidArgument unless num_blocks >= 1."""
        require(num_blocks >= 1, "num_blocks", num_blocks, "at least 1 block")
        self.num_blocks = num_blocks
        self.num_cached = 0
        """Physical blocks with an identity, free or held; two copies of one block count twice."""
        self.num_evicted = 0
        """Blocks that lost their identity so far, to an allocation or a reset."""
        self._queue = FreeQueue(num_blocks)
        # Lanes of a stream are ordered: the first one that has a block has the copy of it that was inserted first.
        self._lanes: tuple[dict[StreamId, list[Lane]], ...] = tuple({} for _ in range(num_groups))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or not: what `allocate` can give."""
        return self._queue.num_anonymous + self._queue.num_cached

    @property
    def num_anonymous(self) -> int:
        """Free blocks without identity: what `allocate` can give before it evicts."""
        return self._queue.num_anonymous

    def match(self, segments: Segments, limit_blocks: int, start: int = 0, group: int = 0) -> Match:
        """The cached blocks of a sequence from `start` on before the first gap, up to limit_blocks; changes nothing.

        Of several copies of a block it takes the one inserted first. The engine's limit is `hit_limit`.
        """
        spans: list[Span] = []
        lanes = self._lanes[group]
        at, num_free = start, 0
        for stream, _, end in segments:
            end = min(end, limit_blocks)
            while at < end:
                lane, stop, free = _first_copy(lanes.get(stream, ()), at, end)
                if lane is None:
                    return Match(group, start, at, num_free, tuple(spans), self.num_evicted)
                spans.append((lane, at, stop))
                at = stop
                num_free += free
        return Match(group, start, at, num_free, tuple(spans), self.num_evicted)

    def present(self, segments: Segments, limit_blocks: int, group: int = 0) -> Runs:
        """All cached blocks of a sequence before limit_blocks."""
        lanes = self._lanes[group]
        return normalize(
            run
            for stream, start, end in segments
            for lane in lanes.get(stream, ())
            for run in lane.runs(start, min(end, limit_blocks))
        )

    def hold(self, match: Match) -> Holding:
        """Take the matched blocks for one request: free ones leave the queue, each gains a reference.

        The match must have been made since the last eviction.
        """
        assert match.num_evicted == self.num_evicted, "match is older than the last eviction"
        for span in match.spans:
            self._take(span)
        return Holding(match.group, list(match.spans), match.start, match.end)

    def allocate(self, holding: Holding, n: int) -> None:
        """Append n blocks without identity to the holding, from the front of the queue; needs n <= num_free."""
        assert 0 <= n <= self.num_free, (n, self.num_free)
        anonymous = min(n, self._queue.num_anonymous)
        self._queue.num_anonymous -= anonymous
        if n > anonymous:
            self._evict(n - anonymous)
        holding.end += n

    def cache(self, holding: Holding, segments: Segments, upto: int, kept: Runs | None = None) -> None:
        """Give the holding's blocks before `upto` the identities that the sequence's segments name them by.

        Of the blocks that have none yet only the `kept`, if given. Blocks cached already keep theirs. A block whose
        identity exists becomes another copy, after the existing ones. Needs upto <= holding.end, and segments that
        cover the new blocks.
        """
        assert upto <= holding.end, (upto, holding.end)
        first = holding.cached_end
        if kept is None:
            self._name(holding, segments, first, upto)
            return
        for start, end in kept:
            self._name(holding, segments, start, end)
        holding.unkept += subtract(((first, upto),), kept)
        holding.cached_end = upto

    def drop(self, holding: Holding, before: int) -> None:
        """Give up the blocks of a holding before `before` <= its end; as `free`."""
        self._queue.num_anonymous += holding.give_up(before)
        for span in reversed(holding.cut(before)):
            self._release(span)

    def free(self, holding: Holding) -> None:
        """Give up every block of a holding, which is empty afterwards.

        Blocks that nobody else holds become free: those without identity at the front of the queue, cached ones at the
        back, last block first, so that a sequence is evicted from its tail.
        """
        self._queue.num_anonymous += holding.give_up(holding.end)
        for span in reversed(holding.spans):
            self._release(span)
        holding.clear()

    def pin(self, holding: Holding, run: Run) -> Holding:
        """Another holding of the blocks `run` of this one, for a reader that may outlive it."""
        start, end = run
        assert holding.start <= start < end <= holding.end, (run, holding)
        spans = [(lane, max(a, start), min(b, end)) for lane, a, b in holding.spans if a < end and start < b]
        for span in spans:
            self._take(span)
        if sum([b - a for _, a, b in spans]) == end - start:
            return Holding(holding.group, spans, start, end)
        return Pin(holding, spans, run)

    def reset(self) -> bool:
        """Forget every identity, unless some block is held; whether it did."""
        if self.num_free != self.num_blocks:
            return False
        self.num_evicted += self.num_cached
        self.num_cached = 0
        self._lanes = tuple({} for _ in self._lanes)
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
        streams = [lanes for group in self._lanes for lanes in group.values()]
        lanes = [lane for lanes in streams for lane in lanes]
        pieces = [piece for lane in lanes for piece in lane.pieces]
        queued = list(self._queue)
        ref_counts = _ref_counts(holdings)
        assert ref_counts.keys() <= set(lanes), "a holding refers to a lane that is gone"
        assert all(streams) and all(lane.pieces for lane in lanes), "an empty lane or stream is kept"
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

    def _name(self, holding: Holding, segments: Segments, start: int, upto: int) -> None:
        """Blocks [start, upto) of the holding become cached in the streams that the segments name."""
        for stream, _, end in segments:
            if start < end and start < upto:
                self._insert(holding, stream, start, min(end, upto))
                start = holding.cached_end
        assert start >= upto, f"segments end at block {start}, before {upto}"

    def _insert(self, holding: Holding, stream: StreamId, start: int, end: int) -> None:
        """Blocks [start, end) of the holding, after its cached ones, become cached in the stream."""
        lane = self._lane_for(holding.group, stream, start, end)
        lane.add(start, end)
        self.num_cached += end - start
        holding.cached_end = end
        for pin in holding.lent:
            for span in pin.named((lane, start, end)):
                self._take(span)
        if holding.spans and holding.spans[-1][0] is lane and holding.spans[-1][2] == start:
            start = holding.spans.pop()[1]
        holding.spans.append((lane, start, end))

    def _lane_for(self, group: int, stream: StreamId, start: int, end: int) -> Lane:
        """The first lane that has none of [start, end) and comes after all that have some."""
        lanes = self._lanes[group].setdefault(stream, [])
        chosen = None
        for lane in reversed(lanes):
            if lane.overlaps(start, end):
                break
            chosen = lane
        if chosen is None:
            chosen = Lane(group, stream)
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
        streams = self._lanes[lane.group]
        lanes = streams[lane.stream]
        lanes.remove(lane)
        if not lanes:
            del streams[lane.stream]


def hit_limit(num_tokens: int, block_size: int) -> int:
    """Blocks that a hit of `num_tokens` (at least 1) can have at most: one token is always left to compute."""
    return (num_tokens - 1) // block_size


def _first_copy(lanes: Sequence[Lane], at: int, end: int) -> tuple[Lane | None, int, int]:
    """The lane with the oldest copy of block `at`, where in [at, end) that stops holding, and how many are free."""
    for lane in lanes:
        stop, num_free = lane.reach(at, end)
        if stop > at:
            return lane, stop, num_free
        end = lane.next_start(at, end)
    return None, at, 0


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

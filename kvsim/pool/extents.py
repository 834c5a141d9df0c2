"""Blocks of the simulated pool in run form: who is where under which lease, and in which order they may be evicted."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from kvcore import runs as runs_of
from kvcore.eviction.runs import Candidate, Lineage, Piece
from kvcore.hints import Pin
from kvcore.runs import overlap
from kvcore.types import GroupId, Run, Runs, Segments


class Mark(NamedTuple):
    """What the hints of a put leave on its blocks; `until_ns` None: the pin does not end by itself."""

    pin: Pin
    priority: int
    until_ns: int | None = None
    session: str | None = None

    @property
    def released(self) -> "Mark | None":
        """The same without its pin."""
        return Mark(Pin.NONE, self.priority) if self.priority else None


class Extent(NamedTuple):
    """Blocks [start, end) of one lineage with the same mark that were granted the same lease by the same call."""

    start: int
    end: int
    lease_ns: int
    grant: int
    mark: Mark | None = None


EvictionKey: TypeAlias = tuple[int, int, int, int, Lineage]
"""(lease_ns, grant, -end, start, lineage) of an extent: the smallest one goes first, from its end."""

Rank: TypeAlias = tuple[Pin, int]
"""(pin, priority): of those pinned alike, extents of the smallest priority go first."""

ORDINARY: Rank = (Pin.NONE, 0)


class Extents:
    """The extents of every lineage, sorted and disjoint, and a queue for each rank."""

    def __init__(self) -> None:
        self._of: dict[Lineage, list[Extent]] = {}
        self._num_extents = 0
        self.num_staying = 0
        """Blocks that are in no queue, because their pin lets them never go."""
        # Heaps; entries whose extent has changed are stale and skipped.
        self._queues: dict[Rank, list[EvictionKey]] = {ORDINARY: []}
        self._num_queued = 0

    def __iter__(self) -> Iterator[tuple[Lineage, Extent]]:
        return ((lineage, extent) for lineage, extents in self._of.items() for extent in extents)

    def overlapping(self, lineage: Lineage, start: int, end: int) -> list[Extent]:
        """Those that hold a block of [start, end)."""
        extents = self._of.get(lineage)
        return extents[slice(*overlap(extents, start, end))] if extents else []

    def held(self, lineage: Lineage, start: int, end: int) -> list[Run]:
        """The blocks of [start, end) that are here, as sorted runs, which may touch."""
        return [(max(start, extent.start), min(end, extent.end)) for extent in self.overlapping(lineage, start, end)]

    def found(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are here, by their place in the sequence that `segments` name."""
        return runs_of.normalize([run for piece in pieces(group, segments, runs) for run in self.held(*piece)])

    def add(self, lineage: Lineage, extent: Extent) -> None:
        """Blocks that nothing holds now."""
        extents = self._of.setdefault(lineage, [])
        extents.insert(bisect_left(extents, extent), extent)
        self._num_extents += 1
        if extent.mark is not None:
            self.num_staying += _staying(extent)
        self._enqueue(lineage, extent)

    def cut(self, lineage: Lineage, start: int, end: int) -> list[Extent]:
        """Take [start, end) out of the lineage; returns what was there. What sticks out on either side stays."""
        extents = self._of.get(lineage)
        if not extents:
            return []
        first, last = overlap(extents, start, end)
        cut = extents[first:last]
        if not cut:
            return []
        outside: list[Extent] = []
        if cut[0].start < start:
            left, cut[0] = _halves(cut[0], start)
            outside.append(left)
        if end < cut[-1].end:
            cut[-1], right = _halves(cut[-1], end)
            outside.append(right)
        extents[first:last] = outside
        self._num_extents += len(outside) - len(cut)
        if self.num_staying:
            self.num_staying -= sum(map(_staying, cut))
        if not extents:
            del self._of[lineage]
        for part in outside:
            self._enqueue(lineage, part)
        return cut

    def release(self, lineage: Lineage, is_over: Callable[[Mark], bool]) -> None:
        """Take the pin off the lineage's extents whose mark is over."""
        extents = self._of.get(lineage, [])
        for index, extent in enumerate(extents):
            if extent.mark is not None and extent.mark.pin is not Pin.NONE and is_over(extent.mark):
                self.num_staying -= _staying(extent)
                extents[index] = extent._replace(mark=extent.mark.released)
                self._enqueue(lineage, extents[index])

    def ranks(self, pin: Pin) -> list[Rank]:
        """Those of the pin that there are, in the order in which they go."""
        return [(pin, priority) for priority in sorted(rank[1] for rank in self._queues if rank[0] is pin)]

    def pop_expired(self, rank: Rank, now_ns: int) -> Candidate | None:
        """The first of the rank in line whose lease has expired. It stays where it is."""
        queue = self._queues.get(rank)
        while queue and queue[0][0] <= now_ns:
            key = heappop(queue)
            self._num_queued -= 1
            if self._is_live(key, rank):
                return key[1:]
        return None

    def audit(self) -> None:
        """Extents are disjoint, counted, and all of each is in the queue of its rank."""
        queued: defaultdict[tuple[Rank, Lineage, int], list[Run]] = defaultdict(list)
        for rank, (grant, negative_end, start, lineage) in self._queued():
            queued[rank, lineage, grant].append((start, -negative_end))
        for lineage, extents in self._of.items():
            assert extents, lineage
            assert all(left.end <= right.start for left, right in pairwise(extents)), lineage
            for extent in extents:
                assert extent.start < extent.end, (lineage, extent)
                if (own := rank_of(extent.mark)) is not None:
                    waiting = runs_of.normalize(queued[own, lineage, extent.grant])
                    assert not runs_of.subtract((extent[:2],), waiting), (lineage, extent)
        assert sum(map(len, self._of.values())) == self._num_extents
        assert sum(_staying(extent) for _, extent in self) == self.num_staying
        assert sum(map(len, self._queues.values())) == self._num_queued

    def _queued(self) -> Iterator[tuple[Rank, Candidate]]:
        """Entries of the queues that are not stale."""
        return ((rank, key[1:]) for rank, queue in self._queues.items() for key in queue if self._is_live(key, rank))

    def _is_live(self, key: EvictionKey, rank: Rank) -> bool:
        lease_ns, grant, negative_end, start, lineage = key
        extents = self._of.get(lineage, ())
        index = bisect_left(extents, (start,))
        if index == len(extents) or extents[index][:4] != (start, -negative_end, lease_ns, grant):
            return False
        return rank_of(extents[index].mark) == rank

    def _enqueue(self, lineage: Lineage, extent: Extent) -> None:
        rank = rank_of(extent.mark)
        if rank is None:
            return
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = []
        heappush(queue, _eviction_key(lineage, extent))
        self._num_queued += 1
        if self._num_queued > 4 * self._num_extents + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._queues = {ORDINARY: []}
        for lineage, extent in self:
            rank = rank_of(extent.mark)
            if rank is not None:
                self._queues.setdefault(rank, []).append(_eviction_key(lineage, extent))
        for queue in self._queues.values():
            heapify(queue)
        self._num_queued = sum(map(len, self._queues.values()))


def rank_of(mark: Mark | None) -> Rank | None:
    """In which queue its extents stand; None: in none, they stay."""
    if mark is None:
        return ORDINARY
    return None if mark.pin is Pin.HARD else (mark.pin, mark.priority)


def merged(extents: list[Extent]) -> list[tuple[int, int, Mark | None]]:
    """(start, end, mark) of what the extents cover, in one where they touch and have one mark."""
    parts: list[tuple[int, int, Mark | None]] = []
    for start, end, _, _, mark in extents:
        if parts and parts[-1][1:] == (start, mark):
            start = parts.pop()[0]
        parts.append((start, end, mark))
    return parts


def pieces(group: GroupId, segments: Segments, runs: Runs) -> Iterator[Piece]:
    """`runs` cut at segment borders, each part with the lineage that names it."""
    i = 0
    for start, end in runs:
        while start < end:
            while segments[i][2] <= start:
                i += 1
            stream, first, last = segments[i]
            assert first <= start, (segments, runs)
            yield (group, stream), start, min(end, last)
            start = min(end, last)


def split(absent: Sequence[Piece], num_blocks: int) -> tuple[list[Piece], Runs]:
    """The first `num_blocks` blocks, and the runs of the rest."""
    head: list[Piece] = []
    rest: list[Run] = []
    for lineage, start, end in absent:
        cut = min(end, start + num_blocks)
        num_blocks -= cut - start
        if start < cut:
            head.append((lineage, start, cut))
        rest.append((cut, end))
    return head, runs_of.normalize(rest)


def _staying(extent: Extent) -> int:
    mark = extent.mark
    return extent.end - extent.start if mark is not None and mark.pin is Pin.HARD else 0


def _halves(extent: Extent, block: int) -> tuple[Extent, Extent]:
    """The extent cut at `block`: [start, block) and [block, end)."""
    start, end, lease_ns, grant, mark = extent
    return Extent(start, block, lease_ns, grant, mark), Extent(block, end, lease_ns, grant, mark)


def _eviction_key(lineage: Lineage, extent: Extent) -> EvictionKey:
    return (extent.lease_ns, extent.grant, -extent.end, extent.start, lineage)

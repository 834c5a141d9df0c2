"""Where the blocks of the pool are: which segment holds which copy of which block. On runs.

A master places each object by itself. Kept so, a run of blocks would fall into as many pieces as it has blocks. A
`Place` says it for a whole run instead: its blocks are dealt to a ring of segments in turn, the first to any of them.
Where one block is, is then distributed as the master does it. How many of a run's blocks a segment holds has the same
mean, and differs from it by less than one block, where the master's own number has a multinomial's variance.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage
from kvcore.runs import overlap
from kvcore.types import Runs

Ring: TypeAlias = tuple[int, ...]
"""Segments, each once."""


class Place(NamedTuple):
    """Blocks [start, end) of a lineage: copy j of block k is in segment ring[(k + phase + j) % len(ring)].

    Copies of one block are in neighbours of the ring, as the master's random strategy has them: it draws the first
    segment and takes the next ones in its order.
    """

    start: int
    end: int
    ring: Ring
    copies: int

    def clipped(self, start: int, end: int) -> "Place":
        """What of it is in [start, end), which it touches."""
        return self._replace(start=max(self.start, start), end=min(self.end, end))

    def counts(self, phase: int) -> list[int]:
        """How many blocks have their first copy in ring[i], for each i."""
        size = len(self.ring)
        cycles, rest = divmod(self.end - self.start, size)
        counts, first = [cycles] * size, (self.start + phase) % size
        for i in range(first, first + rest):
            counts[i % size] += 1
        return counts

    def holders(self, index: int) -> Ring:
        """The segments of the copies of a block whose first copy is in ring[index]."""
        return tuple(self.ring[(index + j) % len(self.ring)] for j in range(self.copies))

    def blocks(self, phase: int, are_wanted: Callable[[Ring], bool]) -> Runs:
        """The blocks of which the segments of the copies, the first one first, are wanted; O(blocks) unless all are."""
        size = len(self.ring)
        found = [i for i in range(size) if are_wanted(self.holders(i))]
        if len(found) == size:
            return ((self.start, self.end),)
        firsts = [self.start + (i - self.start - phase) % size for i in found]
        return runs_of.normalize((k, k + 1) for first in firsts for k in range(first, self.end, size))

    def without(self, gone: set[int], phase: int) -> Runs:
        """The blocks of which every copy is in a segment that is gone."""
        return self.blocks(phase, gone.issuperset)


def phase(lineage: Lineage) -> int:
    """Where a lineage begins on every ring: any number, equally likely, and the same in every run."""
    group, stream = lineage
    # The finalizer of SplitMix64, of Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
    x = (stream * 0x9E3779B97F4A7C15 + group * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


_MASK = (1 << 64) - 1


class Places:
    """The places of every lineage, sorted and disjoint; those that touch and are alike are one."""

    def __init__(self) -> None:
        self._of: dict[Lineage, list[Place]] = {}

    def __iter__(self) -> Iterator[tuple[Lineage, Place]]:
        return ((lineage, place) for lineage, places in self._of.items() for place in places)

    def overlapping(self, lineage: Lineage, start: int, end: int) -> list[Place]:
        """The parts of them in [start, end)."""
        places = self._of.get(lineage)
        if not places:
            return []
        return [place.clipped(start, end) for place in places[slice(*overlap(places, start, end))]]

    def add(self, lineage: Lineage, place: Place) -> None:
        """Blocks that have no place now."""
        places = self._of.setdefault(lineage, [])
        at = bisect_left(places, place)
        if at < len(places) and _continues(place, places[at]):
            place = place._replace(end=places.pop(at).end)
        if at and _continues(places[at - 1], place):
            at -= 1
            place = place._replace(start=places.pop(at).start)
        places.insert(at, place)

    def cut(self, lineage: Lineage, start: int, end: int) -> list[Place]:
        """Take [start, end) out of the lineage; returns what was there."""
        places = self._of.get(lineage)
        if not places:
            return []
        first, last = overlap(places, start, end)
        cut = places[first:last]
        if not cut:
            return []
        places[first:last] = [
            *([cut[0]._replace(end=start)] if cut[0].start < start else ()),
            *([cut[-1]._replace(start=end)] if end < cut[-1].end else ()),
        ]
        if not places:
            del self._of[lineage]
        return [place.clipped(start, end) for place in cut]

    def audit(self) -> None:
        """Places are disjoint."""
        for lineage, places in self._of.items():
            assert places and all(place.start < place.end for place in places), lineage
            assert all(left.end <= right.start for left, right in pairwise(places)), lineage


def _continues(left: Place, right: Place) -> bool:
    return left.end == right.start and left[2:] == right[2:]


def copies_by_segment(lineage: Lineage, place: Place) -> Counter[int]:
    """How many copies of the place's blocks each segment of its ring holds."""
    held = Counter[int]()
    for index, count in enumerate(place.counts(phase(lineage))):
        for segment in place.holders(index):
            held[segment] += count
    return held

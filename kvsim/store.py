"""The shared pool as Mooncake's master keeps it: which blocks exist, under which lease, and which go first. On runs.

Semantics of `mooncake_master` 0.3.13 (mooncake-store, `MasterService`), per object (here: one block of one group):

- a complete put sets the object's lease to now; a put of an existing object changes nothing;
- exists and get grant a lease of `lease_ttl_ns` to what they find; a leased object (now < lease) is never evicted;
- above the high watermark, max(eviction_ratio, used_ratio - watermark + eviction_ratio) of all objects are evicted,
  those whose lease expired longest ago first, again and again until the watermark is reached;
- a put that finds no space makes the master evict in the same way, and is refused when nothing can go.

Where the master leaves the order to chance, this store decides: leases that expire at one instant go in the order they
were granted, and inside one grant from the tail of the sequence to its head, so that what stays is a usable prefix.
Other differences: the master's eviction thread looks every 10 ms, here it acts between two calls; a put takes its
space when it is complete, not when it starts (a writer calls `put` when its bytes have arrived).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from kvcore import runs as runs_of
from kvcore.types import GroupId, Run, Runs, Segments, StreamId

Lineage: TypeAlias = tuple[GroupId, StreamId]


class Extent(NamedTuple):
    """Blocks [start, end) of one lineage that were granted the same lease by the same call."""

    start: int
    end: int
    lease_ns: int
    grant: int


_START = attrgetter("start")
_END = attrgetter("end")

EvictionKey: TypeAlias = tuple[int, int, int, int, Lineage]
"""(lease_ns, grant, -end, start, lineage) of an extent: the smallest one goes first, from its end."""


@dataclass(slots=True)
class PoolCounters:
    """What happened to a pool, in objects unless said otherwise."""

    lookups: int = 0
    """Calls of exists."""
    asked: int = 0
    """Keys that exists was asked for."""
    found: int = 0
    """Keys that exists found."""
    got: int = 0
    """Keys that get found."""
    late: int = 0
    """Keys that get was asked for and that were gone."""
    put: int = 0
    rejected: int = 0
    """Puts refused for want of space."""
    removed: int = 0
    evicted: int = 0
    evictions: int = 0
    """Passes that evicted something."""


class MooncakePool:
    """`capacity_bytes` of host memory shared by all instances; a block of group g takes `block_bytes[g]`.

    `segments` name the content of a sequence's blocks and cover every block of `runs`, which are positions in that
    sequence. Time never runs backwards. Every call is linear in the extents it touches, never in blocks.
    """

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: Sequence[int],
        lease_ttl_ns: int,
        eviction_high_watermark_ratio: float,
        eviction_ratio: float,
    ) -> None:
        assert capacity_bytes > 0 and all(size > 0 for size in block_bytes), (capacity_bytes, block_bytes)
        self._capacity_bytes = capacity_bytes
        self._block_bytes = tuple(block_bytes)
        self._lease_ttl_ns = lease_ttl_ns
        # The decimal the user wrote, exactly.
        self._watermark = Fraction(str(eviction_high_watermark_ratio))
        self._eviction_ratio = Fraction(str(eviction_ratio))
        self._watermark_bytes = int(capacity_bytes * self._watermark)
        self._extents: dict[Lineage, list[Extent]] = {}
        self._queue: list[EvictionKey] = []  # heap; entries whose extent has changed are stale and skipped
        self._num_extents = 0
        self._grants = 0
        self._now_ns = 0
        self.num_objects = 0
        self.used_bytes = 0
        self.counters = PoolCounters()

    def exists(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """The blocks of `runs` that are here; each is leased until `now_ns` + the lease time."""
        self._tick(now_ns)
        found = self._grant_found(group, segments, runs)
        self.counters.lookups += 1
        self.counters.asked += runs_of.num_blocks(runs)
        self.counters.found += runs_of.num_blocks(found)
        return found

    def holds(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are here, as whoever follows the master's events knows: no lease, not counted."""
        return self._found(group, segments, runs)

    def get(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """The blocks of `runs` that can be read now, leased anew; one that was promised and is gone is a late miss."""
        self._tick(now_ns)
        found = self._grant_found(group, segments, runs)
        num_found = runs_of.num_blocks(found)
        self.counters.got += num_found
        self.counters.late += runs_of.num_blocks(runs) - num_found
        return found

    def put(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """Store the blocks of `runs`; returns those refused for want of space, the last ones of the sequence.

        Blocks that are here already stay as they are.
        """
        self._tick(now_ns)
        absent = runs_of.subtract(runs, self._found(group, segments, runs))
        size_bytes = self._block_bytes[group]
        num_absent = runs_of.num_blocks(absent)
        while self._free_bytes() < num_absent * size_bytes and self._evict():
            pass
        accepted, rejected = _split(absent, self._free_bytes() // size_bytes)
        self._insert(group, segments, accepted)
        self.counters.rejected += runs_of.num_blocks(rejected)
        # This ends at or below the watermark, whatever is leased: at worst what was just put goes again.
        while self.used_bytes > self._watermark_bytes and self._evict():
            pass
        return rejected

    def remove(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """Forget the blocks of `runs`, leased or not; returns those that were here."""
        self._tick(now_ns)
        removed: list[Run] = []
        for lineage, start, end in _pieces(group, segments, runs):
            for extent in self._cut(lineage, start, end):
                removed.append((extent.start, extent.end))
                self._account(lineage, -(extent.end - extent.start))
        self.counters.removed += sum(end - start for start, end in removed)
        return runs_of.normalize(removed)

    def audit(self) -> None:
        """Objects and bytes are conserved, extents are disjoint, and the eviction queue knows each of them."""
        queued = set(self._queue)
        num_objects = used_bytes = num_extents = 0
        for lineage, extents in self._extents.items():
            assert extents, lineage
            assert all(left.end <= right.start for left, right in pairwise(extents)), lineage
            for extent in extents:
                assert extent.start < extent.end and _eviction_key(lineage, extent) in queued, (lineage, extent)
                num_objects += extent.end - extent.start
                used_bytes += (extent.end - extent.start) * self._block_bytes[lineage[0]]
            num_extents += len(extents)
        assert (num_objects, used_bytes, num_extents) == (self.num_objects, self.used_bytes, self._num_extents)
        assert used_bytes <= self._watermark_bytes, (used_bytes, self._watermark_bytes)
        gone = self.counters.evicted + self.counters.removed
        assert self.counters.put == self.num_objects + gone, self.counters

    def _tick(self, now_ns: int) -> None:
        assert now_ns >= self._now_ns, (now_ns, self._now_ns)
        self._now_ns = now_ns
        self._grants += 1

    def _found(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are here, without granting anything."""
        found = [
            (max(start, extent.start), min(end, extent.end))
            for lineage, start, end in _pieces(group, segments, runs)
            for extent in self._overlapping(lineage, start, end)
        ]
        return runs_of.normalize(found)

    def _overlapping(self, lineage: Lineage, start: int, end: int) -> list[Extent]:
        extents = self._extents.get(lineage)
        return extents[slice(*_overlap(extents, start, end))] if extents else []

    def _grant_found(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are here, each piece of a lineage merged into one extent with the new lease."""
        found: list[Run] = []
        for lineage, start, end in _pieces(group, segments, runs):
            present = runs_of.normalize((extent.start, extent.end) for extent in self._cut(lineage, start, end))
            self._grant(lineage, present, self._now_ns + self._lease_ttl_ns)
            found.extend(present)
        return runs_of.normalize(found)

    def _insert(self, group: GroupId, segments: Segments, absent: Runs) -> None:
        for lineage, start, end in _pieces(group, segments, absent):
            self._grant(lineage, ((start, end),), self._now_ns)
            self._account(lineage, end - start)
            self.counters.put += end - start

    def _grant(self, lineage: Lineage, runs: Runs, lease_ns: int) -> None:
        """Add extents for `runs`, which hold nothing now, under this call's grant."""
        for start, end in runs:
            self._add(lineage, Extent(start, end, lease_ns, self._grants))

    def _account(self, lineage: Lineage, num_objects: int) -> None:
        self.num_objects += num_objects
        self.used_bytes += num_objects * self._block_bytes[lineage[0]]

    def _free_bytes(self) -> int:
        return self._capacity_bytes - self.used_bytes

    # --- extents and their queue ---

    def _add(self, lineage: Lineage, extent: Extent) -> None:
        extents = self._extents.setdefault(lineage, [])
        extents.insert(bisect_left(extents, extent), extent)
        self._num_extents += 1
        self._enqueue(lineage, extent)

    def _enqueue(self, lineage: Lineage, extent: Extent) -> None:
        heappush(self._queue, _eviction_key(lineage, extent))
        if len(self._queue) > 4 * self._num_extents + 64:
            self._queue = [_eviction_key(owner, live) for owner, owned in self._extents.items() for live in owned]
            heapify(self._queue)

    def _cut(self, lineage: Lineage, start: int, end: int) -> list[Extent]:
        """Take [start, end) out of the lineage; returns what was there. What sticks out on either side stays."""
        extents = self._extents.get(lineage)
        if not extents:
            return []
        first, last = _overlap(extents, start, end)
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
        if not extents:
            del self._extents[lineage]
        for part in outside:
            self._enqueue(lineage, part)
        return cut

    def _is_live(self, key: EvictionKey) -> bool:
        lease_ns, grant, negative_end, start, lineage = key
        return self._overlapping(lineage, start, start + 1) == [Extent(start, -negative_end, lease_ns, grant)]

    def _evict(self) -> int:
        """Evict the share of objects the master would; returns how many had an expired lease and went."""
        over = Fraction(self.used_bytes, self._capacity_bytes) - self._watermark
        share = self._eviction_ratio + max(Fraction(0), over)
        goal = min(self.num_objects, -(-self.num_objects * share.numerator // share.denominator))
        evicted = 0
        while evicted < goal and self._queue and self._queue[0][0] <= self._now_ns:
            key = heappop(self._queue)
            if self._is_live(key):
                evicted += self._evict_tail(key, goal - evicted)
        self.counters.evictions += evicted > 0
        self.counters.evicted += evicted
        return evicted

    def _evict_tail(self, key: EvictionKey, limit: int) -> int:
        _, _, negative_end, start, lineage = key
        end = -negative_end
        count = min(limit, end - start)
        self._cut(lineage, end - count, end)
        self._account(lineage, -count)
        return count


def _halves(extent: Extent, block: int) -> tuple[Extent, Extent]:
    """The extent cut at `block`: [start, block) and [block, end)."""
    start, end, lease_ns, grant = extent
    return Extent(start, block, lease_ns, grant), Extent(block, end, lease_ns, grant)


def _eviction_key(lineage: Lineage, extent: Extent) -> EvictionKey:
    return (extent.lease_ns, extent.grant, -extent.end, extent.start, lineage)


def _pieces(group: GroupId, segments: Segments, runs: Runs) -> Iterator[tuple[Lineage, int, int]]:
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


def _overlap(extents: list[Extent], start: int, end: int) -> tuple[int, int]:
    """Indices [first, last) of the extents that hold a block of [start, end)."""
    first = bisect_right(extents, start, key=_END)
    return first, bisect_left(extents, end, lo=first, key=_START)


def _split(runs: Runs, num_blocks: int) -> tuple[Runs, Runs]:
    """The first `num_blocks` blocks of `runs`, and the rest."""
    for start, end in runs:
        if num_blocks <= end - start:
            head = runs_of.intersect(runs, runs_of.normalize([(0, start + num_blocks)]))
            return head, runs_of.subtract(runs, head)
        num_blocks -= end - start
    return runs, ()

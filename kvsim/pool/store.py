"""The shared pool as Mooncake's master keeps it: which blocks exist, under which lease, and which go first. On runs.

Semantics of `mooncake_master` 0.3.13 (mooncake-store, `MasterService`), per object (here: one block of one group):

- a complete put sets the object's lease to now; a put of an existing object changes nothing;
- exists and get grant a lease of `lease_ttl_ns` to what they find; a leased object (now < lease) is never evicted;
- above the high watermark, max(eviction_ratio, used_ratio - watermark + eviction_ratio) of all objects are evicted,
  those whose lease expired longest ago first, again and again until the watermark is reached;
- a put that finds no space makes the master evict in the same way, and is refused when nothing can go;
- a soft-pinned object goes only when the others did not reach max(share / 2, used_ratio - watermark) of all objects,
  and then up to there; its pin begins with its put, ends after its TTL and is prolonged by nothing; a hard-pinned one
  never goes; a put of an existing object pins nothing.

Hints the master does not have: of objects pinned alike those of less priority go first; the end of a session turns what
it pinned into ordinary cache (0.3.13 can only rewrite an object, with SoftPinAction.DISABLE, or remove it).

Where the master leaves the order to chance, this store decides: leases that expire at one instant go in the order they
were granted, and inside one grant from the tail of the sequence to its head, so that what stays is a usable prefix.
Other differences: the master's eviction thread looks every 10 ms, here it acts between two calls; a put takes its
space when it is complete, not when it starts (a writer calls `put` when its bytes have arrived). What other orders of
eviction would do is in `kvsim.pool.policy_pool`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from heapq import heappop, heappush

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage, Piece
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.types import GroupId, Run, Runs, Segments
from kvcore.units import NS_PER_S
from kvsim.clock import PS_PER_NS
from kvsim.pool.extents import Extent, Extents, Mark, merged, pieces

DEFAULT_SOFT_PIN_TTL_NS = 1_800 * NS_PER_S
"""`default_kv_soft_pin_ttl` of the master."""


class SoftPins(Enum):
    """The master's `allow_evict_soft_pinned_objects`."""

    GO_LAST = "true"
    STAY = "false"


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
    evicted_pinned: int = 0
    """Of these, those that were soft-pinned."""
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
        soft_pins: SoftPins = SoftPins.GO_LAST,
    ) -> None:
        assert capacity_bytes > 0 and all(size > 0 for size in block_bytes), (capacity_bytes, block_bytes)
        self._capacity_bytes = capacity_bytes
        self._block_bytes = tuple(block_bytes)
        self._lease_ttl_ns = lease_ttl_ns
        # The decimal the user wrote, exactly.
        self._watermark = Fraction(str(eviction_high_watermark_ratio))
        self._eviction_ratio = Fraction(str(eviction_ratio))
        self._watermark_bytes = int(capacity_bytes * self._watermark)
        self._extents = Extents()
        self._soft_pins = soft_pins
        self._pin_ends: list[tuple[int, Lineage]] = []  # heap
        self._pinned_by: dict[str, set[Lineage]] = {}
        self._ended: set[str] = set()
        self._may_overstay = False
        self._grants = 0
        self._now_ns = 0
        self.num_objects = 0
        self.used_bytes = 0
        self.counters = PoolCounters()
        self.record_fill: Callable[[int, int], None] | None = None
        """Told (time_ps, used_bytes) after every put."""

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

    def put(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int, hints: Hints = NO_HINTS) -> Runs:
        """Store the blocks of `runs`; returns those refused for want of space, the last ones of the sequence.

        Blocks that are here already stay as they are, pinned or not.
        """
        self._tick(now_ns)
        absent = list(self._absent(group, segments, runs))
        num_absent = sum([end - start for _, start, end in absent])
        size_bytes = self._block_bytes[group]
        while self._free_bytes() < num_absent * size_bytes and self._evict():
            pass
        rejected: Runs = ()
        if self._free_bytes() < num_absent * size_bytes:
            absent, rejected = _split(absent, self._free_bytes() // size_bytes)
            self.counters.rejected += runs_of.num_blocks(rejected)
        self._insert(group, segments, absent, self._mark(hints))
        # This ends at or below the watermark, whatever is leased: at worst what was just put goes again, unless pinned.
        while self.used_bytes > self._watermark_bytes and self._evict():
            pass
        if self.record_fill is not None:
            self.record_fill(now_ns * PS_PER_NS, self.used_bytes)
        return rejected

    def remove(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """Forget the blocks of `runs`, leased or not; returns those that were here."""
        self._tick(now_ns)
        removed: list[Run] = []
        for lineage, start, end in pieces(group, segments, runs):
            for extent in self._extents.cut(lineage, start, end):
                removed.append((extent.start, extent.end))
                self._account(lineage, -(extent.end - extent.start))
        self.counters.removed += sum(end - start for start, end in removed)
        return runs_of.normalize(removed)

    def end_session(self, session: str) -> None:
        """What it pinned is ordinary cache from the next put on, also what its stores under way will bring."""
        self._ended.add(session)
        for lineage in self._pinned_by.pop(session, ()):
            self._extents.release(lineage, lambda mark: mark.session == session)

    def audit(self) -> None:
        """Objects and bytes are conserved, extents are disjoint, and the eviction queue knows each of them."""
        self._extents.audit()
        num_objects = used_bytes = 0
        for lineage, extent in self._extents:
            num_objects += extent.end - extent.start
            used_bytes += (extent.end - extent.start) * self._block_bytes[lineage[0]]
        assert (num_objects, used_bytes) == (self.num_objects, self.used_bytes)
        bound_bytes = self._capacity_bytes if self._may_overstay else self._watermark_bytes
        assert used_bytes <= bound_bytes, (used_bytes, bound_bytes)
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
            for lineage, start, end in pieces(group, segments, runs)
            for extent in self._extents.overlapping(lineage, start, end)
        ]
        return runs_of.normalize(found)

    def _absent(self, group: GroupId, segments: Segments, runs: Runs) -> Iterator[Piece]:
        """The parts of `runs` that are not here, in the order of the sequence."""
        for lineage, start, end in pieces(group, segments, runs):
            for extent in self._extents.overlapping(lineage, start, end):
                if start < extent.start:
                    yield lineage, start, extent.start
                start = extent.end
            if start < end:
                yield lineage, start, end

    def _grant_found(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are here, each piece of a lineage merged into one extent with the new lease."""
        lease_ns = self._now_ns + self._lease_ttl_ns
        found: list[Run] = []
        for lineage, start, end in pieces(group, segments, runs):
            for first, last, mark in merged(self._extents.cut(lineage, start, end)):
                self._extents.add(lineage, Extent(first, last, lease_ns, self._grants, mark))
                found.append((first, last))
        return runs_of.normalize(found)

    def _insert(self, group: GroupId, segments: Segments, absent: Sequence[Piece], mark: Mark | None) -> None:
        for lineage, start, end in absent:
            self._extents.add(lineage, Extent(start, end, self._now_ns, self._grants, mark))
            if mark is not None and mark.pin is not Pin.NONE:
                self._note_pin(lineage, mark)
            self._account(lineage, end - start)
            self.counters.put += end - start

    def _account(self, lineage: Lineage, num_objects: int) -> None:
        self.num_objects += num_objects
        self.used_bytes += num_objects * self._block_bytes[lineage[0]]

    def _free_bytes(self) -> int:
        return self._capacity_bytes - self.used_bytes

    def _evict(self) -> int:
        """Evict the share of objects the master would; returns how many had an expired lease and went."""
        self._end_pins()
        over = max(Fraction(0), Fraction(self.used_bytes, self._capacity_bytes) - self._watermark)
        share = self._eviction_ratio + over
        goal, least = _ceil_share(self.num_objects, share), _ceil_share(self.num_objects, max(share / 2, over))
        evicted = self._evict_expired(goal, Pin.NONE)
        pinned = self._evict_expired(least - evicted, Pin.SOFT) if self._soft_pins is SoftPins.GO_LAST else 0
        self.counters.evictions += evicted + pinned > 0
        self.counters.evicted += evicted + pinned
        self.counters.evicted_pinned += pinned
        return evicted + pinned

    def _evict_expired(self, goal: int, pin: Pin) -> int:
        """Up to `goal` of the objects pinned so, from the tails of their extents."""
        evicted = 0
        for rank in self._extents.ranks(pin):
            while evicted < goal and (found := self._extents.pop_expired(rank, self._now_ns)):
                _, negative_end, start, lineage = found
                end = -negative_end
                count = min(goal - evicted, end - start)
                self._extents.cut(lineage, end - count, end)
                self._account(lineage, -count)
                evicted += count
        return evicted

    # --- pins ---

    def _mark(self, hints: Hints) -> Mark | None:
        if hints is NO_HINTS:
            return None
        mark = Mark(hints.pin, hints.priority, self._pin_end(hints), hints.session)
        ends_at_once = mark.until_ns is not None and mark.until_ns <= self._now_ns
        is_pinned = mark.pin is not Pin.NONE and hints.session not in self._ended and not ends_at_once
        return mark if is_pinned else mark.released

    def _pin_end(self, hints: Hints) -> int | None:
        if hints.pin is not Pin.SOFT:
            return None
        return self._now_ns + (DEFAULT_SOFT_PIN_TTL_NS if hints.ttl_ns is None else hints.ttl_ns)

    def _note_pin(self, lineage: Lineage, mark: Mark) -> None:
        self._may_overstay |= mark.pin is Pin.HARD or self._soft_pins is SoftPins.STAY
        if mark.until_ns is not None:
            heappush(self._pin_ends, (mark.until_ns, lineage))
        if mark.session is not None:
            self._pinned_by.setdefault(mark.session, set()).add(lineage)

    def _end_pins(self) -> None:
        """Release the pins whose time is over; it matters to nobody before something is evicted."""
        while self._pin_ends and self._pin_ends[0][0] <= self._now_ns:
            _, lineage = heappop(self._pin_ends)
            self._extents.release(lineage, lambda mark: mark.until_ns is not None and mark.until_ns <= self._now_ns)


def _ceil_share(num_objects: int, share: Fraction) -> int:
    return min(num_objects, -(-num_objects * share.numerator // share.denominator))


def _split(absent: Sequence[Piece], num_blocks: int) -> tuple[list[Piece], Runs]:
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

"""The shared pool as Mooncake's master keeps it: which blocks exist, under which lease, and which go first. On runs.

Semantics of `mooncake_master` 0.3.13 (mooncake-store, `MasterService`), per object (here: one block of one group):

- a complete put sets the object's lease to now; a put of an existing object changes nothing;
- exists and get grant a lease of `lease_ttl_ns` to what they find; a leased object (now < lease) is never evicted;
- above the high watermark, max(eviction_ratio, used_ratio - watermark + eviction_ratio) of all objects but those
  pinned hard are evicted, those whose lease expired longest ago first, again and again until the watermark is reached;
- a put that finds no space makes the master evict in the same way, and is refused when nothing can go.

Pins are those of `kvsim.pool.pins`. Where the master leaves the order to chance, this store decides: leases that expire
at one instant go in the order they were granted, inside one grant from the tail of the sequence to its head, so that
what stays is a usable prefix. Other differences: the master's eviction thread looks every 10 ms, here it acts between
two calls; a put takes its space when it is complete, not when it starts (a writer calls `put` when its bytes have
arrived). What other orders of eviction would do is in `kvsim.pool.policy_pool`.

Where the bytes are is the business of `kvsim.pool.memory`, what is on disk that of `kvsim.pool.disks`. An object exists
while it is in either; eviction takes all its copies in memory at once. docs/POOL.md has every parameter.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage, Piece
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.types import GroupId, Run, Runs, Segments
from kvcore.units import div_ceil
from kvsim.clock import PS_PER_NS
from kvsim.pool.counters import PoolCounters
from kvsim.pool.disks import Disks, Offload, Unwritten
from kvsim.pool.extents import Extent, Extents, Mark, merged, pieces, split
from kvsim.pool.memory import DEFAULT_CLIENT_TTL_NS, Memory, SegmentedMemory
from kvsim.pool.pins import Pins, SoftPins
from kvsim.pool.places import phase
from kvsim.pool.sources import ReplicaType, Source, View, read_from, readable


class MooncakePool:
    """`memory` shared by all instances, with `disks` below it if any; a block of group g takes `block_bytes[g]`.

    `segments` name the content of a sequence's blocks and cover every block of `runs`, which are positions in that
    sequence. Time never runs backwards. Every call is linear in the extents it touches, never in blocks, but for what
    follows the loss of a client that held some blocks of a run and not others.
    """

    def __init__(
        self,
        memory: Memory | int,
        block_bytes: Sequence[int],
        lease_ttl_ns: int,
        eviction_high_watermark_ratio: float,
        eviction_ratio: float,
        soft_pins: SoftPins = SoftPins.GO_LAST,
        disks: Disks | None = None,
        client_ttl_ns: int = DEFAULT_CLIENT_TTL_NS,
    ) -> None:
        self._block_bytes = tuple(block_bytes)
        self._memory = Memory(memory, self._block_bytes) if isinstance(memory, int) else memory
        assert self._memory.capacity_bytes > 0 and all(size > 0 for size in block_bytes), (memory, block_bytes)
        self.disks = disks
        self._lease_ttl_ns = lease_ttl_ns
        # The decimal the user wrote, exactly.
        self._watermark = Fraction(str(eviction_high_watermark_ratio))
        self._eviction_ratio = Fraction(str(eviction_ratio))
        self._watermark_bytes = int(self._memory.capacity_bytes * self._watermark)
        self._extents = Extents()
        self._soft_pins = soft_pins
        self._pins = Pins()
        self._may_overstay = False
        self._client_ttl_ns = client_ttl_ns
        self._grants = 0
        self._now_ns = 0
        self.num_objects = 0
        """Objects in memory."""
        self.counters = PoolCounters()
        self.on_put: Callable[[int], None] | None = None
        """Told the time (ps) after every put."""

    @property
    def capacity_bytes(self) -> int:
        """Of memory, all segments that the master knows."""
        return self._memory.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Of memory, by all copies."""
        return self._memory.used_bytes

    def exists(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """The blocks of `runs` that are here; each is leased until `now_ns` + the lease time."""
        self._tick(now_ns)
        found = self._grant_found(group, segments, runs)
        if self.disks is not None:
            on_disk = self.disks.found(group, segments, runs_of.subtract(runs, found))
            self.counters.found_on_disk += runs_of.num_blocks(on_disk)
            found = runs_of.union(found, on_disk)
        self.counters.lookups += 1
        self.counters.asked += runs_of.num_blocks(runs)
        self.counters.found += runs_of.num_blocks(found)
        return found

    def holds(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are here, as whoever follows the master's events knows: no lease, not counted."""
        return runs_of.union(*self.replicas(group, segments, runs).values())

    def replicas(self, group: GroupId, segments: Segments, runs: Runs) -> dict[ReplicaType, Runs]:
        """The blocks of `runs` that have a replica of each type; one may have both."""
        on_disk = () if self.disks is None else self.disks.found(group, segments, runs)
        return {ReplicaType.MEMORY: self._extents.found(group, segments, runs), ReplicaType.DISK: on_disk}

    def get(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int, reader: int | None = None) -> Runs:
        """The blocks of `runs` that can be read now, leased anew; one that was promised and is gone is a late miss.

        With copies the `reader` takes its own, else the first that the master names, dead or alive.
        """
        self._tick(now_ns)
        found = self._grant_found(group, segments, runs)
        if self.disks is not None or self._memory.silent:
            found = self._readable(group, segments, runs, found, self._memory.view(reader))
        num_found = runs_of.num_blocks(found)
        self.counters.got += num_found
        self.counters.late += runs_of.num_blocks(runs) - num_found
        return found

    def sources(self, group: GroupId, segments: Segments, runs: Runs, reader: int | None = None) -> Counter[Source]:
        """How many bytes a read of `runs`, all of which are here, gets from whom: memory before disk."""
        size_bytes, read = self._block_bytes[group], Counter[Source]()
        in_memory = self._extents.found(group, segments, runs)
        view = self._memory.view(reader)
        parts = [(ReplicaType.MEMORY, in_memory, self._memory.places)]
        if self.disks is not None:
            parts.append((ReplicaType.DISK, runs_of.subtract(runs, in_memory), self.disks.places))
        for replica_type, part, places in parts:
            for lineage, start, end in pieces(group, segments, part):
                for place in places(lineage, start, end):
                    for segment, count in read_from(place, phase(lineage), view).items():
                        read[Source(self._memory.client(segment), replica_type)] += count * size_bytes
        return read

    def put(
        self,
        group: GroupId,
        segments: Segments,
        runs: Runs,
        now_ns: int,
        hints: Hints = NO_HINTS,
        writer: int | None = None,
    ) -> Runs:
        """Store the blocks of `runs`; returns those refused for want of space, the last ones, or lost on a dead client.

        Blocks that are here already stay as they are, pinned or not.
        """
        self._tick(now_ns)
        absent = list(self._absent(group, segments, runs))
        num_absent = sum([end - start for _, start, end in absent])
        while (room := self._memory.room(group, num_absent)) < num_absent and self._evict():
            pass
        rejected: Runs = ()
        if room < num_absent:
            absent, rejected = split(absent, room)
        refused = self._insert(group, segments, absent, self._pins.mark(hints, self._now_ns), writer)
        if refused:
            rejected = runs_of.union(rejected, refused)
        if rejected:
            self.counters.rejected += runs_of.num_blocks(rejected)
        self._relieve()
        if self.on_put is not None:
            self.on_put(now_ns * PS_PER_NS)
        return rejected

    def remove(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """Forget the blocks of `runs`, leased or not; returns those that were here."""
        self._tick(now_ns)
        removed: list[Run] = []
        for lineage, start, end in pieces(group, segments, runs):
            for extent in self._extents.cut(lineage, start, end):
                removed.append((extent.start, extent.end))
                self._leave(lineage, extent.start, extent.end)
        gone = runs_of.normalize(removed)
        if self.disks is not None:
            on_disk = self.disks.found(group, segments, runs)
            for lineage, start, end in pieces(group, segments, on_disk):
                self.disks.remove(lineage, start, end)
            self.counters.removed_from_disk += runs_of.num_blocks(runs_of.subtract(on_disk, gone))
            gone = runs_of.union(gone, on_disk)
        self.counters.removed += runs_of.num_blocks(gone)
        return gone

    def lose_client(self, client: int, now_ns: int) -> None:
        """A client dies with memory and disk. What it held exists for `client_ttl_ns`; only other copies are read."""
        self._tick(now_ns)
        assert isinstance(self._memory, SegmentedMemory), "a loss needs segments"
        self._memory.silence(client, now_ns + self._client_ttl_ns)
        self._resize()

    def mount(self, client: int, now_ns: int) -> None:
        """A client lends an empty segment, at first or again."""
        self._tick(now_ns)
        assert isinstance(self._memory, SegmentedMemory), "a client that returns needs segments"
        self._memory.mount(client)
        self._resize()

    def end_session(self, session: str) -> None:
        """What it pinned is ordinary cache from the next put on, also what its stores under way will bring."""
        self._pins.end_session(session, self._extents)

    def audit(self) -> None:
        """Objects and bytes are conserved, extents are disjoint, and the eviction queue knows each of them."""
        self._extents.audit()
        self._memory.audit()
        num_objects = used_bytes = 0
        for lineage, extent in self._extents:
            num_objects += extent.end - extent.start
            for start, end, _, copies in self._memory.places(lineage, extent.start, extent.end):
                used_bytes += (end - start) * copies * self._block_bytes[lineage[0]]
        assert num_objects == self.num_objects
        # Places still name what dead clients had, of which the memory itself knows.
        assert used_bytes == self.used_bytes or self._memory.view(None).gone, (used_bytes, self.used_bytes)
        bound_bytes = self._memory.capacity_bytes if self._may_overstay else self._watermark_bytes
        assert self.used_bytes <= bound_bytes, (used_bytes, bound_bytes)
        counted = self.counters
        gone = counted.evicted + counted.removed - counted.removed_from_disk + counted.lost
        assert counted.put + counted.promoted == self.num_objects + gone, counted
        if self.disks is not None:
            self.disks.audit()

    def _tick(self, now_ns: int) -> None:
        assert now_ns >= self._now_ns, (now_ns, self._now_ns)
        self._now_ns = now_ns
        self._grants += 1
        if self._memory.deaths and self._memory.deaths[0][0] <= now_ns:
            self._bury()
        if self.disks is not None:
            self._promote(self.disks)

    def _absent(self, group: GroupId, segments: Segments, runs: Runs) -> Iterator[Piece]:
        """The parts of `runs` that are not here, in the order of the sequence."""
        if self.disks is not None:
            runs = runs_of.subtract(runs, self.disks.found(group, segments, runs))
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

    def _readable(self, group: GroupId, segments: Segments, runs: Runs, in_memory: Runs, view: View) -> Runs:
        """What of `runs` can be read: in memory with a client that lives, or on such a disk and into its buffer."""
        found = readable(pieces(group, segments, in_memory), self._memory.places, view)
        self.counters.unreadable += runs_of.num_blocks(in_memory) - runs_of.num_blocks(found)
        if self.disks is None:
            return found
        on_disk = self.disks.found(group, segments, runs_of.subtract(runs, in_memory))
        alive = readable(pieces(group, segments, on_disk), self.disks.places, view)
        read = self.disks.read(list(pieces(group, segments, alive)))
        staged = runs_of.normalize((start, end) for _, start, end in read)
        self.counters.got_from_disk += runs_of.num_blocks(staged)
        self.counters.unreadable += runs_of.num_blocks(runs_of.subtract(on_disk, alive))
        self.counters.unstaged += runs_of.num_blocks(alive) - runs_of.num_blocks(staged)
        return runs_of.union(found, staged)

    def _insert(
        self, group: GroupId, segments: Segments, absent: Sequence[Piece], mark: Mark | None, writer: int | None
    ) -> Runs:
        """Put the pieces in memory; returns what could not be written."""
        refused: list[Run] = []
        for lineage, start, end in absent:
            written = self._memory.fill(lineage, start, end, writer)
            if written != ((start, end),):
                refused += runs_of.subtract(((start, end),), written)
            for first, last in written:
                self._extents.add(lineage, Extent(first, last, self._now_ns, self._grants, mark))
                if mark is not None and mark.pin is not Pin.NONE:
                    self._may_overstay |= mark.pin is Pin.HARD or self._soft_pins is SoftPins.STAY
                    self._pins.note(lineage, mark)
                self.num_objects += last - first
                self.counters.put += last - first
                if self.disks is not None and self.disks.offload is Offload.ON_PUT:
                    self._write(self.disks, lineage, first, last)
        return runs_of.normalize(refused) if refused else ()

    def _leave(self, lineage: Lineage, start: int, end: int) -> None:
        """Blocks whose extents are cut leave memory."""
        self._memory.free(lineage, start, end)
        self.num_objects -= end - start

    def _relieve(self) -> None:
        """Evict down to the watermark: at worst what was just put goes again, unless it may not."""
        memory = self._memory
        while memory.used_bytes > self._watermark_bytes and self._evict():
            pass

    def _evict(self) -> int:
        """Evict the share of objects the master would; returns how many had an expired lease and went."""
        if not self.num_objects:
            return 0
        self._pins.expire(self._now_ns, self._extents)
        over = max(Fraction(0), Fraction(self.used_bytes, self._memory.capacity_bytes) - self._watermark)
        share = self._eviction_ratio + over
        may_go = self.num_objects - self._extents.num_staying
        goal, least = _ceil_share(may_go, share), _ceil_share(may_go, max(share / 2, over))
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
                if self.disks is not None and not self._offload(self.disks, lineage, end - count, end):
                    return evicted
                self._extents.cut(lineage, end - count, end)
                self._leave(lineage, end - count, end)
                evicted += count
        return evicted

    # --- disks ---

    def _offload(self, disks: Disks, lineage: Lineage, start: int, end: int) -> bool:
        """Give to disk what leaves memory; False when it stays, because no disk takes all of it."""
        if disks.offload is Offload.ON_PUT or self._write(disks, lineage, start, end):
            return True
        if disks.unwritten is Unwritten.GOES:
            return True
        self._may_overstay = True
        for extent in self._extents.cut(lineage, start, end):
            self._extents.add(lineage, extent)
        return False

    def _write(self, disks: Disks, lineage: Lineage, start: int, end: int) -> bool:
        """Whether all blocks [start, end) are on disk now."""
        went = disks.num_evicted
        self.counters.offloaded += disks.write(lineage, self._memory.places(lineage, start, end))
        self.counters.evicted_from_disk += disks.num_evicted - went
        return runs_of.normalize(disks.held(lineage, start, end)) == ((start, end),)

    def _promote(self, disks: Disks) -> None:
        """Copy to memory what has come to its turn and finds room there."""
        promoted = 0
        for lineage, start, end in disks.promoted(self._now_ns):
            held = runs_of.normalize(self._extents.held(lineage, start, end))
            for absent, stop in runs_of.subtract(((start, end),), held):
                stop = absent + self._memory.room(lineage[0], stop - absent)
                for first, last in self._memory.fill(lineage, absent, stop, None):
                    self._extents.add(lineage, Extent(first, last, self._now_ns, self._grants))
                    promoted += last - first
        self.num_objects += promoted
        self.counters.promoted += promoted
        if promoted:
            self._relieve()

    # --- loss ---

    def _bury(self) -> None:
        """The master notices the clients that were not heard of for their time."""
        assert isinstance(self._memory, SegmentedMemory)
        for lineage, place in self._memory.unmount(self._now_ns):
            for start, end in place.without(self._memory.gone, phase(lineage)):
                self._extents.cut(lineage, start, end)
                self._leave(lineage, start, end)
                self.counters.lost += end - start
        if self.disks is not None:
            self.counters.lost_from_disk += self.disks.lose(self._memory.gone)
        self._resize()

    def _resize(self) -> None:
        self._watermark_bytes, self._may_overstay = int(self._memory.capacity_bytes * self._watermark), True
        if self.disks is not None:
            self.disks.resize(self._memory.num_clients, self._memory.silent)


def _ceil_share(num_objects: int, share: Fraction) -> int:
    return min(num_objects, div_ceil(num_objects * share.numerator, share.denominator))

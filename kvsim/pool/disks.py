"""The disks below the pool's memory: what is written there, what goes when they are full, what comes back. On runs.

Semantics of 0.3.13 (mooncake-store, `MasterService` and `FileStorage`), as far as they are simulated:

- what lends memory may have a disk; an object goes to the disk of a client that has a copy of it in memory;
- it is written when it is stored, or (`offload_on_evict`) when memory evicts it, unless it is on disk already;
- a full disk takes nothing more (`none`), or the oldest files go (`fifo`), or those not read for longest (`lru`);
- what memory cannot give to disk stays in memory, unless `offload_force_evict`;
- what is read from disk `promotion_admission_threshold` times comes back to memory (`promotion_on_hit`),
  `promotion_max_per_heartbeat` objects for each client and heartbeat, and stays on disk, too;
- a holder reads objects into a buffer of its own; what does not fit is not read.

Here something is on disk at once (the master's clients write with their next heartbeat, in files of many objects, and
memory is freed after that), the disks of all clients fill alike, and blocks go one by one, not in files.
"""

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage, Piece
from kvcore.types import GroupId, Run, Runs, Segments
from kvcore.units import NS_PER_S, div_ceil
from kvsim.pool.extents import ORDINARY, Extent, Extents
from kvsim.pool.places import Place, Places, copies_by_segment, phase


class DiskEviction(Enum):
    """`MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY`."""

    NONE = "none"
    FIFO = "fifo"
    LRU = "lru"


class Offload(Enum):
    """When an object is written to disk: `offload_on_evict`."""

    ON_PUT = "false"
    ON_EVICT = "true"


class Unwritten(Enum):
    """What memory does with what no disk takes: `offload_force_evict`."""

    STAYS = "false"
    GOES = "true"


@dataclass(frozen=True, slots=True)
class Promotion:
    """`promotion_on_hit`, and its bounds."""

    admission_threshold: int = 2
    max_per_heartbeat: int = 1
    heartbeat_ns: int = 10 * NS_PER_S


class Disks:
    """A disk of `client_bytes` for each client; `buffer_bytes` is what one holder reads into for one call."""

    def __init__(
        self,
        client_bytes: int,
        num_clients: int,
        block_bytes: tuple[int, ...],
        buffer_bytes: int,
        eviction: DiskEviction = DiskEviction.NONE,
        offload: Offload = Offload.ON_EVICT,
        unwritten: Unwritten = Unwritten.STAYS,
        promotion: Promotion | None = None,
    ) -> None:
        self._client_bytes = client_bytes
        self.num_clients = num_clients
        """Who is alive and has a disk."""
        self._stranded_bytes = 0
        self._most_bytes = client_bytes * num_clients
        self._block_bytes = block_bytes
        self._buffer_bytes = buffer_bytes
        self._eviction = eviction
        self._promotion = promotion
        self.offload = offload
        self.unwritten = unwritten
        self._extents = Extents()
        self._places = Places()
        self._uses = 0
        self._reads: dict[Lineage, list[Runs]] = {}
        self._queue: deque[Piece] = deque()
        self._last_beat_ns = 0
        self.used_bytes = 0
        self.num_objects = 0
        self.num_evicted = 0

    @property
    def capacity_bytes(self) -> int:
        """Of all disks; of those of the dead, as long as the master believes in them, what was on them."""
        return self._client_bytes * self.num_clients + self._stranded_bytes

    def resize(self, num_clients: int, silent: Container[int]) -> None:
        """So many clients are alive; what is on disks of `silent` segments exists, and leaves no room beside it."""
        self.num_clients = num_clients
        self._stranded_bytes = 0
        for lineage, place in self._places:
            blocks = sum(count for segment, count in copies_by_segment(lineage, place).items() if segment in silent)
            self._stranded_bytes += blocks * self._block_bytes[lineage[0]]

    def held(self, lineage: Lineage, start: int, end: int) -> list[Run]:
        """The blocks of [start, end) that are on disk, as runs that may touch."""
        return self._extents.held(lineage, start, end)

    def found(self, group: GroupId, segments: Segments, runs: Runs) -> Runs:
        """The blocks of `runs` that are on disk."""
        return self._extents.found(group, segments, runs)

    def places(self, lineage: Lineage, start: int, end: int) -> list[Place]:
        """Where blocks [start, end), all of them on disk, are: in a place's segments stand those of their client."""
        return self._places.overlapping(lineage, start, end)

    def write(self, lineage: Lineage, places: Sequence[Place]) -> int:
        """Write of the places what is not there yet, to the client of each first copy; returns how many blocks.

        The first blocks that find no room end it. What must go for it goes.
        """
        self._uses += 1
        written = 0
        size_bytes = self._block_bytes[lineage[0]]
        for place in places:
            for start, end in runs_of.subtract((place[:2],), tuple(self.held(lineage, place.start, place.end))):
                fits = self._make_room(end - start, size_bytes)
                if fits:
                    self._add(lineage, place.clipped(start, start + fits), size_bytes)
                written += fits
                if fits < end - start:
                    return written
        return written

    def read(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Read blocks that are on disk; returns what fits a holder's buffer, the first ones."""
        self._uses += 1
        left_bytes = self._buffer_bytes
        read: list[Piece] = []
        for lineage, start, end in pieces:
            for place in self._places.overlapping(lineage, start, end):
                most = left_bytes // self._block_bytes[lineage[0]] * len(place.ring)
                stop = min(place.end, place.start + most)
                if place.start < stop:
                    read.append((lineage, place.start, stop))
                    share = div_ceil(stop - place.start, len(place.ring))
                    left_bytes -= share * self._block_bytes[lineage[0]]
        for piece in read:
            self._use(*piece)
        return read

    def promoted(self, now_ns: int) -> Iterator[Piece]:
        """What has come to its turn to be copied back to memory, and is still here."""
        if self._promotion is None:
            return
        beats = (now_ns - self._last_beat_ns) // self._promotion.heartbeat_ns
        self._last_beat_ns += beats * self._promotion.heartbeat_ns
        budget = beats * self._promotion.max_per_heartbeat * self.num_clients
        while budget and self._queue:
            lineage, start, end = self._queue.popleft()
            if end - start > budget:
                self._queue.appendleft((lineage, start + budget, end))
                end = start + budget
            budget -= end - start
            yield from ((lineage, first, last) for first, last in self.held(lineage, start, end))

    def remove(self, lineage: Lineage, start: int, end: int) -> list[Run]:
        """Forget blocks [start, end); returns those that were here."""
        removed = [(extent.start, extent.end) for extent in self._extents.cut(lineage, start, end)]
        self._places.cut(lineage, start, end)
        num_blocks = sum(last - first for first, last in removed)
        self.num_objects -= num_blocks
        self.used_bytes -= num_blocks * self._block_bytes[lineage[0]]
        return removed

    def lose(self, gone: set[int]) -> int:
        """The disks of the clients whose segments are `gone` are lost; returns how many blocks were there."""
        had = self.num_objects
        for lineage, place in list(self._places):
            for start, end in place.without(gone, phase(lineage)):
                self.remove(lineage, start, end)
        return had - self.num_objects

    def audit(self) -> None:
        """Objects and bytes are conserved."""
        self._extents.audit()
        self._places.audit()
        num_objects = used_bytes = 0
        for lineage, extent in self._extents:
            num_objects += extent.end - extent.start
            used_bytes += (extent.end - extent.start) * self._block_bytes[lineage[0]]
            placed = self._places.overlapping(lineage, extent.start, extent.end)
            assert sum(place.end - place.start for place in placed) == extent.end - extent.start, (lineage, extent)
        assert (num_objects, used_bytes) == (self.num_objects, self.used_bytes)
        assert used_bytes <= self._most_bytes, (used_bytes, self._most_bytes)

    def _add(self, lineage: Lineage, place: Place, size_bytes: int) -> None:
        self._extents.add(lineage, Extent(place.start, place.end, 0, self._uses))
        self._places.add(lineage, place._replace(copies=1))
        self.num_objects += place.end - place.start
        self.used_bytes += (place.end - place.start) * size_bytes

    def _make_room(self, num_blocks: int, size_bytes: int) -> int:
        """How many of so many blocks there is room for, after what may go has gone."""
        missing_bytes = num_blocks * size_bytes - (self.capacity_bytes - self.used_bytes)
        while missing_bytes > 0 and self._eviction is not DiskEviction.NONE:
            oldest = self._extents.pop_expired(ORDINARY, 0)
            if oldest is None:
                break
            _, negative_end, start, lineage = oldest
            count = min(-negative_end - start, div_ceil(missing_bytes, self._block_bytes[lineage[0]]))
            self.remove(lineage, -negative_end - count, -negative_end)
            self.num_evicted += count
            missing_bytes -= count * self._block_bytes[lineage[0]]
        return min(num_blocks, max(0, self.capacity_bytes - self.used_bytes) // size_bytes)

    def _use(self, lineage: Lineage, start: int, end: int) -> None:
        if self._eviction is DiskEviction.LRU:
            for extent in self._extents.cut(lineage, start, end):
                self._extents.add(lineage, extent._replace(grant=self._uses))
        if self._promotion is not None:
            self._queue.extend((lineage, first, last) for first, last in self._count_read(lineage, start, end))

    def _count_read(self, lineage: Lineage, start: int, end: int) -> Runs:
        """The blocks of [start, end) that this read brings to the threshold."""
        assert self._promotion is not None
        levels = self._reads.setdefault(lineage, [()] * (self._promotion.admission_threshold - 1))
        again: Runs = ((start, end),)
        for index, read in enumerate(levels):
            levels[index] = runs_of.union(read, again)
            again = runs_of.intersect(read, again)
        return again

"""The memory that instances lend to the pool: how much of it is free, and which segment each block goes to.

An instance lends one or more segments, as a client of the store mounts them; the master chooses among them by name.
Semantics of 0.3.13 (mooncake-store, `allocation_strategy.h` and `MasterService::PutStart`):

- `random`: any segment that has room, the first one drawn and the others in order after it;
- `free_ratio_first`: of the segments drawn (6 for each copy) those of which most is free;
- `local_first`: with one copy, the writer's own while there is room, else `random`;
- copies of an object are in different segments, as many as there is room for, at least one;
- a preferred segment is tried before all others;
- a client that is dead, and not yet noticed, is given objects as before, and a put fails of which any copy is there.

Objects do not fragment a segment here: a block fits where its bytes are free (its allocators, `offset` and `cachelib`,
round sizes up and may find no hole). Segments are of one size.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from enum import Enum

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage
from kvcore.types import GroupId, Run, Runs
from kvcore.units import NS_PER_S, div_ceil
from kvsim.pool.places import Place, Places, Ring, copies_by_segment, phase
from kvsim.pool.sources import View

DEFAULT_CLIENT_TTL_NS = 10 * NS_PER_S
"""`client_ttl` of the master."""


class Strategy(Enum):
    """The master's `allocation_strategy`; it has `cxl` and `ssd_free_ratio_first`, too."""

    RANDOM = "random"
    FREE_RATIO_FIRST = "free_ratio_first"
    LOCAL_FIRST = "local_first"


class Preferred(Enum):
    """The writer's `preferred_segment`."""

    NONE = "none"
    OWN = "own"


class Memory:
    """One capacity, of which every segment holds a like share of every run.

    Segment i is of client i // `segments_per_client`.
    This is `random` with one copy as long as no segment is full before the others are.
    """

    silent: Container[int] = ()
    """Segments of dead clients that the master still believes in."""
    deaths: Sequence[tuple[int, Ring]] = ()
    """(when the master will notice it, the segments that died), in that order."""

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: tuple[int, ...],
        num_clients: int = 1,
        segments_per_client: int = 1,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._block_bytes = block_bytes
        self._segments_per_client = segments_per_client
        self._ring: Ring = tuple(range(num_clients * segments_per_client))

    def room(self, group: GroupId, num_blocks: int) -> int:
        """How many of so many new blocks find room."""
        return min(num_blocks, (self.capacity_bytes - self.used_bytes) // self._block_bytes[group])

    def fill(self, lineage: Lineage, start: int, end: int, writer: int | None) -> Runs:
        """Put blocks [start, end) somewhere; returns those that were written."""
        self.used_bytes += (end - start) * self._block_bytes[lineage[0]]
        return ((start, end),) if start < end else ()

    def free(self, lineage: Lineage, start: int, end: int) -> None:
        """Give back what blocks [start, end), all of which are here, took."""
        self.used_bytes -= (end - start) * self._block_bytes[lineage[0]]

    def places(self, lineage: Lineage, start: int, end: int) -> list[Place]:
        """Where blocks [start, end) are."""
        return [Place(start, end, self._ring, 1)]

    @property
    def num_clients(self) -> int:
        """Those that are alive and lend something now."""
        return len({self.client(segment) for segment in self._lent()})

    def client(self, segment: int) -> int:
        """Whose segment it is, or was."""
        return segment // self._segments_per_client

    def segments(self, client: int) -> Ring:
        """What the client lends, as far as the master knows."""
        return self._ring[client * self._segments_per_client : (client + 1) * self._segments_per_client]

    def view(self, reader: int | None) -> View:
        """What the client, or nobody in particular, goes by when it reads."""
        return View() if reader is None else View(own=self.segments(reader))

    def _lent(self) -> Iterable[int]:
        return self._ring

    def audit(self) -> None:
        """Nothing is used twice."""
        assert 0 <= self.used_bytes <= self.capacity_bytes, (self.used_bytes, self.capacity_bytes)


class SegmentedMemory(Memory):
    """Segments that are filled, and can be lost, one by one.

    One that was lost never comes back; its client may mount another.
    """

    def __init__(
        self,
        segment_bytes: int,
        num_clients: int,
        block_bytes: tuple[int, ...],
        strategy: Strategy = Strategy.RANDOM,
        replica_num: int = 1,
        preferred: Preferred = Preferred.NONE,
        segments_per_client: int = 1,
    ) -> None:
        capacity_bytes = segment_bytes * num_clients * segments_per_client
        super().__init__(capacity_bytes, block_bytes, num_clients, segments_per_client)
        self._segment_bytes = segment_bytes
        self._strategy = strategy
        self._replica_num = replica_num
        own_first = preferred is Preferred.OWN or (strategy is Strategy.LOCAL_FIRST and replica_num == 1)
        self._own_first = own_first
        self._places = Places()
        self._used = dict.fromkeys(self._ring, 0)
        self._client = {segment: super(SegmentedMemory, self).client(segment) for segment in self._ring}
        self.deaths: deque[tuple[int, Ring]] = deque()
        self.silent: set[int] = set()
        self.gone: set[int] = set()
        """Segments that were lost, as the master knows."""

    def client(self, segment: int) -> int:
        """Whose segment it is, or was."""
        return self._client[segment]

    def segments(self, client: int) -> Ring:
        """What the client lends, as far as the master knows."""
        return tuple(segment for segment in self._used if self._client[segment] == client)

    def used(self, segment: int) -> int:
        """Bytes of the segment that are taken."""
        return self._used[segment]

    def room(self, group: GroupId, num_blocks: int) -> int:
        """How many of so many new blocks find room; with more than one copy it may be a few less than could be."""
        free = self._free(group)
        if self._replica_num == 1:
            return min(num_blocks, sum(free.values()))
        placed = 0
        while free and placed < num_blocks:
            ring, copies, count = self._deal(free, num_blocks - placed, None)
            placed += count
            most = copies * div_ceil(count, len(ring))
            free = {i: left - (most if i in ring else 0) for i, left in free.items()}
            free = {i: left for i, left in free.items() if left > 0}
        return placed

    def fill(self, lineage: Lineage, start: int, end: int, writer: int | None) -> Runs:
        """Put blocks [start, end) where the strategy says; returns those that found room, and no dead client."""
        size_bytes, failed, first = self._block_bytes[lineage[0]], list[Run](), start
        while start < end and (free := self._free(lineage[0])):
            ring, copies, count = self._deal(free, end - start, writer)
            place = Place(start, start + count, ring, copies)
            self._places.add(lineage, place)
            self._account(lineage, place, size_bytes)
            if self.silent:
                failed += place.blocks(phase(lineage), lambda holders: not self.silent.isdisjoint(holders))
            start += count
        for run in failed:
            self.free(lineage, *run)
        return runs_of.subtract(((first, start),) if first < start else (), tuple(failed))

    def free(self, lineage: Lineage, start: int, end: int) -> None:
        """Give back what the copies of blocks [start, end) took."""
        for place in self._places.cut(lineage, start, end):
            self._account(lineage, place, -self._block_bytes[lineage[0]])

    def places(self, lineage: Lineage, start: int, end: int) -> list[Place]:
        """Where blocks [start, end) are, as the master knows it."""
        return self._places.overlapping(lineage, start, end)

    def silence(self, client: int, until_ns: int) -> None:
        """The client is dead, which the master notices at `until_ns`; what it sends there fails."""
        died = tuple(segment for segment in self.segments(client) if segment not in self.silent)
        self.deaths.append((until_ns, died))
        self.silent.update(died)

    def view(self, reader: int | None) -> View:
        """What the client, or nobody in particular, goes by when it reads."""
        return View(() if reader is None else self.segments(reader), self.gone, self.silent)

    def unmount(self, now_ns: int) -> list[tuple[Lineage, Place]]:
        """Take away the segments of who is noticed to be dead; returns the places that had copies there."""
        lost: set[int] = set()
        while self.deaths and self.deaths[0][0] <= now_ns:
            lost.update(self.deaths.popleft()[1])
        for segment in lost:
            self.used_bytes -= self._used.pop(segment)
            self.capacity_bytes -= self._segment_bytes
        self.silent -= lost
        self.gone |= lost
        return [(lineage, place) for lineage, place in self._places if not lost.isdisjoint(place.ring)]

    def mount(self, client: int) -> None:
        """The client lends one more segment, which is empty."""
        segment = len(self._client)
        self._client[segment] = client
        self._used[segment] = 0
        self.capacity_bytes += self._segment_bytes

    def audit(self) -> None:
        """What is used is what is in its places, and each segment holds no more than it has."""
        super().audit()
        self._places.audit()
        used = Counter[int]()
        for lineage, place in self._places:
            for segment, copies in copies_by_segment(lineage, place).items():
                used[segment] += copies * self._block_bytes[lineage[0]]
        assert all(used[segment] == size_bytes for segment, size_bytes in self._used.items()), (used, self._used)
        assert all(size_bytes <= self._segment_bytes for size_bytes in self._used.values()), self._used
        assert sum(self._used.values()) == self.used_bytes, (self._used, self.used_bytes)

    def _lent(self) -> Iterable[int]:
        return self._used.keys() - self.silent

    def _free(self, group: GroupId) -> dict[int, int]:
        """Blocks of the group that fit in each segment that has room for one."""
        size_bytes = self._block_bytes[group]
        free = {segment: (self._segment_bytes - used) // size_bytes for segment, used in self._used.items()}
        return {segment: blocks for segment, blocks in free.items() if blocks}

    def _account(self, lineage: Lineage, place: Place, size_bytes: int) -> None:
        for segment, copies in copies_by_segment(lineage, place).items():
            if segment in self._used:
                self._used[segment] += copies * size_bytes
                self.used_bytes += copies * size_bytes

    def _deal(self, free: dict[int, int], num_blocks: int, writer: int | None) -> tuple[Ring, int, int]:
        """(ring, copies, count): the next `count` blocks are dealt to these segments, none of which overflows."""
        ring = self._own(free, writer) if self._own_first and writer is not None else ()
        if not ring:
            ring, levels = self._ranked(free)
        else:
            levels = num_blocks
        copies = min(self._replica_num, len(ring))
        least = min(free[segment] for segment in ring)
        cycles = min(least // copies, levels // copies)
        return ring, copies, min(num_blocks, max(1, cycles * len(ring)))

    def _own(self, free: dict[int, int], writer: int | None) -> Ring:
        """The writer's own segments, and as many others as there are copies for, the emptiest first."""
        own = tuple(segment for segment in free if self._client[segment] == writer)
        if not own:
            return ()
        others = sorted((segment for segment in free if segment not in own), key=lambda segment: -free[segment])
        missing = max(0, self._replica_num - len(own))
        return (*own, *others[:missing])

    def _ranked(self, free: dict[int, int]) -> tuple[Ring, int]:
        """The segments that are next in turn, and how many blocks each of them takes before others are as good."""
        if self._strategy is not Strategy.FREE_RATIO_FIRST:
            return tuple(sorted(free)), min(free.values())
        ranked = sorted(free, key=lambda segment: (-free[segment], segment))
        emptiest = free[ranked[min(self._replica_num, len(ranked)) - 1]]
        ring = tuple(sorted(segment for segment in ranked if free[segment] >= emptiest))
        rest = [blocks for blocks in free.values() if blocks < emptiest]
        return ring, emptiest - max(rest) if rest else emptiest

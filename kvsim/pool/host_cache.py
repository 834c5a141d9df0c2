"""An instance's private cache in its host memory, in front of the pool: least recently used goes first. On runs.

What vLLM's OffloadingConnector keeps in `cpu_bytes_to_use` bytes, with its policy "lru"; a lookup, a load and a store
are uses, and of one use the head of the sequence stays longest. What it is asked for costs no round trip.
Not as there: a block that is being read may be evicted meanwhile, which nobody notices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore import runs as runs_of
from kvcore.gpu_cache import Names
from kvcore.group_runs import GroupRuns
from kvcore.types import GroupId, Runs, Segments
from kvcore.units import div_ceil
from kvsim.pool.extents import ORDINARY, Extent, Extents, pieces


@dataclass(slots=True)
class HostCounters:
    """What happened to the cache, in blocks."""

    asked: int = 0
    found: int = 0
    got: int = 0
    put: int = 0
    evicted: int = 0


class HostCache:
    """`capacity_bytes` of one instance's host memory; a block of group g takes `block_bytes[g]`."""

    def __init__(self, capacity_bytes: int, block_bytes: Sequence[int]) -> None:
        assert capacity_bytes >= 0 and all(size > 0 for size in block_bytes), (capacity_bytes, block_bytes)
        self._capacity_bytes = capacity_bytes
        self._block_bytes = tuple(block_bytes)
        self._extents = Extents()
        self._uses = 0
        self.used_bytes = 0
        self.counters = HostCounters()

    def exists(self, names: Names, blocks: GroupRuns) -> GroupRuns:
        """Those that are here; they are used."""
        found = self._use(names, blocks)
        self.counters.asked += sum(map(runs_of.num_blocks, blocks))
        self.counters.found += sum(map(runs_of.num_blocks, found))
        return found

    def get(self, names: Names, blocks: GroupRuns) -> GroupRuns:
        """Those that can be read now; they are used."""
        found = self._use(names, blocks)
        self.counters.got += sum(map(runs_of.num_blocks, found))
        return found

    def holds(self, names: Names, blocks: GroupRuns) -> GroupRuns:
        """Those that are here, which is no use of them."""
        return tuple([self._extents.found(GroupId(group), names[group], runs) for group, runs in enumerate(blocks)])

    def put(self, names: Names, blocks: GroupRuns) -> None:
        """Keep them; what is here is used, and of what does not fit into all of the cache the head is kept."""
        self._use(names, blocks)
        for group, runs in enumerate(blocks):
            self._insert(GroupId(group), names[group], runs)

    def audit(self) -> None:
        """Blocks and bytes are conserved."""
        self._extents.audit()
        counts = [(lineage[0], extent.end - extent.start) for lineage, extent in self._extents]
        assert sum(count * self._block_bytes[group] for group, count in counts) == self.used_bytes
        assert self.used_bytes <= self._capacity_bytes, (self.used_bytes, self._capacity_bytes)
        counters = self.counters
        assert counters.put == counters.evicted + sum(count for _, count in counts), counters

    def _use(self, names: Names, blocks: GroupRuns) -> GroupRuns:
        self._uses += 1
        found: list[Runs] = []
        for group, runs in enumerate(blocks):
            held = self._extents.found(GroupId(group), names[group], runs)
            for lineage, start, end in pieces(GroupId(group), names[group], held):
                self._extents.cut(lineage, start, end)
                self._extents.add(lineage, Extent(start, end, 0, self._uses))
            found.append(held)
        return tuple(found)

    def _insert(self, group: GroupId, segments: Segments, runs: Runs) -> None:
        """In the order of the sequence, as far as there is room for once others have gone."""
        size_bytes = self._block_bytes[group]
        absent = runs_of.subtract(runs, self._extents.found(group, segments, runs))
        for lineage, start, end in pieces(group, segments, absent):
            self._evict((end - start) * size_bytes)
            end = min(end, start + (self._capacity_bytes - self.used_bytes) // size_bytes)
            if start < end:
                self._extents.add(lineage, Extent(start, end, 0, self._uses))
                self.used_bytes += (end - start) * size_bytes
                self.counters.put += end - start

    def _evict(self, wanted_bytes: int) -> None:
        """Make room for so many bytes, if those that this use has not touched suffice."""
        while self._capacity_bytes - self.used_bytes < wanted_bytes:
            candidate = self._extents.pop_expired(ORDINARY, 0)
            if candidate is None:
                return
            use, negative_end, start, lineage = candidate
            if use == self._uses:
                self._extents.add(lineage, *self._extents.cut(lineage, start, -negative_end))
                return
            missing_bytes = wanted_bytes - (self._capacity_bytes - self.used_bytes)
            count = min(-negative_end - start, div_ceil(missing_bytes, self._block_bytes[lineage[0]]))
            self._extents.cut(lineage, -negative_end - count, -negative_end)
            self.used_bytes -= count * self._block_bytes[lineage[0]]
            self.counters.evicted += count

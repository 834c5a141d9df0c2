"""What if the pool's master chose its victims by another policy: all else is as in `kvsim.pool.store`."""

from collections.abc import Callable, Iterator, Sequence

from kvcore import runs as runs_of
from kvcore.eviction.runs import Candidate, Line, Lineage, Piece, Reach, RunPolicy
from kvcore.types import GroupId, Run, Runs, Segments
from kvsim.pool.disks import Disks
from kvsim.pool.extents import Extent, Extents, Mark, Rank, merged, pieces, rank_of
from kvsim.pool.memory import DEFAULT_CLIENT_TTL_NS, Memory
from kvsim.pool.pins import SoftPins
from kvsim.pool.store import MooncakePool


class PolicyPool(MooncakePool):
    """A pool in which the policy, not the time its lease expired, says which of the objects that may go goes next.

    Where a use reaches the prefix, its lease does: a prefix does not go before what extends it, though that may not go.
    """

    def __init__(
        self,
        memory: Memory | int,
        block_bytes: Sequence[int],
        lease_ttl_ns: int,
        eviction_high_watermark_ratio: float,
        eviction_ratio: float,
        soft_pins: SoftPins,
        policy: RunPolicy,
        disks: Disks | None = None,
        client_ttl_ns: int = DEFAULT_CLIENT_TTL_NS,
    ) -> None:
        ratios = eviction_high_watermark_ratio, eviction_ratio
        super().__init__(memory, block_bytes, lease_ttl_ns, *ratios, soft_pins, disks, client_ttl_ns)
        self._policy = policy
        self._extents = LinedExtents(policy.line)

    def exists(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int) -> Runs:
        """As the master; what is found is used."""
        found = super().exists(group, segments, runs, now_ns)
        self._policy.use(list(pieces(group, segments, found)))
        self._reach(group, segments, found, now_ns + self._lease_ttl_ns)
        return found

    def get(self, group: GroupId, segments: Segments, runs: Runs, now_ns: int, reader: int | None = None) -> Runs:
        """As the master; whoever reads has looked it up, so that this is no other use."""
        found = super().get(group, segments, runs, now_ns, reader)
        self._policy.touch(list(pieces(group, segments, found)))
        self._reach(group, segments, found, now_ns + self._lease_ttl_ns)
        return found

    def _tick(self, now_ns: int) -> None:
        super()._tick(now_ns)
        self._policy.arrive(self._grants)

    def _insert(
        self, group: GroupId, segments: Segments, absent: Sequence[Piece], mark: Mark | None, writer: int | None
    ) -> Runs:
        refused = super()._insert(group, segments, absent, mark, writer)
        self._policy.use(absent)
        self._reach(group, segments, runs_of.normalize((start, end) for _, start, end in absent), self._now_ns)
        return refused

    def _reach(self, group: GroupId, segments: Segments, used: Runs, lease_ns: int) -> None:
        """Make young, and lease as long, what the policy says that these uses reach."""
        if not used or self._policy.reach is Reach.BLOCK:
            return
        held = self._extents.found(group, segments, ((0, used[-1][1]),))
        reached = list(pieces(group, segments, runs_of.subtract(_up_to_last(used, held), used)))
        self._policy.touch(reached)
        for lineage, start, end in reached:
            self._renew(lineage, self._extents.cut(lineage, start, end), lease_ns)

    def _renew(self, lineage: Lineage, extents: Sequence[Extent], lease_ns: int) -> None:
        """Add them as used by this call, leased until `lease_ns` or longer."""
        for extent in extents:
            if extent.lease_ns > lease_ns:
                self._extents.add(lineage, extent._replace(grant=self._grants))
        for start, end, mark in merged([extent for extent in extents if extent.lease_ns <= lease_ns]):
            self._extents.add(lineage, Extent(start, end, lease_ns, self._grants, mark))


class LinedExtents(Extents):
    """Extents whose lease has expired stand in a line for each rank, as a policy has it."""

    def __init__(self, make_line: Callable[[], Line]) -> None:
        super().__init__()
        self._make_line = make_line
        self._lines: dict[Rank, Line] = {}
        self._num_offered = 0

    def pop_expired(self, rank: Rank, now_ns: int) -> Candidate | None:
        """The first of the rank in line. It stays where it is."""
        line = self._line(rank, now_ns)
        while (candidate := line.take()) is not None:
            if self._may_go(candidate, rank, now_ns):
                return candidate
        return None

    def _line(self, rank: Rank, now_ns: int) -> Line:
        """The line of a rank, with everyone in it whose lease has expired; a new one when most of it may be stale."""
        if self._num_offered > 4 * self._num_extents + 64:
            self._rebuild()
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = self._make_line()
        while (expired := super().pop_expired(rank, now_ns)) is not None:
            line.offer(expired)
            self._num_offered += 1
        return line

    def _rebuild(self) -> None:
        self._lines.clear()
        self._num_offered = 0
        super()._rebuild()

    def _queued(self) -> Iterator[tuple[Rank, Candidate]]:
        yield from super()._queued()
        yield from ((rank, candidate) for rank, line in self._lines.items() for candidate in line)

    def _may_go(self, candidate: Candidate, rank: Rank, now_ns: int) -> bool:
        """Whether all of it is in one extent, as it was when it was offered."""
        call, negative_end, start, lineage = candidate
        extents = self.overlapping(lineage, start, -negative_end)
        if len(extents) != 1:
            return False
        first, last, lease_ns, grant, mark = extents[0]
        covers = first <= start and -negative_end <= last
        return covers and grant == call and lease_ns <= now_ns and rank_of(mark) == rank


def _up_to_last(used: Runs, held: Runs) -> Runs:
    """Of each held run, what is before the last block of it that was used, and that block."""
    found: list[Run] = []
    for start, end in held:
        last = [min(end, stop) for first, stop in used if first < end and start < stop]
        if last:
            found.append((start, last[-1]))
    return tuple(found)

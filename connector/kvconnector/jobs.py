"""Work for a worker: blocks to load or to store, as plain values."""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, NewType

from kvcore.keys import BlockHash, Namespace
from kvcore.types import GroupId

JobId = NewType("JobId", int)
"""Never used twice by one engine."""


# Tuples, not dataclasses: they are made and pickled in C.
class Entry(NamedTuple):
    """One block to move: its group (index in the planner's model), position, hash and place in the GPU cache."""

    group: GroupId
    position: int
    block_hash: BlockHash
    block_id: int


class Stretch(NamedTuple):
    """Blocks of one group to move: their positions, and in the same order their hashes and places in the GPU cache."""

    group: GroupId
    positions: range
    hashes: Sequence[BlockHash]
    block_ids: Sequence[int]

    def entries(self) -> Iterator[Entry]:
        """Block by block."""
        return map(Entry, repeat(self.group), self.positions, self.hashes, self.block_ids)

    def only(self, positions: range) -> "Stretch":
        """Those of its blocks, which are some of its own."""
        part = _slice(self.positions, positions)
        return Stretch(self.group, positions, self.hashes[part], self.block_ids[part])


class LoadJob(NamedTuple):
    """Fill the blocks. The block ids in `unwritten` were promised to nobody: report them as not loaded."""

    job_id: JobId
    request_id: str
    namespace: Namespace
    stretches: tuple[Stretch, ...]
    unwritten: tuple[int, ...] = ()

    @property
    def num_entries(self) -> int:
        """Blocks."""
        return sum(len(stretch.positions) for stretch in self.stretches)

    @property
    def entries(self) -> list[Entry]:
        """Block by block, in the order in which its outcomes are told."""
        return _entries(self.stretches)


class Ended(NamedTuple):
    """`num_ranks` ranks are done with the job; entries with an index in `failed` were not moved by all of them.

    Of those a load found the ones in `gone` not to be in the pool, or not to be what was stored there.
    """

    job_id: JobId
    num_ranks: int
    failed: tuple[int, ...]
    gone: tuple[int, ...] = ()


class StoreJob(NamedTuple):
    """Write the blocks, which are full once the step that brings this job has run.

    `part`: of one rank's part of a job, the numbers that its entries have in the whole, stretch by stretch.
    """

    job_id: JobId
    request_id: str
    namespace: Namespace
    stretches: tuple[Stretch, ...]
    part: tuple[range, ...] | None = None

    @property
    def num_entries(self) -> int:
        """Blocks."""
        return sum(len(stretch.positions) for stretch in self.stretches)

    @property
    def entries(self) -> list[Entry]:
        """Block by block, in the order in which its outcomes are told."""
        return _entries(self.stretches)

    def only(self, own: Callable[[GroupId, range], range]) -> "StoreJob":
        """The job of a rank that writes, of the positions of each group, only its own."""
        stretches, part, first = [], [], 0
        for stretch in self.stretches:
            mine = own(stretch.group, stretch.positions)
            stretches.append(stretch.only(mine))
            part.append(range(first, first + len(stretch.positions))[_slice(stretch.positions, mine)])
            first += len(stretch.positions)
        return self._replace(stretches=tuple(stretches), part=tuple(part))

    def whole(self, ended: Ended) -> Ended:
        """A report about this part, as one about the whole job."""
        if self.part is None or not ended.failed:
            return ended
        numbers = [number for stretch in self.part for number in stretch]
        failed, gone = (tuple(numbers[index] for index in told) for told in (ended.failed, ended.gone))
        return ended._replace(failed=failed, gone=gone)


def _slice(whole: range, part: range) -> slice:
    """Where the numbers of `part`, some of those of `whole`, are in it; both count up."""
    return slice(part.start - whole.start, part.stop - whole.start, part.step)


def _entries(stretches: Sequence[Stretch]) -> list[Entry]:
    return [entry for stretch in stretches for entry in stretch.entries()]

"""Work for a worker: blocks to load or to store, as plain values."""

from typing import NamedTuple, NewType

from kvcore.keys import BlockHash, Namespace
from kvcore.types import GroupId

JobId = NewType("JobId", int)
"""Never used twice by one engine."""


# Tuples, not dataclasses: there is one entry per block, and a tuple is made and pickled in C.
class Entry(NamedTuple):
    """One block to move: its group (index in the planner's model), position, hash and place in the GPU cache."""

    group: GroupId
    position: int
    block_hash: BlockHash
    block_id: int


class LoadJob(NamedTuple):
    """Fill the entries' blocks. The block ids in `unwritten` were promised to nobody: report them as not loaded."""

    job_id: JobId
    request_id: str
    namespace: Namespace
    entries: tuple[Entry, ...]
    unwritten: tuple[int, ...] = ()


class Ended(NamedTuple):
    """`num_ranks` ranks are done with the job; entries with an index in `failed` were not moved by all of them.

    Of those a load found the ones in `gone` not to be in the pool, or not to be what was stored there.
    """

    job_id: JobId
    num_ranks: int
    failed: tuple[int, ...]
    gone: tuple[int, ...] = ()


class StoreJob(NamedTuple):
    """Write the entries' blocks, which are full once the step that brings this job has run.

    One rank's part of a job has those of its entries whose indices are in `part`.
    """

    job_id: JobId
    request_id: str
    namespace: Namespace
    entries: tuple[Entry, ...]
    part: tuple[int, ...] | None = None

    def only(self, part: tuple[int, ...]) -> "StoreJob":
        """The job of a rank that writes only these entries."""
        return self._replace(entries=tuple(self.entries[index] for index in part), part=part)

    def whole(self, ended: Ended) -> Ended:
        """A report about this part, as one about the whole job."""
        part = self.part
        return ended if part is None else ended._replace(failed=tuple(part[index] for index in ended.failed))

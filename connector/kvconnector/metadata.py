"""What the two halves send each other: jobs for the worker with every step, reports of ended jobs back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NewType

from kvconnector.vllm_compat import KVConnectorMetadata, KVConnectorWorkerMetadata
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
    entries: tuple[Entry, ...]
    unwritten: tuple[int, ...] = ()


class StoreJob(NamedTuple):
    """Write the entries' blocks, which are full once the step that brings this job has run."""

    job_id: JobId
    request_id: str
    entries: tuple[Entry, ...]


class Ended(NamedTuple):
    """`num_ranks` ranks are done with the job; entries with an index in `failed` were not moved by all of them."""

    job_id: JobId
    num_ranks: int
    failed: tuple[int, ...]


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """The jobs that one step brings to every worker, and the namespace of their keys."""

    namespace: Namespace
    loads: tuple[LoadJob, ...]
    stores: tuple[StoreJob, ...]


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Jobs that ended since the last report, at one rank or, aggregated, at several."""

    finished: tuple[Ended, ...]

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        """Both reports as one."""
        return WorkerReport(_merge((*self.finished, *other.finished)))


def _merge(reports: Iterable[Ended]) -> tuple[Ended, ...]:
    merged: dict[JobId, Ended] = {}
    for report in reports:
        before = merged.get(report.job_id)
        merged[report.job_id] = report if before is None else _both(before, report)
    return tuple(merged.values())


def _both(left: Ended, right: Ended) -> Ended:
    failed = sorted({*left.failed, *right.failed})
    return Ended(left.job_id, left.num_ranks + right.num_ranks, tuple(failed))

"""What the two halves send each other: jobs for the worker with every step, reports of ended jobs back."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvconnector.jobs import Ended, JobId, LoadJob, StoreJob, Stretch
from kvconnector.vllm_compat import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["Ended", "JobId", "LoadJob", "StepMetadata", "StoreJob", "Stretch", "WorkerReport"]


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """The jobs that one step brings to every worker."""

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
    gone = sorted({*left.gone, *right.gone})
    return Ended(left.job_id, left.num_ranks + right.num_ranks, tuple(failed), tuple(gone))

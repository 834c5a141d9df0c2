"""Loads and stores: jobs go in on the engine's thread, come out there as reports, and run elsewhere in between."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvconnector.jobs import Ended, LoadJob, StoreJob
from kvcore.ports import Clock, StoreOutcome
from kvcore.units import NS_PER_MS

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

JobT = TypeVar("JobT", LoadJob, StoreJob)

_CLOSE_TIMEOUT_S = 10.0

_GONE = frozenset((StoreOutcome.MISSING, StoreOutcome.BAD_LENGTH, StoreOutcome.BAD_CONTENT))
"""What says of an object that it is not in the pool, or is not what its key names."""


class TransferThread(Generic[JobT]):
    """Runs jobs one after the other. Each ends exactly once; while it has not, its blocks are in use.

    `move(job, deadline_ns)` gives one outcome per entry and returns only when no byte moves any more. A job that waits
    in the queue beyond its deadline ends there, without a byte moved; one that runs is never given up.
    """

    def __init__(
        self, name: str, move: Callable[[JobT, int], Sequence[StoreOutcome]], deadline_ms: int, clock: Clock
    ) -> None:
        self.outcomes: Counter[StoreOutcome] = Counter()
        """Entries of ended jobs by outcome."""
        self.on_ended: Callable[[JobT, Sequence[StoreOutcome], int], None] = lambda job, outcomes, took_ns: None
        """Called with each job that ended, on the thread that ended it: its outcomes, and how long it took in all."""
        self._move: Callable[[JobT, int], Sequence[StoreOutcome]] = move
        self._patience_ns = deadline_ms * NS_PER_MS
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[tuple[JobT, int, Callable[[], object]]] = deque()
        self._ended: list[tuple[JobT, Ended]] = []
        self._is_moving = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    def submit(self, job: JobT, ready: Callable[[], object] = lambda: None) -> None:
        """Run the job after those submitted before; its thread first calls `ready`, which may wait."""
        with self._changed:
            self._waiting.append((job, self._clock.now_ns() + self._patience_ns, ready))
            self._changed.notify_all()

    def take_ended(self) -> list[tuple[JobT, Ended]]:
        """The jobs that ended since the last call, with what failed."""
        if not self._waiting and not self._ended:  # in most steps; what ends just now is the next one's
            return []
        now_ns = self._clock.now_ns()
        with self._changed:
            while self._waiting and self._waiting[0][1] <= now_ns:
                job, deadline_ns, _ = self._waiting.popleft()
                self._end(job, [StoreOutcome.TIMEOUT] * job.num_entries, deadline_ns)
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until no job waits or runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_moving)

    def close(self) -> bool:
        """Stop after the running job, and say whether it has ended; what waits never runs."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                job, deadline_ns, ready = self._waiting.popleft()
                self._is_moving = True
            outcomes = self._outcomes(job, deadline_ns, ready)
            with self._changed:
                self._is_moving = False
                self._end(job, outcomes, deadline_ns)
                self._changed.notify_all()

    def _outcomes(self, job: JobT, deadline_ns: int, ready: Callable[[], object]) -> Sequence[StoreOutcome]:
        try:
            ready()
            outcomes = self._move(job, deadline_ns)
            assert len(outcomes) == job.num_entries, (len(outcomes), job.num_entries)
            return outcomes
        except Exception:
            logger.exception("job %d of request %s failed", job.job_id, job.request_id)
            return [StoreOutcome.UNAVAILABLE] * job.num_entries

    def _end(self, job: JobT, outcomes: Sequence[StoreOutcome], deadline_ns: int) -> None:
        self.outcomes.update(outcomes)
        self.on_ended(job, outcomes, self._clock.now_ns() - (deadline_ns - self._patience_ns))
        failed = tuple(index for index, outcome in enumerate(outcomes) if outcome is not StoreOutcome.OK)
        gone = tuple(index for index in failed if outcomes[index] in _GONE)
        self._ended.append((job, Ended(job.job_id, 1, failed, gone)))

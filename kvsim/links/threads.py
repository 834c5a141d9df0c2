"""The threads of an instance that move blocks: each does one job after the other, first come first served."""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from kvsim.clock import Action, Clock

Job: TypeAlias = Callable[[Action], None]
"""Begins something, and calls what it is given when that is over."""


class IoThreads:
    """`num_threads` at most have a job at one time; None: everything begins at once.

    Counters: `num_jobs` begun, and `waited_ps`, how long they waited for a thread in all.
    """

    def __init__(self, clock: Clock, num_threads: int | None) -> None:
        assert num_threads is None or num_threads > 0, num_threads
        self._clock = clock
        self._num_threads = num_threads
        self._num_busy = 0
        self._waiting: deque[tuple[int, Job]] = deque()
        self.num_jobs = 0
        self.waited_ps = 0

    def run(self, job: Job) -> None:
        """Begin the job when a thread is free."""
        if self._num_threads is not None and self._num_busy == self._num_threads:
            self._waiting.append((self._clock.now_ps, job))
        else:
            self._begin(self._clock.now_ps, job)

    def audit(self) -> None:
        """Nothing is left to do."""
        assert not self._num_busy and not self._waiting, (self._num_busy, len(self._waiting))

    def _begin(self, posted_ps: int, job: Job) -> None:
        self._num_busy += 1
        self.num_jobs += 1
        self.waited_ps += self._clock.now_ps - posted_ps
        job(self._end)

    def _end(self) -> None:
        self._num_busy -= 1
        if self._waiting:
            self._begin(*self._waiting.popleft())

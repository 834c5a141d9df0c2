"""A progress bar that looks at a running simulation twice a second; the simulation does not know of it."""

from collections.abc import Iterable

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsim.clock import PS_PER_S
from kvsim.events import EventLog, Kind
from kvsim.run import Simulation

REFRESH_PER_S = 2


class RunProgress(Progress):
    """Requests done of all, simulated time, hit rate so far and time left; a context manager around the run."""

    def __init__(self, simulation: Simulation, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests at {task.fields[simulated]}, hit rate {task.fields[hit_rate]}, left"),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
        )
        self._simulation = simulation
        self._hits = HitsSoFar(simulation.log)
        name, total = simulation.scenario.scenario.name, len(simulation.cluster.sequences)
        self._task = self.add_task(name, total=total, simulated="0 s", hit_rate="-")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by the refreshing thread for each frame."""
        if self.tasks:
            simulation = self._simulation
            self.update(
                self._task,
                completed=simulation.cluster.num_done,
                simulated=f"{simulation.clock.now_ps / PS_PER_S:,.0f} s",
                hit_rate=self._hits.rate(),
            )
        yield from super().get_renderables()


class HitsSoFar:
    """Hit rate of the requests admitted so far, from the rows that a log has gained since it was last asked."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._num_read = 0
        self._input_len = np.zeros(0, dtype=np.int64)
        self._hit_tokens = 0
        self._prompt_tokens = 0

    def rate(self) -> str:
        """As a percentage, or "-" before the first admission."""
        end = len(self._log) * EventLog.WIDTH
        rows = np.array(self._log.rows[self._num_read : end])  # a copy: a view would forbid the log to grow
        self._num_read = end
        _, kind, request, a, b = rows.reshape(-1, EventLog.WIDTH).T
        arrived, admitted = kind == Kind.ARRIVED, kind == Kind.ADMITTED
        if arrived.any():
            self._input_len.resize(max(len(self._input_len), int(request[arrived].max()) + 1), refcheck=False)
            self._input_len[request[arrived]] = a[arrived]
        self._hit_tokens += int((a + b)[admitted].sum())
        self._prompt_tokens += int(self._input_len[request[admitted]].sum())
        return f"{self._hit_tokens / self._prompt_tokens:.1%}" if self._prompt_tokens else "-"

"""One engine in virtual time: step after step, many decode steps as one jump."""

from bisect import bisect_left
from collections.abc import Callable

from kvsim.clock import Action, Alarm, Clock, Phase
from kvsim.cost.step_time import StepTimeModel
from kvsim.events import EventLog, Kind
from kvsim.pool.client import PoolClient
from kvsim.scheduler import Scheduler
from kvsim.sequence import Sequence
from kvsim.step import Step


class Jump:
    """`num_steps` equal-shaped decode steps from `start_ps`; step i costs base + slope * (context + i * batch)."""

    __slots__ = ("_base_ps", "_slope_ps", "num_steps", "start_ps")

    def __init__(self, start_ps: int, num_steps: int, base_ps: int, slope_ps: int, context: int, batch: int) -> None:
        self.start_ps = start_ps
        self.num_steps = num_steps
        self._base_ps = base_ps + slope_ps * context
        self._slope_ps = slope_ps * batch

    def end_of_step(self, num_steps: int) -> int:
        """When the first `num_steps` have run: an arithmetic series, exact in integers."""
        return self.start_ps + num_steps * self._base_ps + self._slope_ps * (num_steps * (num_steps - 1) // 2)

    def steps_until(self, time_ps: int) -> int:
        """Smallest number of steps, at least 1, that end at `time_ps` or later; all of them when none does."""
        return bisect_left(range(1, self.num_steps), time_ps, key=self.end_of_step) + 1


class Instance:
    """Drives a scheduler: runs its steps on the clock and hands it what arrived, between steps only."""

    def __init__(
        self,
        index: int,
        clock: Clock,
        scheduler: Scheduler,
        step_time: StepTimeModel,
        log: EventLog,
        on_finished: Callable[[Sequence], None],
        max_jump: int | None = None,
    ) -> None:
        """`max_jump` bounds the decode steps taken as one (1: step by step); None: as many as the batch lasts."""
        self.index = index
        self.scheduler = scheduler
        self.num_steps = 0
        self.client: PoolClient | None = None
        self._clock = clock
        self._step_time = step_time
        self._log = log
        self._on_finished = on_finished
        self._max_jump = max_jump
        self._inbox: list[Action] = []
        self._releases: list[tuple[int, Action]] = []
        self._step = Step()
        self._jump = Jump(0, 0, 1, 0, 0, 0)
        self._end_alarm: Alarm | None = None
        self._will_schedule = False

    def attach(self, client: PoolClient) -> None:
        """Use the pool through this client."""
        self.client = client
        self.scheduler.pool = client

    def submit(self, sequence: Sequence) -> None:
        """A request for this instance arrived."""
        self.post(lambda: self.scheduler.add(sequence))

    def post(self, action: Action) -> None:
        """Do `action` when the step that runs now has ended, or at the end of this instant; then schedule."""
        self._inbox.append(action)
        if self._step.scheduled:
            self._shorten_jump()
        else:
            self._set_schedule()

    def release(self, action: Action) -> None:
        """As `post`, for an action that only gives blocks back: while no request waits, there is nothing to decide.

        But where those that run give blocks back as well, the order counts.
        """
        if self.scheduler.has_waiting or self._will_schedule or not self.scheduler.cache.keeps_all:
            self.post(action)
        elif self._step.scheduled:
            self._releases.append((self._clock.now_ps, action))
        else:
            action()

    def _shorten_jump(self) -> None:
        """End the jump with the step that runs now."""
        steps = self._jump.steps_until(self._clock.now_ps)
        if steps < self._jump.num_steps:
            self._jump.num_steps = steps
            assert self._end_alarm is not None
            self._end_alarm.cancel()
            self._set_end()

    def _set_end(self) -> None:
        end_ps = self._jump.end_of_step(self._jump.num_steps)
        self._end_alarm = self._clock.at_phase(end_ps, Phase.STEP_END, self.index, self._end_step)

    def _set_schedule(self) -> None:
        if not self._will_schedule:
            self._will_schedule = True
            self._clock.at_phase(self._clock.now_ps, Phase.SCHEDULE, self.index, self._begin_step)

    def _schedule_now(self) -> None:
        """The last thing this engine does in its phase: decide at once where nothing else happens at this instant."""
        if self._will_schedule or self._clock.has_more_now:
            self._set_schedule()
        elif self._inbox or self.scheduler.has_requests:
            self._begin_step()

    def _begin_step(self) -> None:
        """Take what was posted, then decide."""
        assert not self._step.scheduled, "a step runs already"
        self._will_schedule = False
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        step = self.scheduler.schedule(self._clock.now_ns)
        self._step = step
        for sequence, num_lost in step.preempted:
            self._log.add(self._clock.now_ps, Kind.PREEMPTED, sequence.index, num_lost)
        for sequence, local_len, external_len in step.admitted:
            self._log.add(self._clock.now_ps, Kind.ADMITTED, sequence.index, local_len, external_len)
        if step.scheduled:
            self._jump = self._plan_jump(step)
            self._set_end()
        elif step.preempted:
            # The last one that ran gave way to blocks that loads and stores hold; who waits was not considered.
            self._set_schedule()

    def _plan_jump(self, step: Step) -> Jump:
        now_ps = self._clock.now_ps
        if not step.is_pure_decode():
            return Jump(now_ps, 1, self._duration_ps(step), 0, 0, 0)
        batch = len(step.scheduled)
        context = sum(before for _, before, _ in step.scheduled)
        base_ps, slope_ps, max_context = self._step_time.decode_affine_ps(batch, context)
        num_steps = self.scheduler.jump_limit(step)
        if max_context is not None:
            num_steps = min(num_steps, (max_context - context) // batch + 1)
        if self._max_jump is not None:
            num_steps = min(num_steps, self._max_jump)
        return Jump(now_ps, num_steps, base_ps, slope_ps, context, batch)

    def _duration_ps(self, step: Step) -> int:
        chunks = [(before, num_new) for _, before, num_new in step.scheduled if num_new > 1]
        decodes = [before for _, before, num_new in step.scheduled if num_new == 1]
        return self._step_time.step_ps(chunks, len(decodes), sum(decodes))

    def _end_step(self) -> None:
        """Account for what ran."""
        num_steps = self._jump.num_steps
        self.num_steps += num_steps
        if num_steps > 1:
            self.scheduler.take_jump_blocks(self._step, num_steps)
        if self._releases:
            self._take_releases(self._jump.end_of_step(num_steps - 1))
        for sequence, before, num_new in self._step.scheduled:
            if before + num_new == sequence.input_len and not sequence.num_output:
                self._log.add(self._clock.now_ps, Kind.FIRST_TOKEN, sequence.index)
        self._record_step(num_steps)
        finished = self.scheduler.complete(self._step, num_steps, self._clock.now_ns)
        if self.client is not None:
            self.client.start_stores()
        for sequence in finished:
            self._log.add(self._clock.now_ps, Kind.FINISHED, sequence.index, sequence.num_output, self.index)
            self._on_finished(sequence)
        self._step = Step()
        self._schedule_now()

    def _record_step(self, num_steps: int) -> None:
        scheduler, parts = self.scheduler, self._step.scheduled
        held_blocks = scheduler.blocks.num_blocks - scheduler.blocks.num_free
        computed_tokens = num_steps * len(parts) if num_steps > 1 else sum([num_new for _, _, num_new in parts])
        row = self._jump.start_ps, self._clock.now_ps, self.index, num_steps, len(parts), held_blocks, computed_tokens
        self._log.usage.steps.add(*row)

    def _take_releases(self, last_step_ps: int) -> None:
        """Those of earlier steps before the last one ends, as if it had been a step of its own; the rest after it."""
        for at_ps, action in self._releases:
            if at_ps <= last_step_ps:
                action()
            else:
                self._inbox.append(action)
        self._releases.clear()

"""vLLM's own scheduler behind the simulator's clock: the real decisions, with the step times of the fast engine.

There is no model: a step is `schedule()`, its duration passes, then `update_from_output()` with one token for every
request that has no prompt left to compute.
"""

from dataclasses import dataclass
from typing import Any

from kvcore.errors import require
from kvsim.clock import PS_PER_S, Clock, Phase
from kvsim.cluster import OnFinished
from kvsim.cost.step_time import StepTimeModel
from kvsim.events import EventLog, Kind
from kvsim.reference.vllm_scheduler import make_request, make_scheduler, model_runner_output, request_id
from kvsim.run import Simulation, make_cluster
from kvsim.scenario import Scenario
from kvsim.sequence import Sequence, Status
from kvsim.workload.trace import Trace


def reference_simulation(scenario: Scenario, trace: Trace) -> Simulation:
    """The scenario's cluster of vLLM schedulers, about to serve the trace.

    Raises InvalidArgument for a scenario with a pool.
    """
    fix = "one without [pool] and [link] for now, such as nopool-16: --set cannot remove a section"
    require(scenario.offloading is None, "scenario", scenario.scenario.name, fix)
    clock = Clock()
    step_time = scenario.step_time

    def make_engine(index: int, log: EventLog, on_finished: OnFinished) -> VllmEngine:
        return VllmEngine(index, clock, make_scheduler(scenario), step_time, log, on_finished)

    cluster = make_cluster(scenario, trace, clock, make_engine, lambda *_: None)
    return Simulation(scenario, clock, cluster, [], None)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part of one step."""

    sequence: Sequence
    before: int
    """Tokens computed before the step."""
    num_new: int
    """Tokens it computes."""
    is_sampled: bool
    """It has no token left to compute after them, so it gets one more."""


class VllmEngine:
    """Takes one step after the other; hands over what arrived between two steps, as vLLM's engine core does."""

    def __init__(
        self,
        index: int,
        clock: Clock,
        scheduler: Any,
        step_time: StepTimeModel,
        log: EventLog,
        on_finished: OnFinished,
    ) -> None:
        self.index = index
        self._clock = clock
        self._scheduler = scheduler
        self._block_size: int = scheduler.hash_block_size
        self._step_time = step_time
        self._log = log
        self._on_finished = on_finished
        self._inbox: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._will_schedule = False
        self._output: Any = None
        self._step: list[Scheduled] = []
        self._began_ps = 0

    def submit(self, sequence: Sequence) -> None:
        """A request for this engine arrived: schedule at the end of this instant, or after the step that runs."""
        self._inbox.append(sequence)
        if not self._step:
            self._set_schedule()

    def _set_schedule(self) -> None:
        if not self._will_schedule:
            self._will_schedule = True
            self._clock.at_phase(self._clock.now_ps, Phase.SCHEDULE, self.index, self._begin_step)

    def _take_inbox(self) -> None:
        for sequence in self._inbox:
            request = make_request(sequence, self._block_size, self._clock.now_ps / PS_PER_S)
            self._sequences[request.request_id] = sequence
            self._scheduler.add_request(request)
        self._inbox.clear()

    def _begin_step(self) -> None:
        self._will_schedule = False
        self._take_inbox()
        self._output = self._scheduler.schedule()
        self._log_preempted(len(self._output.preempted_req_ids))
        self._step = [self._scheduled(*item) for item in self._output.num_scheduled_tokens.items()]
        for part in self._step:
            self._account(part)
        if self._step:
            self._began_ps = self._clock.now_ps
            end_ps = self._clock.now_ps + self._duration_ps()
            self._clock.at_phase(end_ps, Phase.STEP_END, self.index, self._end_step)
        else:
            assert not self._scheduler.has_unfinished_requests(), "vLLM schedules nothing though requests wait"

    def _log_preempted(self, num_preempted: int) -> None:
        """They are at the head of the queue now, the last one first."""
        head = list(self._scheduler.waiting)[:num_preempted] if num_preempted else []
        for request in reversed(head):
            sequence = self._sequences[request.request_id]
            self._log.add(self._clock.now_ps, Kind.PREEMPTED, sequence.index, sequence.num_computed)
            sequence.status = Status.PREEMPTED
            sequence.num_computed = 0
            sequence.num_preemptions += 1

    def _scheduled(self, name: str, num_new: int) -> Scheduled:
        """Read right after `schedule()`, which has advanced the request over the step already."""
        request = self._scheduler.requests[name]
        before = request.num_computed_tokens - num_new
        return Scheduled(self._sequences[name], before, num_new, not request.is_prefill_chunk)

    def _account(self, part: Scheduled) -> None:
        sequence = part.sequence
        sequence.status = Status.RUNNING
        sequence.num_computed = part.before + part.num_new
        if not sequence.admitted:
            sequence.admitted = True
            sequence.local_hit_len = part.before
            self._log.add(self._clock.now_ps, Kind.ADMITTED, sequence.index, part.before, 0)

    def _duration_ps(self) -> int:
        chunks = [(part.before, part.num_new) for part in self._step if part.num_new > 1]
        contexts = [part.before for part in self._step if part.num_new == 1]
        return self._step_time.step_ps(chunks, len(contexts), sum(contexts))

    def _record_step(self) -> None:
        blocks = self._scheduler.kv_cache_manager.block_pool
        held_blocks = blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks()  # one is the null block
        computed_tokens = sum(part.num_new for part in self._step)
        row = self._began_ps, self._clock.now_ps, self.index, 1, len(self._step), held_blocks, computed_tokens
        self._log.usage.steps.add(*row)

    def _end_step(self) -> None:
        self._record_step()
        sampled = [part.sequence for part in self._step if part.is_sampled]
        for sequence in sampled:
            if not sequence.num_output:
                self._log.add(self._clock.now_ps, Kind.FIRST_TOKEN, sequence.index)
            sequence.num_tokens += 1
        is_sampled = {request_id(part.sequence): part.is_sampled for part in self._step}
        outputs = self._scheduler.update_from_output(self._output, model_runner_output(is_sampled))
        for output in outputs[0].outputs if outputs else ():
            if output.finish_reason is not None:
                self._finish(self._sequences.pop(output.request_id))
        self._step = []
        self._set_schedule()

    def _finish(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        self._log.add(self._clock.now_ps, Kind.FINISHED, sequence.index, sequence.num_output, self.index)
        self._on_finished(sequence)

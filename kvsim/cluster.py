"""A fleet: instances behind a router, over one pool; requests arrive by the trace or when what they wait for is done."""

from dataclasses import dataclass
from functools import partial

from kvcore.planner import Planner
from kvcore.request import KVRequest, PoolPolicy
from kvcore.routing import Router
from kvsim.clock import Clock
from kvsim.cost.step_time import StepTimeModel
from kvsim.events import EventLog, Kind
from kvsim.instance import Instance
from kvsim.pool_client import Path, PoolClient
from kvsim.scheduler import Limits, Scheduler
from kvsim.sequence import Sequence
from kvsim.store import MooncakePool
from kvsim.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class SharedPool:
    """The pool and the decisions about it; `paths` has one entry per instance."""

    store: MooncakePool
    planner: Planner
    policy: PoolPolicy
    paths: tuple[Path, ...]


class Cluster:
    """Runs one trace to its end. Use once."""

    def __init__(
        self,
        clock: Clock,
        trace: Trace,
        limits: Limits,
        step_time: StepTimeModel,
        num_instances: int,
        router: Router,
        pool: SharedPool | None = None,
        max_jump: int | None = None,
    ) -> None:
        self.log = EventLog()
        self.sequences: list[Sequence | None] = [None] * trace.num_requests
        """By request; None for one that was rejected."""
        self.pool = pool
        self.num_done = 0
        """Requests that completed or were rejected."""
        self._clock = clock
        self._trace = trace
        self._limits = limits
        self._router = router
        self._num_arrived = 0
        self._followers = _followers(trace)
        self._starts = [index for index, before in enumerate(trace.after.tolist()) if before == index]
        self._arrival_ps = trace.arrival_ps.tolist()
        self._delay_ps = trace.delay_ps.tolist()
        self._input_len = trace.input_len.tolist()
        self._output_len = trace.output_len.tolist()
        self.instances = [self._make_instance(index, step_time, max_jump) for index in range(num_instances)]

    def run(self) -> None:
        """Until every request has completed or was rejected, and every transfer has ended."""
        if self._starts:
            self._clock.at(self._arrival_ps[self._starts[0]], partial(self._arrive_from, 0))
        self._clock.run()

    def _make_instance(self, index: int, step_time: StepTimeModel, max_jump: int | None) -> Instance:
        scheduler = Scheduler(self._limits)
        instance = Instance(index, self._clock, scheduler, step_time, self.log, self._finished, max_jump)
        if self.pool is not None:
            path = self.pool.paths[index]
            instance.attach(PoolClient(self._clock, self.pool.store, path, instance, self.log))
        return instance

    def _arrive_from(self, position: int) -> None:
        """Let every request of this instant arrive, in order, and set the alarm for the next."""
        starts, now_ps = self._starts, self._clock.now_ps
        while position < len(starts) and self._arrival_ps[starts[position]] <= now_ps:
            self._arrive(starts[position])
            position += 1
        if position < len(starts):
            self._clock.at(self._arrival_ps[starts[position]], partial(self._arrive_from, position))

    def _arrive(self, index: int) -> None:
        input_len, output_len = self._input_len[index], self._output_len[index]
        self._log(Kind.ARRIVED, index, input_len, output_len)
        # Output 0 is prefill only: the engine samples one token all the same, which is not counted.
        num_tokens = input_len + max(1, output_len)
        if num_tokens > self._limits.capacity_tokens:
            self._log(Kind.REJECTED, index, num_tokens, self._limits.capacity_tokens)
            self._done(index)
            return
        segments = self._trace.segments(index, self._limits.block_size)
        sequence = Sequence(index, input_len, max(1, output_len), segments, self._machine(input_len))
        self.sequences[index] = sequence
        instance = self._router.choose(self._num_arrived, len(self.instances))
        self._num_arrived += 1
        self.instances[instance].submit(sequence)

    def _machine(self, input_len: int) -> KVRequest | None:
        return None if self.pool is None else KVRequest(self.pool.planner, self.pool.policy, input_len)

    def _finished(self, sequence: Sequence) -> None:
        self._done(sequence.index)

    def _done(self, index: int) -> None:
        self.num_done += 1
        for follower in self._followers.get(index, ()):
            self._clock.after(self._delay_ps[follower], partial(self._arrive, follower))

    def _log(self, kind: Kind, index: int, a: int, b: int) -> None:
        self.log.add(self._clock.now_ps, kind, index, a, b)


def _followers(trace: Trace) -> dict[int, list[int]]:
    """For each request, those that start after it."""
    followers: dict[int, list[int]] = {}
    for index, before in enumerate(trace.after.tolist()):
        if before != index:
            followers.setdefault(before, []).append(index)
    return followers

"""A fleet: instances behind one front, over one pool; requests arrive by the trace, or after what they follow."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

from kvcore.request import KVRequest
from kvsim.clock import Clock
from kvsim.dispatcher import Dispatcher
from kvsim.events import EventLog, Kind
from kvsim.sequence import Sequence
from kvsim.workload.trace import Trace


class Engine(Protocol):
    """What serves requests: the fast engine (`kvsim.instance`) or vLLM's own scheduler (`kvsim.reference`)."""

    def submit(self, sequence: Sequence) -> None:
        """A request for this engine arrived now."""


OnFinished: TypeAlias = Callable[[Sequence], None]
MakeEngine: TypeAlias = Callable[[int, EventLog, OnFinished], Engine]
"""(index, log, what to call when a request finished) -> engine."""
MakeMachine: TypeAlias = Callable[[int, Sequence], KVRequest | None]
"""(engine, sequence) -> the machine of a sequence that the engine is about to get; None where there is no pool."""


class Cluster:
    """Runs one trace to its end. Use once. `capacity_tokens` bounds prompt plus output of a request."""

    def __init__(
        self,
        clock: Clock,
        trace: Trace,
        block_size: int,
        capacity_tokens: int,
        num_instances: int,
        dispatcher: Dispatcher,
        make_engine: MakeEngine,
        make_machine: MakeMachine,
    ) -> None:
        self.log = EventLog()
        self.sequences: list[Sequence | None] = [None] * trace.num_requests
        """By request; None for one that was rejected."""
        self.num_done = 0
        """Requests that completed or were rejected."""
        self._clock = clock
        self._trace = trace
        self._block_size = block_size
        self._capacity_tokens = capacity_tokens
        self._dispatcher = dispatcher
        self._make_machine = make_machine
        self._followers = _followers(trace)
        self._starts = [index for index, before in enumerate(trace.after.tolist()) if before == index]
        self._arrival_ps = trace.arrival_ps.tolist()
        self._delay_ps = trace.delay_ps.tolist()
        self._input_len = trace.input_len.tolist()
        self._output_len = trace.output_len.tolist()
        self._session = trace.session.tolist()
        self.engines = [make_engine(index, self.log, self._finished) for index in range(num_instances)]

    def run(self) -> None:
        """Until every request has completed or was rejected, and every transfer has ended."""
        if self._starts:
            self._clock.at(self._arrival_ps[self._starts[0]], partial(self._arrive_from, 0))
        self._clock.run()

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
        if num_tokens > self._capacity_tokens:
            self._log(Kind.REJECTED, index, num_tokens, self._capacity_tokens)
            self._done(index)
            return
        segments = self._trace.segments(index, self._block_size)
        sequence = Sequence(index, input_len, max(1, output_len), segments)
        self.sequences[index] = sequence
        engine = self._dispatcher.choose(sequence, str(self._session[index]))
        sequence.kv = self._make_machine(engine, sequence)
        self.engines[engine].submit(sequence)

    def _finished(self, sequence: Sequence) -> None:
        self._dispatcher.finished(sequence)
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

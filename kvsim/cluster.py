"""A fleet: instances behind one front, over one pool, and the requests that arrive there."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvcore.request import KVRequest
from kvsim.arrivals import Arrivals
from kvsim.clock import Clock
from kvsim.config.mode import Mode
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
        mode: Mode,
        block_size: int,
        capacity_tokens: int,
        num_instances: int,
        dispatcher: Dispatcher,
        make_engine: MakeEngine,
        make_machine: MakeMachine,
    ) -> None:
        self.log = EventLog()
        self.sequences: list[Sequence | None] = [None] * trace.num_requests
        """By request; None for one that was rejected or did not arrive."""
        self.arrivals = Arrivals(clock, self.log, trace, mode, self._arrive)
        self._clock = clock
        self._trace = trace
        self._block_size = block_size
        self._capacity_tokens = capacity_tokens
        self._dispatcher = dispatcher
        self._make_machine = make_machine
        self._input_len = trace.input_len.tolist()
        self._output_len = trace.output_len.tolist()
        self._session = trace.session.tolist()
        self.engines = [make_engine(index, self.log, self._finished) for index in range(num_instances)]

    @property
    def num_done(self) -> int:
        """Requests that completed or were rejected."""
        return self.arrivals.num_done

    def run(self) -> None:
        """Until every request has completed or was rejected, and every transfer has ended.

        After a run that is stopped, what is in flight comes to its end without anybody else arriving.
        """
        self.arrivals.begin()
        self._clock.run()

    def _arrive(self, index: int) -> None:
        input_len, output_len = self._input_len[index], self._output_len[index]
        self._log(Kind.ARRIVED, index, input_len, output_len)
        # Output 0 is prefill only: the engine samples one token all the same, which is not counted.
        num_tokens = input_len + max(1, output_len)
        if num_tokens > self._capacity_tokens:
            self._log(Kind.REJECTED, index, num_tokens, self._capacity_tokens)
            self.arrivals.done(index)
            return
        segments = self._trace.segments(index, self._block_size)
        sequence = Sequence(index, input_len, max(1, output_len), segments)
        self.sequences[index] = sequence
        engine = self._dispatcher.choose(sequence, str(self._session[index]))
        sequence.kv = self._make_machine(engine, sequence)
        self.engines[engine].submit(sequence)

    def _finished(self, sequence: Sequence) -> None:
        self._dispatcher.finished(sequence)
        self.arrivals.done(sequence.index)

    def _log(self, kind: Kind, index: int, a: int, b: int) -> None:
        self.log.add(self._clock.now_ps, kind, index, a, b)

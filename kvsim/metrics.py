"""From an event log to numbers: pure functions, each number defined beside its name."""

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsim.clock import PS_PER_MS, PS_PER_S
from kvsim.events import EventLog, Kind
from kvsim.workload.trace import Column

TOO_LONG = "longer than the KV cache of an instance"
"""The one reason for which a request is rejected."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles (linear interpolation) and mean of a sample; all None without one."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """A run in numbers; None where nothing was there to measure. Hit rates are tokens over prompt tokens, summed over
    the requests that were admitted and whose load, if any, had ended, each as of its first admission."""

    requests_completed: int
    requests_rejected: int
    requests_stopped: int
    """Those that a run that was stopped left unfinished, arrived or not."""
    rejected_reasons: dict[str, int]
    simulated_s: float
    """Makespan: from the start of the trace to the last completion, or to where the run was stopped."""
    hit_rate: float | None
    """Local and external together."""
    hit_rate_local: float | None
    """Found in the instance's own GPU cache."""
    hit_rate_external: float | None
    """Beyond that, what a load from the pool really left valid."""
    ttft_s: Spread
    """Arrival to first token."""
    tpot_ms: Spread
    """First token to completion, per output token after the first; requests of at least two."""
    e2e_s: Spread
    """Arrival to completion."""
    throughput_tokens_per_s: float | None
    """Prompt and output tokens of completed requests over the makespan."""
    throughput_tokens_per_s_per_gpu: float | None
    preemptions: int
    late_misses: int
    """Blocks that the pool promised and did not have when they were fetched."""


def measure(log: EventLog, num_gpus: int) -> Metrics:
    """The log of a whole run, in numbers."""
    requests = Requests(Events(log))
    makespan_s = requests.end_ps() / PS_PER_S
    throughput = requests.completed_tokens() / makespan_s if makespan_s else None
    local, external = requests.hit_rates()
    rejected = int(requests.is_rejected.sum())
    return Metrics(
        requests_completed=int(requests.is_finished.sum()),
        requests_rejected=rejected,
        requests_stopped=len(requests.events.of(Kind.STOPPED).request),
        rejected_reasons={TOO_LONG: rejected} if rejected else {},
        simulated_s=makespan_s,
        hit_rate=None if local is None or external is None else local + external,
        hit_rate_local=local,
        hit_rate_external=external,
        ttft_s=spread(requests.ttft_ps() / PS_PER_S),
        tpot_ms=spread(requests.tpot_ps() / PS_PER_MS),
        e2e_s=spread(requests.e2e_ps() / PS_PER_S),
        throughput_tokens_per_s=throughput,
        throughput_tokens_per_s_per_gpu=None if throughput is None else throughput / num_gpus,
        preemptions=len(requests.events.of(Kind.PREEMPTED).request),
        late_misses=int(requests.events.of(Kind.LOADED).b.sum()),
    )


def spread(sample: npt.NDArray[np.float64]) -> Spread:
    """How the sample spreads."""
    if not len(sample):
        return Spread(None, None, None, None)
    p50, p90, p99 = np.percentile(sample, (50, 90, 99)).tolist()
    return Spread(p50, p90, p99, float(sample.mean()))


@dataclass(frozen=True, slots=True)
class Columns:
    """Some events of a log, in its order; see `kvsim.events.Kind` for a and b."""

    time_ps: Column
    kind: Column
    request: Column
    a: Column
    b: Column


class Events:
    """A run's log as columns: a copy, so that the log may grow."""

    def __init__(self, log: EventLog | Columns) -> None:
        self.all = log if isinstance(log, Columns) else _columns(log.told())

    def of(self, kind: Kind) -> Columns:
        """The events of one kind."""
        chosen = self.all.kind == kind
        every = self.all
        return Columns(*(column[chosen] for column in (every.time_ps, every.kind, every.request, every.a, every.b)))


def to_the_last(log: EventLog) -> Events:
    """A log with what happened after the run was stopped, in which all that was in flight comes to its end."""
    return Events(_columns(log.rows))


def _columns(rows: "array[int]") -> Columns:
    return Columns(*np.array(rows, dtype=np.int64).reshape(-1, EventLog.WIDTH).T)


class Requests:
    """What a log says about each request that arrived, as columns by request number."""

    def __init__(self, events: Events) -> None:
        self.events = events
        arrived = events.of(Kind.ARRIVED)
        self._num_requests = int(arrived.request.max()) + 1 if len(arrived.request) else 0
        self.input_len = self._first(arrived.request, arrived.a)
        self.output_len = self._first(arrived.request, arrived.b)
        self.is_rejected = self.has(Kind.REJECTED)
        self.is_admitted = self.has(Kind.ADMITTED)
        self.is_finished = self.has(Kind.FINISHED)

    def end_ps(self) -> int:
        """The last completion, or where the run was stopped; it began at 0."""
        ends = (self.events.of(kind).time_ps.max(initial=0) for kind in (Kind.FINISHED, Kind.STOPPED))
        return int(max(ends))

    def completed_tokens(self) -> int:
        """Prompt and output tokens of the completed requests."""
        return int((self.input_len + self.output_len)[self.is_finished].sum())

    def hit_rates(self) -> tuple[float | None, float | None]:
        """Local and external hit tokens over prompt tokens."""
        admitted = self.events.of(Kind.ADMITTED)
        is_counted = (admitted.b == 0) | self.has(Kind.LOADED)[admitted.request]
        prompt_tokens = int(self.input_len[admitted.request][is_counted].sum())
        if not prompt_tokens:
            return None, None
        local, external = int(admitted.a[is_counted].sum()), int(self.external_hit_len()[is_counted].sum())
        return local / prompt_tokens, external / prompt_tokens

    def ttft_ps(self) -> Column:
        """Arrival to first token, of those that have one."""
        waited = self.time_ps(Kind.FIRST_TOKEN) - self.time_ps(Kind.ARRIVED)
        return waited[self.has(Kind.FIRST_TOKEN)]

    def tpot_ps(self) -> npt.NDArray[np.float64]:
        """Time per output token after the first, of completed requests with at least two."""
        decoded_ps = self.time_ps(Kind.FINISHED) - self.time_ps(Kind.FIRST_TOKEN)
        counted = self.is_finished & (self.output_len >= 2)
        per_token_ps: npt.NDArray[np.float64] = decoded_ps[counted] / (self.output_len[counted] - 1)
        return per_token_ps

    def e2e_ps(self) -> Column:
        """Arrival to completion, of those that completed."""
        return (self.time_ps(Kind.FINISHED) - self.time_ps(Kind.ARRIVED))[self.is_finished]

    def external_hit_len(self) -> Column:
        """Tokens that the load of each first admission left valid beyond the local hit, in the order of admissions; 0
        where nothing was granted."""
        admitted, loaded = self.events.of(Kind.ADMITTED), self.events.of(Kind.LOADED)
        valid_len = self._first(loaded.request, loaded.a)[admitted.request]
        return np.where(admitted.b > 0, np.maximum(valid_len - admitted.a, 0), 0)

    def time_ps(self, kind: Kind) -> Column:
        """When it first happened to each request; 0 where it never did."""
        events = self.events.of(kind)
        return self._first(events.request, events.time_ps)

    def has(self, kind: Kind) -> npt.NDArray[np.bool_]:
        """Whether it happened to each request."""
        return np.bincount(self.events.of(kind).request, minlength=self._num_requests) > 0

    def _first(self, request: Column, values: Column) -> Column:
        """The first value of each request; 0 where it has none."""
        found = np.zeros(self._num_requests, dtype=np.int64)
        found[request[::-1]] = values[::-1]
        return found

"""What is counted, the names it has outside, and the tally in which the threads of one half count it.

    threads of a half --add--> Tally --take, once a step--> Numbers --combine: ranks, halves, steps--> Prometheus, log

Integers until they are shown. Every series is made beforehand, so that what never happened is 0 and not absent.
"""

import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from kvcore.breaker import BreakerState
from kvcore.group_runs import count_blocks
from kvcore.plans import Decisions, Lookup
from kvcore.ports import StoreOutcome

Series: TypeAlias = str
"""A metric and the values of its labels, as in "keys:load:ok"."""

Numbers: TypeAlias = dict[Series, Any]
"""An int per series of a counter or a gauge, a list of nanoseconds per series of a histogram. Survives msgpack."""

PREFIX = "vllm:kvtwin_"
"""vLLM removes what begins with "vllm:" from its registry before it makes an engine anew."""

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds, for lookups of half a millisecond to stores that wait for the store deadline."""

MAX_EVENTS = 100_000
"""What a tally keeps while nobody takes it; then the oldest are dropped."""


class Operation(Enum):
    """What the threads do."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class Kind(Enum):
    """How a metric's numbers add up: a counter's and a histogram's do, of a gauge's the largest counts."""

    COUNTER = "counter"
    GAUGE = "gauge"
    SECONDS = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `labels` are its own labels, each with all the values it may have."""

    kind: Kind
    name: str
    text: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def full_name(self) -> str:
        """As it is registered."""
        return PREFIX + self.name

    @property
    def sample_names(self) -> list[str]:
        """As queries name it."""
        endings = ("_bucket", "_sum", "_count") if self.kind is Kind.SECONDS else ("",)
        return [self.full_name + ending for ending in endings]

    def of(self, *values: str) -> Series:
        """The series with these values of the labels."""
        return ":".join((self.name, *values))

    def all_values(self) -> list[tuple[str, ...]]:
        """The label values of every series."""
        return list(itertools.product(*(values for _, values in self.labels)))


_OPERATION = ("operation", tuple(operation.value for operation in Operation))
_MOVE = ("operation", (Operation.LOAD.value, Operation.STORE.value))
_OUTCOME = ("outcome", tuple(outcome.value for outcome in StoreOutcome))
_TIER = ("tier", ("local", "pool", "sibling", "computed"))

PROMPT_TOKENS = Metric(
    Kind.COUNTER,
    "prompt_tokens_total",
    "Prompt tokens, at a request's first step, by where their KV is from.",
    (_TIER,),
)
LOOKUPS = Metric(Kind.COUNTER, "lookups_total", "Lookups that were begun.")
ROUNDS = Metric(Kind.COUNTER, "lookup_rounds_total", "Questions to the pool, of lookups that ended.")
LATE_LOOKUPS = Metric(Kind.COUNTER, "late_lookups_total", "Lookups that had not ended by their deadline.")
LATE_ANSWERS = Metric(Kind.COUNTER, "late_answers_total", "Answers and reports that nobody waited for any more.")
LATE_MISSES = Metric(Kind.COUNTER, "late_misses_total", "Blocks that a lookup promised and the load did not deliver.")
REJECTED = Metric(
    Kind.COUNTER, "rejected_blocks_total", "Blocks of closed requests that were to be stored and are not."
)
KEYS = Metric(
    Kind.COUNTER, "keys_total", "Keys asked, loaded or stored, by what became of them.", (_OPERATION, _OUTCOME)
)
BYTES = Metric(Kind.COUNTER, "bytes_total", "Bytes of the blocks that were loaded or stored.", (_MOVE,))
DURATION = Metric(
    Kind.SECONDS,
    "operation_seconds",
    "From asking for a lookup, load or store to its end, waiting included.",
    (_OPERATION,),
)
PINNED = Metric(
    Kind.GAUGE, "pinned_blocks", "Blocks of the engine's cache that stores under way keep from being freed."
)
MAX_PINNED = Metric(Kind.GAUGE, "max_pinned_blocks", "How many blocks stores under way may keep from being freed.")
WAITING = Metric(
    Kind.GAUGE, "waiting_jobs", "Lookups, loads and stores whose thread has not begun them.", (_OPERATION,)
)
BREAKER = Metric(
    Kind.GAUGE,
    "breaker_state",
    "Whether this half asks the pool: 0 closed, it does; 1 half open, it probes; 2 open, it does not.",
    (("half", ("scheduler", "worker")),),
)
SWITCHED_OFF = Metric(
    Kind.GAUGE,
    "switched_off",
    "1 while the control file switches this use of the pool off.",
    (("use", ("reads", "writes")),),
)
CONTROL_REFUSED = Metric(
    Kind.GAUGE,
    "control_refused",
    "1 while the control file is not understood, and what it said before holds.",
)
UNRECORDED = Metric(
    Kind.COUNTER, "unrecorded_requests_total", "Requests that ended and are not in the decision log, which is on."
)

METRICS = (
    PROMPT_TOKENS, LOOKUPS, ROUNDS, LATE_LOOKUPS, LATE_ANSWERS, LATE_MISSES, REJECTED, KEYS, BYTES, DURATION, PINNED,
    MAX_PINNED, WAITING, BREAKER, SWITCHED_OFF, CONTROL_REFUSED, UNRECORDED,
)  # fmt: skip

METRIC_OF = {metric.of(*values): metric for metric in METRICS for values in metric.all_values()}
"""The metric of every series there is."""

BREAKER_LEVEL = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
"""So that of several ranks the one that is worst off counts."""


GAUGE_STEPS = 16
"""Gauges that were all 0 are read once in so many steps in which nothing was counted: reading them costs."""


class Tally:
    """What one half counted since it was last taken. Any thread adds; one thread takes.

    Without a lock: an event is one append to a deque, which is atomic.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Series, int]] = deque(maxlen=MAX_EVENTS)
        self._gauges: list[tuple[Series, Callable[[], int]]] = []
        self._raised: set[Series] = set()
        self._num_unread = 0

    def watch(self, gauge: Series, level: Callable[[], int]) -> None:
        """Read this gauge when what was counted is taken: while something is, or one is not 0, and now and then."""
        self._gauges.append((gauge, level))

    def add(self, series: Series, amount: int) -> None:
        """Count `amount`, or note a duration of so many nanoseconds."""
        if amount > 0:
            self._events.append((series, amount))

    def prompt(self, request: Any, local_hit_len: int, granted_len: int) -> None:
        """A request takes its first step: what loads have really left it counts, not what was granted.

        Beyond `granted_len`, up to which cache and pool were to fill its blocks, another connector did.
        """
        prompt_len = request.num_prompt_tokens
        resume_len = min(request.num_computed_tokens, prompt_len)
        self.add(PROMPT_TOKENS.of("local"), min(local_hit_len, resume_len))
        self.add(PROMPT_TOKENS.of("pool"), min(granted_len, resume_len) - local_hit_len)
        self.add(PROMPT_TOKENS.of("sibling"), resume_len - max(granted_len, local_hit_len))
        self.add(PROMPT_TOKENS.of("computed"), prompt_len - resume_len)

    def answered(self, lookup: Lookup, asked_ns: int, now_ns: int) -> None:
        """A lookup ended."""
        self.add(ROUNDS.of(), lookup.dialogue.rounds)
        self.add(DURATION.of(Operation.LOOKUP.value), now_ns - asked_ns)

    def keys(self, operation: Operation, outcomes: Sequence[StoreOutcome]) -> None:
        """What became of keys; OK comes first in the enumeration, and is mostly all there is."""
        left = len(outcomes)
        for outcome in StoreOutcome:
            if not left:
                return
            count = outcomes.count(outcome)
            self.add(KEYS.of(operation.value, outcome.value), count)
            left -= count

    def moved(self, operation: Operation, size_bytes: int, took_ns: int) -> None:
        """A load or store ended."""
        self.add(BYTES.of(operation.value), size_bytes)
        self.add(DURATION.of(operation.value), took_ns)

    def closed(self, decisions: Decisions) -> None:
        """The last plan of a request ended."""
        self.add(LATE_LOOKUPS.of(), decisions.late_lookups)
        self.add(LATE_ANSWERS.of(), decisions.late_answers)
        self.add(LATE_MISSES.of(), decisions.late_misses)
        self.add(REJECTED.of(), count_blocks(decisions.rejected))

    def take(self) -> Numbers:
        """What was counted since the last call, and of the gauges what is not 0 or was not then."""
        if not self._events and not self._raised and 0 < self._num_unread < GAUGE_STEPS:
            self._num_unread += 1
            return {}
        self._num_unread = 1
        taken: Numbers = {}
        while self._events:
            series, amount = self._events.popleft()
            value = [amount] if METRIC_OF[series].kind is Kind.SECONDS else amount
            taken[series] = taken[series] + value if series in taken else value
        for series, read in self._gauges:
            level = read()
            if level:
                taken[series] = level
                self._raised.add(series)
            elif series in self._raised:
                taken[series] = level
                self._raised.remove(series)
        return taken


_COMBINE: dict[Kind, Callable[[Any, Any], Any]] = {
    Kind.COUNTER: operator.add,
    Kind.GAUGE: max,
    Kind.SECONDS: operator.add,
}


def combine(left: Numbers, right: Numbers) -> Numbers:
    """The numbers of two ranks, halves or steps as one; both stay as they are."""
    both = dict(left)
    for series, value in right.items():
        both[series] = _COMBINE[METRIC_OF[series].kind](both[series], value) if series in both else value
    return both


def summary(numbers: Numbers) -> dict[str, int | float]:
    """For a line in the log; of durations their number, mean and maximum."""
    short: dict[str, int | float] = {}
    for series, value in sorted(numbers.items()):
        if METRIC_OF[series].kind is not Kind.SECONDS:
            short[series] = value
            continue
        name = series.replace("seconds", "ms")
        mean_ms, max_ms = sum(value) / len(value) / 1e6, max(value) / 1e6
        short |= {f"{name}:count": len(value), f"{name}:mean": round(mean_ms, 3), f"{name}:max": round(max_ms, 3)}
    return short

"""Whether a pool that does not answer is asked: a circuit breaker as a value machine.

    CLOSED --failures in a row--> OPEN --begin_probe--> HALF_OPEN --probe_answered--> CLOSED
                                   ^                        |
                                   +----- probe_failed -----+

Source: Nygard, "Release It!", 2007, pattern "Circuit Breaker". There a half-open breaker lets a user's call through as
the probe; here the driver probes by itself, so that no request pays for it and none is needed.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcore.access import ALL_ACCESS, NO_ACCESS, Access
from kvcore.errors import require
from kvcore.units import NS_PER_MS


class BreakerState(Enum):
    """See the picture above. Only a closed breaker lets calls through."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Attempt(NamedTuple):
    """A call that was let through, in the `era`-th time that the breaker was closed."""

    era: int
    begun_ns: int


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is put up with.

    It opens when `max_failures` calls in a row have failed, the first of which began `min_silence_ns` ago or earlier:
    many calls that are short of time at once say nothing about the pool. The first probe comes `first_probe_ns` later.
    Each one in vain doubles the wait, up to `max_probe_ns`.
    """

    max_failures: int = 3
    min_silence_ns: int = 100 * NS_PER_MS
    first_probe_ns: int = 1_000 * NS_PER_MS
    max_probe_ns: int = 10_000 * NS_PER_MS

    def __post_init__(self) -> None:
        require(self.max_failures > 0, "max_failures", self.max_failures, "at least 1")
        require(self.min_silence_ns >= 0, "min_silence_ns", self.min_silence_ns, "at least 0")
        require(self.first_probe_ns > 0, "first_probe_ns", self.first_probe_ns, "more than 0")
        bound = f"at least first_probe_ns, {self.first_probe_ns}"
        require(self.max_probe_ns >= self.first_probe_ns, "max_probe_ns", self.max_probe_ns, bound)


@dataclass(slots=True)
class Breaker:
    """The driver asks `begin` before each call and reports how it ended; a report from before it opened is late, and
    changes nothing. While it is open, the driver probes at `probe_at_ns`.

    After a probe a single failure opens it again, and the wait goes on doubling until a call succeeds: a pool that only
    answers probes is not asked for long.
    """

    tolerance: Tolerance = field(default_factory=Tolerance)
    state: BreakerState = BreakerState.CLOSED
    probe_at_ns: int | None = None
    _era: int = 0
    _num_failures: int = 0
    _silent_since_ns: int | None = None
    _wait_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self._wait_ns = self.tolerance.first_probe_ns

    @property
    def access(self) -> Access:
        """What requests may plan: nothing unless it is closed."""
        return ALL_ACCESS if self.state is BreakerState.CLOSED else NO_ACCESS

    def begin(self, now_ns: int) -> Attempt | None:
        """A call is to be made; None when it must not be."""
        return Attempt(self._era, now_ns) if self.state is BreakerState.CLOSED else None

    def succeeded(self, attempt: Attempt) -> None:
        """The pool answered, whatever the answer was."""
        if self._counts(attempt):
            self._num_failures, self._silent_since_ns = 0, None
            self._wait_ns = self.tolerance.first_probe_ns

    def failed(self, attempt: Attempt, now_ns: int) -> None:
        """The pool did not answer, or not in time."""
        if not self._counts(attempt):
            return
        self._num_failures += 1
        since_ns = attempt.begun_ns if self._silent_since_ns is None else min(self._silent_since_ns, attempt.begun_ns)
        self._silent_since_ns = since_ns
        silent = now_ns - since_ns >= self.tolerance.min_silence_ns
        if silent and self._num_failures >= self.tolerance.max_failures:
            self.lost(now_ns)

    def lost(self, now_ns: int) -> None:
        """The pool is known not to be there: no call needs to fail first."""
        if self.state is BreakerState.CLOSED:
            self._era += 1
            self._open(now_ns)

    def begin_probe(self, now_ns: int) -> None:
        """The driver asks the pool something that no request waits for."""
        assert self.state is BreakerState.OPEN, self.state
        assert self.probe_at_ns is not None and self.probe_at_ns <= now_ns, (self.probe_at_ns, now_ns)
        self.state, self.probe_at_ns = BreakerState.HALF_OPEN, None

    def probe_answered(self) -> None:
        """The pool is there."""
        assert self.state is BreakerState.HALF_OPEN, self.state
        self.state = BreakerState.CLOSED
        self._num_failures, self._silent_since_ns = self.tolerance.max_failures - 1, None

    def probe_failed(self, now_ns: int) -> None:
        """It is still not there."""
        assert self.state is BreakerState.HALF_OPEN, self.state
        self._open(now_ns)

    def _counts(self, attempt: Attempt) -> bool:
        return self.state is BreakerState.CLOSED and attempt.era == self._era

    def _open(self, now_ns: int) -> None:
        self.state, self.probe_at_ns = BreakerState.OPEN, now_ns + self._wait_ns
        self._wait_ns = min(2 * self._wait_ns, self.tolerance.max_probe_ns)

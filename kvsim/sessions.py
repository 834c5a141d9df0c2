"""Sessions of a trace as the pool's users name them: what they pin, and when they are over."""

from collections import Counter
from collections.abc import Sequence

from kvcore.hints import NO_HINTS, Hints, Pin
from kvsim.workload.trace import Trace


class Sessions:
    """Who is in which session, and how many of its requests are still to complete.

    The user ends a session, so it is known when its last request has completed and not before. Requests that do not
    fit an engine (`capacity_tokens`) are rejected and do not count. Sessions take the `priorities` in turn.
    """

    def __init__(
        self, trace: Trace, capacity_tokens: int, pin: Pin, ttl_ns: int | None, priorities: Sequence[int] = (0,)
    ) -> None:
        self._session = trace.session.tolist()
        self._pin = pin
        self._ttl_ns = ttl_ns
        self._priorities = priorities
        fits = trace.input_len + trace.output_len.clip(min=1) <= capacity_tokens
        self._open = Counter(trace.session[fits].tolist())

    def hints(self, request: int) -> Hints:
        """What a request says about what it stores."""
        session = self._session[request]
        priority = self._priorities[session % len(self._priorities)]
        if self._pin is Pin.NONE:
            return Hints(priority=priority) if priority else NO_HINTS
        return Hints(str(session), self._pin, self._ttl_ns, priority)

    def finished(self, request: int) -> str | None:
        """A request has completed; the name of its session, if that is over now and had pinned anything."""
        session = self._session[request]
        self._open[session] -= 1
        return str(session) if not self._open[session] and self._pin is not Pin.NONE else None

"""The log of what happened: the result of a simulation. Everything reported is a pure function of it."""

import hashlib
from array import array
from enum import IntEnum

from kvsim.rows import TooLong
from kvsim.usage import Usage


class Kind(IntEnum):
    """What happened to a request; `a` and `b` are what the event carries."""

    ARRIVED = 0
    """a: input_len, b: output_len (tokens)."""
    REJECTED = 1
    """It can never fit. a: tokens it needs, b: tokens the cache holds."""
    ADMITTED = 2
    """First admission. a: local hit, b: external hit that was granted (tokens)."""
    LOADED = 3
    """A load ended. a: tokens valid now, b: blocks that were promised and absent."""
    FIRST_TOKEN = 4
    """The first generated token. a, b: 0."""
    PREEMPTED = 5
    """a: tokens computed that are lost, b: 0."""
    STORED = 6
    """A store ended. a: blocks written, b: blocks rejected."""
    FINISHED = 7
    """a: output_len, b: instance."""
    STOPPED = 8
    """The run ended before it did. a: 1 if it had arrived, else 0; b: 0."""


class EventLog:
    """Events in the order they happened, as one flat array of (time_ps, kind, request, a, b).

    A run that is stopped ends there: its log tells of nothing later. What was in flight still comes to its end, so that
    all of it can be accounted for; these events are kept behind the others.

    `usage` is what the machines did meanwhile; it depends on how a simulation is computed, and is in no digest.
    """

    WIDTH = 5

    def __init__(self) -> None:
        self.rows = array("q")
        """All of them, those after the end included."""
        self._end: int | None = None
        self.usage = Usage()

    def add(self, time_ps: int, kind: Kind, request: int, a: int = 0, b: int = 0) -> None:
        """Append one event; raises TooLong."""
        try:
            self.rows.extend((time_ps, kind, request, a, b))
        except OverflowError:
            raise TooLong(time_ps) from None

    def end(self) -> None:
        """The run ends here."""
        assert self._end is None
        self._end = len(self.rows)

    def told(self) -> "array[int]":
        """The events of the run."""
        return self.rows[: self._end]

    def __len__(self) -> int:
        return (len(self.rows) if self._end is None else self._end) // self.WIDTH

    def digest(self) -> str:
        """16 hex digits over every event of the run."""
        return hashlib.sha256(self.told().tobytes()).hexdigest()[:16]

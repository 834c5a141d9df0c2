"""BurstGPT: a CSV file of lengths, with sessions from its version 2 on.

`Timestamp` (never decreasing) and `Elapsed time` (until the answer was complete) in s, `Session ID` (of conversations;
empty for the API), `Model`, `Request tokens`, `Response tokens`, `Total tokens` (their sum), `Log Type` ("Conversation
log" or "API log"). Version 1 has neither session nor elapsed time. Source: github.com/HPMLL/BurstGPT (CC-BY-4.0).

What starts when
- A row without a session is a session of its own and starts at its timestamp, counted from the first row's.
- A session's first request starts so, too. Each later one waits for the one before it; the pause is the recorded one,
  from that one's end (the whole gap where no elapsed time is recorded) to its own start, at least 0.
- A request that failed is recorded with no response: it is a request that generates nothing.

Which content is whose
- The trace has lengths only, so this is a rule: a conversation grows. A prompt at least as long as prompt and answer
  before it in its session begins with them. A shorter one is new content, as everything without a session is.
- Whatever model a row names: one model is simulated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from kvsim.workload import table
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, PS_PER_S, Row
from kvsim.workload.timeline import Timeline
from kvsim.workload.trace import Trace

FORMAT = "burstgpt"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

GRANULE_LEN = 16
"""The source has no ids; this is vLLM's default block."""
LENGTHS = ("Request tokens", "Response tokens", "Total tokens")
HEADERS = (
    ("Timestamp", "Model", *LENGTHS, "Log Type"),
    ("Timestamp", "Session ID", "Elapsed time", "Model", *LENGTHS, "Log Type"),
)
NUMBERS = ("Timestamp", "Elapsed time", *LENGTHS)
SIGN = frozenset(LENGTHS)
"""Names that only this format has at the beginning of a file."""
CONVERSATION, API = "Conversation log", "API log"


def read(path: Path, unit_ps: int = PS_PER_S) -> Trace:
    """The trace in `path` (CSV, plain or gzip), times in `unit_ps`; raises TraceError at the first bad row."""
    log = _Log(unit_ps)
    timeline = Timeline("Timestamp", unit_ps)
    for row in table.rows(path, HEADERS, NUMBERS):
        log.add(row, timeline.number_ps(row))
    return log.builder.build(path.name, FORMAT, GRANULE_LEN)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A session's last request."""

    session: int
    index: int
    end_ps: int
    stream: int
    total_len: int


@dataclass(slots=True)
class _Log:
    """Collects requests row by row."""

    unit_ps: int
    builder: TraceBuilder = field(default_factory=TraceBuilder)
    last_turns: dict[object, _Turn] = field(default_factory=dict)
    sessions: Iterator[int] = field(default_factory=count)

    def add(self, row: Row, start_ps: int) -> None:
        """One request."""
        row.choice("Log Type", (CONVERSATION, API))
        name = row.values.get("Session ID") if row.values["Log Type"] == CONVERSATION else None
        last = self.last_turns.get(name) if name else None
        index = len(self.builder)
        session = next(self.sessions) if last is None else last.session
        if last is None:
            self.builder.start(start_ps, None, 0, session)
        else:
            self.builder.start(start_ps, last.index, max(0, start_ps - last.end_ps), session)
        stream, total_len = self._hold(row, last)
        if name:
            end_ps = start_ps + self._elapsed_ps(row)
            self.last_turns[name] = _Turn(session, index, end_ps, stream, total_len)

    def _hold(self, row: Row, last: _Turn | None) -> tuple[int, int]:
        """The content of the request just started; its stream, and prompt and answer in tokens."""
        input_len = row.tokens("Request tokens", at_least=1)
        output_len = row.tokens("Response tokens", at_least=0)
        total_len = input_len + output_len
        if row.tokens("Total tokens", at_least=1) != total_len:
            raise row.error("Total tokens", f"{total_len}, the sum of Request tokens and Response tokens")
        grows = last is not None and input_len >= last.total_len
        stream = last.stream if last is not None and grows else len(self.builder) - 1
        self.builder.hold(input_len, output_len, [(stream, input_len)], stream, num_granules=input_len // GRANULE_LEN)
        return stream, total_len

    def _elapsed_ps(self, row: Row) -> int:
        if row.values["Elapsed time"] == "":
            return 0
        return round(row.number("Elapsed time", below=MAX_SPAN_S * PS_PER_S // self.unit_ps) * self.unit_ps)

"""Claude Code sessions: one JSON file each, closed loop, content ids per 64 tokens of prompt, local to the session.

A session's `requests` are in order of `t` (s), of two kinds. A request (`type` "n" or "s") has `in` and `out` tokens,
`hash_ids` with floor(in / 64) ids, and where recorded `api_time` and `think_time` (s). A group (`type` "subagent") has
`duration_ms` and `requests` of its own, whose `t` counts from the group's start; its own `t` is its end.
Source: github.com/callanjfox/kv-cache-tester.

What starts when
- Every session starts at 0 with its first request. Every other request waits for one request and a pause.
- A request waits for the one before it in its conversation. The pause is `think_time`; where that is absent, the gap
  from start to start minus the predecessor's `api_time`. Where the predecessor has no `api_time` its end is unknown,
  `think_time` counts from an older request's end, and the pause is the whole gap.
- A group starts at t - duration_ms, after the last request of its conversation that was recorded to start before that.
- A request waits for the groups its predecessor started: for the last request of the one that was recorded to end
  last, with the recorded pause. Groups of older requests ran in the background: nobody waits for them.

Which content is whose
- Ids are content, whatever `model` a row names: one model is simulated.
- Tokens after the last id, and what a request generates, are content of their own: the trace names neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, PS_PER_S, Row, parse_row, trace_error
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.trace import Trace

FORMAT = "claude-code"
VERSION = 1
"""Counts changes of what `read` makes of the same files; cached traces of another version are read again."""

GRANULE_LEN = 64
SIGN = frozenset({"block_size", "hash_id_scope", "requests"})
"""Names that tell this format at the beginning of a file."""
SUFFIXES = (".json", ".json.gz")
PS_PER_MS = PS_PER_S // 1_000


def session_files(path: Path) -> list[Path]:
    """The file itself, or the sessions of a folder in the order of their names, at least one."""
    try:
        if not path.is_dir():
            return [path]
        found = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    except OSError as error:
        raise files.unreadable(f"{path}:1", error) from None
    if not found:
        raise trace_error(f"{path}:1", "folder", "no session in it", "files named *.json or *.json.gz")
    return found


def read(path: Path, unit_ps: int = PS_PER_S) -> Trace:
    """The trace of a session's file or of a folder of them; raises TraceError at the first request that is wrong.

    `unit_ps` is what `t`, `api_time` and `think_time` count; `duration_ms` names its own unit.
    """
    builder = TraceBuilder()
    streams = count()
    for number, file in enumerate(session_files(path)):
        head = parse_row(f"{file}:1", files.content(file))
        head.choice("block_size", (GRANULE_LEN,))
        head.choice("hash_id_scope", ("local",))
        try:
            _Session(builder, number, streams, PrefixTree(streams), unit_ps).add(head)
        except RecursionError:
            raise head.error("requests", "groups of subagents that are nested less deeply") from None
    return builder.build(path.name, FORMAT, GRANULE_LEN)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request in the builder, and what was recorded of its time, from the start of the session."""

    index: int
    start_ps: int
    service_ps: int | None

    @property
    def end_ps(self) -> int:
        """Recorded end; the start where none is recorded."""
        return self.start_ps + (self.service_ps or 0)


@dataclass(frozen=True, slots=True)
class _Session:
    """Adds the requests of one session; its ids mean something only inside it, hence a tree of its own."""

    builder: TraceBuilder
    number: int
    streams: Iterator[int]
    tree: PrefixTree
    unit_ps: int

    def add(self, head: Row) -> None:
        """The whole session, its first request at 0."""
        rows = _requests(head, f"{head.where.removesuffix(':1')}:request ")
        self._converse(rows, -self._time_ps(rows[0], "t"), starter=None)

    def _converse(self, rows: list[Row], origin_ps: int, starter: _Request | None) -> _Request:
        """Rows that follow each other, their `t` counted from origin_ps; returns the last request."""
        past: list[_Request] = []
        awaited = starter
        last_ps = 0
        for row in rows:
            row.choice("type", ("n", "s", "subagent") if past else ("n", "s"))
            at_ps = self._time_ps(row, "t")
            if at_ps < last_ps:
                raise row.error("t", "at least the t of the row before it")
            last_ps = at_ps
            if row.values["type"] != "subagent":
                awaited = self._request(row, origin_ps + at_ps, awaited, past)
                past.append(awaited)
                continue
            group_starter, group_last = self._group(row, origin_ps + at_ps, past)
            if group_starter is past[-1]:
                awaited = max(awaited or group_last, group_last, key=lambda request: request.end_ps)
        return past[-1]

    def _group(self, row: Row, end_ps: int, past: list[_Request]) -> tuple[_Request, _Request]:
        """A subagent's conversation, started by one of the `past` requests; returns that one and its own last."""
        start_ps = end_ps - round(row.number("duration_ms", below=MAX_SPAN_S * 1_000) * PS_PER_MS)
        starter = next((request for request in reversed(past) if request.start_ps <= start_ps), None)
        if starter is None:
            raise row.error("duration_ms", "a group that starts (t - duration_ms) after its session's first request")
        rows = _requests(row, f"{row.where}.")
        last = self._converse(rows, start_ps, starter)
        if last.start_ps > end_ps:
            raise rows[-1].error("t", "a start within its group's duration_ms")
        return starter, last

    def _request(self, row: Row, start_ps: int, awaited: _Request | None, past: list[_Request]) -> _Request:
        """One request that was recorded to start at start_ps and waits for `awaited`."""
        index = len(self.builder)
        service_ps = self._time_ps(row, "api_time") if "api_time" in row.values else None
        think_ps = self._time_ps(row, "think_time") if "think_time" in row.values else None
        if awaited is None:
            self.builder.start(start_ps, None, 0, self.number)
        else:
            pause_ps = max(0, start_ps - awaited.end_ps)
            if think_ps is not None and awaited in past[-1:] and awaited.service_ps is not None:
                pause_ps = think_ps
            self.builder.start(start_ps, awaited.index, pause_ps, self.number)
        self._hold(row)
        return _Request(index, start_ps, service_ps)

    def _hold(self, row: Row) -> None:
        """The content of the request just started."""
        input_len = row.tokens("in", at_least=1)
        output_len = row.tokens("out", at_least=0)
        ids = row.ids("hash_ids", input_len // GRANULE_LEN, "floor(in / 64)")
        own_stream = next(self.streams)
        self.builder.hold_granules(input_len, output_len, GRANULE_LEN, self.tree.follow(ids), own_stream)

    def _time_ps(self, row: Row, field: str) -> int:
        return round(row.number(field, below=MAX_SPAN_S * PS_PER_S // self.unit_ps) * self.unit_ps)


def _requests(row: Row, place: str) -> list[Row]:
    """The rows of a session or a group; at least one."""
    rows = row.rows("requests", place)
    if not rows:
        raise row.error("requests", "at least one request")
    return rows

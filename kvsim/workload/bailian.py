"""Bailian's traces of Qwen: one JSON object a line, open loop, content ids per 16 tokens of prompt, and sessions.

`timestamp` s (never decreasing), `input_length`, `output_length` tokens, `hash_ids` with ceil(input_length / 16) ids,
the last of which may name fewer than 16 tokens; `chat_id` of the request, `parent_chat_id` of the one it continues, -1
where it begins; its `turn` and its `type` (text, search, image, file and others), which change nothing here.
Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0).

- A row starts at its timestamp, counted from the first row's: when an answer was complete is not recorded.
- A request is of its parent's session. A parent that no row before it has is of before the recording.
- Ids are content in the whole file. What a request generates is content of its own: the trace does not name it.
"""

from itertools import count
from pathlib import Path

from kvcore.units import div_ceil
from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_TOKENS, PS_PER_S, Row, parse_row, trace_error
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.timeline import Timeline
from kvsim.workload.trace import Trace

FORMAT = "bailian"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

GRANULE_LEN = 16
FIELDS = (
    "chat_id",
    "parent_chat_id",
    "timestamp",
    "input_length",
    "output_length",
    "type",
    "turn",
    "hash_ids",
)
SIGN = frozenset({"chat_id", "parent_chat_id"})
"""Names that only this format has at the beginning of a file."""
ROOT = -1


def read(path: Path, unit_ps: int = PS_PER_S) -> Trace:
    """The trace in `path` (JSON lines, plain or gzip), times in `unit_ps`; raises TraceError at the first bad row."""
    streams = count()
    tree = PrefixTree(streams)
    builder = TraceBuilder()
    timeline = Timeline("timestamp", unit_ps)
    sessions = _Sessions()
    for number, line in files.lines(path):
        row = parse_row(f"{path}:{number}", line)
        row.only(FIELDS)
        builder.start(timeline.number_ps(row), after=None, delay_ps=0, session=sessions.of(row))
        input_len = row.tokens("input_length", at_least=1)
        output_len = row.tokens("output_length", at_least=0)
        ids = row.ids("hash_ids", div_ceil(input_len, GRANULE_LEN), "ceil(input_length / 16)")
        own_stream = next(streams)
        builder.hold_granules(input_len, output_len, GRANULE_LEN, tree.follow(ids), own_stream)
        row.once(line)
    if not len(builder):
        raise trace_error(f"{path}:1", "file", "no rows", "one JSON object a line")
    return builder.build(path.name, FORMAT, GRANULE_LEN)


class _Sessions:
    """Numbers of sessions, by the requests that they hold."""

    __slots__ = ("_number_of", "_numbers")

    def __init__(self) -> None:
        self._numbers = count()
        self._number_of: dict[int, int] = {}

    def of(self, row: Row) -> int:
        """The session of the row's request."""
        chat = row.tokens("chat_id", at_least=0)
        if chat in self._number_of:
            raise row.error("chat_id", "one that no row before it has")
        if type(row.values.get("type")) is not str:
            raise row.error("type", "a text")
        row.tokens("turn", at_least=1)
        number = self._number_of.get(_parent(row))
        self._number_of[chat] = next(self._numbers) if number is None else number
        return self._number_of[chat]


def _parent(row: Row) -> int:
    value = row.values.get("parent_chat_id")
    if type(value) is not int or not ROOT <= value < MAX_TOKENS:
        raise row.error("parent_chat_id", "a chat_id, or -1 where a conversation begins")
    return value

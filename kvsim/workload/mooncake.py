"""Mooncake's trace format: one JSON object a line, open loop, content ids per 512 tokens of prompt.

`timestamp` ms (never decreasing), `input_length`, `output_length` tokens, `hash_ids` with ceil(input_length / 512) ids,
the last of which may name fewer than 512 tokens. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.

A row is a session of its own and starts at its timestamp, counted from the first row's. What a request generates is
content of its own: the trace does not say how a later prompt holds it.
"""

from itertools import count
from pathlib import Path

from kvcore.units import div_ceil
from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, PS_PER_S, Row, parse_row, trace_error
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.trace import Trace

FORMAT = "mooncake"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

GRANULE_LEN = 512
PS_PER_MS = PS_PER_S // 1_000
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
SIGN = frozenset({"timestamp", "input_length", "output_length"})
"""Names that only this format has at the beginning of a file."""
MAX_TIMESTAMP_MS = 2**53
"""Bound up to which a JSON number is an exact millisecond."""


def read(path: Path) -> Trace:
    """The trace in `path` (JSON lines, plain or gzip); raises TraceError at the first row that breaks the format."""
    streams = count()
    tree = PrefixTree(streams)
    builder = TraceBuilder()
    start_ms = last_ms = None
    for number, line in files.lines(path):
        row = parse_row(f"{path}:{number}", line)
        now_ms = row.number("timestamp", below=MAX_TIMESTAMP_MS)
        if start_ms is None or last_ms is None:
            start_ms = last_ms = now_ms
        if now_ms < last_ms:
            raise row.error("timestamp", f"at least the previous row's {last_ms}")
        if now_ms - start_ms >= MAX_SPAN_S * 1_000:
            raise row.error("timestamp", f"less than {MAX_SPAN_S} s after the first row's {start_ms}")
        last_ms = now_ms
        builder.start(round((now_ms - start_ms) * PS_PER_MS), after=None, delay_ps=0, session=len(builder))
        _add_content(builder, row, tree, next(streams))
        if line.count(b'"') != 2 * len(FIELDS):  # in a row as it should be, nothing but names is quoted
            raise trace_error(row.where, "JSON", "a field twice", "each field once")
    if not len(builder):
        raise trace_error(f"{path}:1", "file", "no rows", "one JSON object a line")
    return builder.build(path.name, FORMAT, GRANULE_LEN)


def _add_content(builder: TraceBuilder, row: Row, tree: PrefixTree, output_stream: int) -> None:
    input_len = row.tokens("input_length", at_least=1)
    output_len = row.tokens("output_length", at_least=0)
    ids = row.ids("hash_ids", div_ceil(input_len, GRANULE_LEN), "ceil(input_length / 512)")
    for field in row.values:
        if field not in FIELDS:
            raise row.error(field, f"only the fields {', '.join(FIELDS)}")
    segments = [(stream, min(end * GRANULE_LEN, input_len)) for stream, end in tree.follow(ids)]
    builder.hold(input_len, output_len, segments, output_stream, num_granules=len(ids))

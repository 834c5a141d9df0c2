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
from kvsim.workload.fields import TIME_UNITS, Row, parse_row, trace_error
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.timeline import Timeline
from kvsim.workload.trace import Trace

FORMAT = "mooncake"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

GRANULE_LEN = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
SIGN = frozenset({"timestamp", "input_length", "output_length"})
"""Names that tell this format at the beginning of a file."""


def read(path: Path, unit_ps: int = TIME_UNITS["ms"]) -> Trace:
    """The trace in `path` (JSON lines, plain or gzip), times in `unit_ps`; raises TraceError at the first bad row."""
    streams = count()
    tree = PrefixTree(streams)
    builder = TraceBuilder()
    timeline = Timeline("timestamp", unit_ps)
    for number, line in files.lines(path):
        row = parse_row(f"{path}:{number}", line)
        row.only(FIELDS)
        builder.start(timeline.number_ps(row), after=None, delay_ps=0, session=len(builder))
        _add_content(builder, row, tree, next(streams))
        row.once(line)
    if not len(builder):
        raise trace_error(f"{path}:1", "file", "no rows", "one JSON object a line")
    return builder.build(path.name, FORMAT, GRANULE_LEN)


def _add_content(builder: TraceBuilder, row: Row, tree: PrefixTree, output_stream: int) -> None:
    input_len = row.tokens("input_length", at_least=1)
    output_len = row.tokens("output_length", at_least=0)
    ids = row.ids("hash_ids", div_ceil(input_len, GRANULE_LEN), "ceil(input_length / 512)")
    builder.hold_granules(input_len, output_len, GRANULE_LEN, tree.follow(ids), output_stream)

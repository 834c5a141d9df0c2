"""KVCache.AI's kvcache-simulator: one JSON object a line, content ids per `block_size` tokens of prompt.

`block_size` tokens (the same in every row), `input_length`, `hash_ids`: one for each block, or for each whole block, of
the prompt. `output_length` and `timestamp` (never decreasing) may be missing, the latter in all rows or in none.
Source: github.com/kvcache-ai/kvcache-blog, packages/kvcache-simulator.

- Their simulator reads no time, and fixes no unit: a file with timestamps needs one from its reader. Without them all
  requests start at once, in the order of the rows.
- A row is a session of its own. Without an output length it generates nothing.
- Ids are content in the whole file. Tokens after the last id, and what a request generates, are content of their own.
- Not read: `block_tokens` (blocks of several sizes), and ids that are texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from kvcore.units import div_ceil
from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import Row, parse_row, trace_error
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.timeline import Timeline
from kvsim.workload.trace import Trace

FORMAT = "kvcache-ai"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

FIELDS = ("block_size", "hash_ids", "input_length", "output_length", "timestamp")
SIGN = frozenset({"block_size", "block_tokens"})
"""Names that tell this format at the beginning of a file."""


def read(path: Path, unit_ps: int | None = None) -> Trace:
    """The trace in `path` (JSON lines, plain or gzip); raises TraceError at the first row that breaks the format.

    `unit_ps` is what a timestamp counts; None: nobody knows, and there may be none.
    """
    blocks = _Blocks()
    timeline = None if unit_ps is None else Timeline("timestamp", unit_ps)
    first = None
    for number, line in files.lines(path):
        row = parse_row(f"{path}:{number}", line)
        row.only(FIELDS)
        first = row if first is None else first
        blocks.builder.start(_start_ps(row, first, timeline), after=None, delay_ps=0, session=len(blocks.builder))
        row.choice("block_size", (first.tokens("block_size", at_least=1),))
        blocks.add(row)
        row.once(line)
    if first is None:
        raise trace_error(f"{path}:1", "file", "no rows", "one JSON object a line")
    return blocks.builder.build(path.name, FORMAT, first.tokens("block_size", at_least=1))


def _start_ps(row: Row, first: Row, timeline: Timeline | None) -> int:
    if "timestamp" not in first.values:
        if "timestamp" in row.values:
            raise row.error("timestamp", "none, as in the first row")
        return 0
    if timeline is None:
        raise row.error("timestamp", "a time unit with it (--time-unit s, ms or us): this format fixes none")
    return timeline.number_ps(row)


@dataclass(slots=True)
class _Blocks:
    """Collects prompts by the ids of their blocks."""

    builder: TraceBuilder = field(default_factory=TraceBuilder)
    streams: Iterator[int] = field(default_factory=count)
    tree: PrefixTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = PrefixTree(self.streams)

    def add(self, row: Row) -> None:
        """The content of the request just started."""
        granule_len = row.tokens("block_size", at_least=1)
        input_len = row.tokens("input_length", at_least=1)
        output_len = row.tokens("output_length", at_least=0) if "output_length" in row.values else 0
        given = row.values.get("hash_ids")
        num_whole = input_len // granule_len
        only_whole = type(given) is list and len(given) == num_whole
        num_ids = num_whole if only_whole else div_ceil(input_len, granule_len)
        ids = row.ids("hash_ids", num_ids, "ceil(input_length / block_size), or floor")
        own_stream = next(self.streams)
        self.builder.hold_granules(input_len, output_len, granule_len, self.tree.follow(ids), own_stream)

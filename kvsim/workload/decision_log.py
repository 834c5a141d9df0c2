"""The connector's decision log as a trace: open loop, content ids per granule of prompt and answer.

The first line tells `granule_len`, the tokens that one id names. Every other line is a request, in the order in which
they ended, with its `arrived_ns`, `prompt_len` and `total_len` (prompt and answer). Its content is the first n ids of
the one on line l, which stands before it, where `like` is [l, n], and then `ids`: 16 hexadecimal digits each, in all
one for each whole granule of `total_len`. A line with `reset_ns` tells of a reset of the pool's content, and the last
one counts requests. Described in connector/README.md; the other fields are what the engine decided, and not read here.

- Resets are left out.
- A request is a session of its own and starts when it arrived, counted from the first one. One that was never admitted
  is left out.
- Tokens after the last whole granule are content of their own.
- An answer that leaves other answers on its way is named as its last whole granule is: a trace has one name for it.
- A process that was killed leaves half a last line, and none that counts: that line is left out, and is said to be.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from kvcore.units import NS_PER_S
from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, PS_PER_S, Row, parse_row, trace_error
from kvsim.workload.prefix_tree import Ids, PrefixTree
from kvsim.workload.trace import Trace, TraceError

logger = logging.getLogger(__name__)

FORMAT = "decision-log"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

SIGN = frozenset({"kvtwin_record"})
RECORD_VERSIONS = (1,)
"""Versions of the format that are understood."""

ID_DIGITS = 16
PS_PER_NS = PS_PER_S // NS_PER_S
MAX_ARRIVAL_NS = MAX_SPAN_S * NS_PER_S


def read(path: Path) -> Trace:
    """The trace in `path` (plain or gzip); raises TraceError at the first line that breaks the format."""
    rows = _rows(path)
    header = next(rows, None)
    if header is None:
        raise trace_error(f"{path}:1", "file", "no rows", "the header of a decision log")
    header.choice("kvtwin_record", RECORD_VERSIONS)
    log = _Log(header.tokens("granule_len", at_least=1))
    for line, row in enumerate(rows, start=2):
        if "dropped" in row.values:
            _tell_dropped(row)
        elif "reset_ns" not in row.values:
            log.add(line, row)
    return log.build(path)


def _rows(path: Path) -> Iterator[Row]:
    """The objects of the lines, of which the last may be half a one."""
    for number, line in files.lines(path):
        where = f"{path}:{number}"
        try:
            row = parse_row(where, line)
        except TraceError:
            if number == 1 or line.endswith(b"\n"):
                raise
            logger.warning("%s: half a line, of a process that was killed, is left out", where)
            return
        yield row


def _tell_dropped(row: Row) -> None:
    num_dropped = row.tokens("dropped", at_least=0)
    if num_dropped:
        logger.warning("%s: %d requests more were served and not recorded", row.where, num_dropped)


@dataclass(frozen=True, slots=True)
class _Content:
    """Ids of one line: the first `num_like` of line `like`, then its own."""

    like: int
    num_like: int
    own: Ids

    def __len__(self) -> int:
        return self.num_like + len(self.own)


@dataclass(slots=True)
class _Log:
    """Collects requests line by line."""

    granule_len: int
    builder: TraceBuilder = field(default_factory=TraceBuilder)
    contents: dict[int, _Content] = field(default_factory=dict)
    streams: Iterator[int] = field(default_factory=count)
    tree: PrefixTree = field(init=False)

    def __post_init__(self) -> None:
        self.tree = PrefixTree(self.streams)

    def add(self, line: int, row: Row) -> None:
        """One request."""
        arrived_ns = row.number("arrived_ns", below=MAX_ARRIVAL_NS)
        prompt_len = row.tokens("prompt_len", at_least=1)
        total_len = row.tokens("total_len", at_least=prompt_len)
        content = self.contents[line] = self._content(row, total_len // self.granule_len)
        if row.values.get("admitted_ns") is None:
            return
        self.builder.start(round(arrived_ns * PS_PER_NS), after=None, delay_ps=0, session=len(self.builder))
        self._hold(prompt_len, total_len, self._ids(content))

    def build(self, path: Path) -> Trace:
        """The trace of what was added."""
        arrivals = self.builder.arrival_ps
        if not arrivals:
            raise trace_error(f"{path}:1", "file", "no request that was admitted", "at least one")
        first_ps = min(arrivals)
        self.builder.arrival_ps = [arrival_ps - first_ps for arrival_ps in arrivals]
        return self.builder.build(path.name, FORMAT, self.granule_len)

    def _content(self, row: Row, num_granules: int) -> _Content:
        like, num_like = self._like(row) if "like" in row.values else (0, 0)
        rule = f"{num_granules} ids of {ID_DIGITS} hexadecimal digits, less those of `like`"
        digits = row.values.get("ids")
        if type(digits) is not str or len(digits) != (num_granules - num_like) * ID_DIGITS:
            raise row.error("ids", rule)
        try:
            own = np.frombuffer(bytes.fromhex(digits), dtype=">u8").astype(np.uint64)
        except ValueError:
            raise row.error("ids", rule) from None
        if len(own) != num_granules - num_like:  # white space is no digit
            raise row.error("ids", rule)
        return _Content(like, num_like, own)

    def _like(self, row: Row) -> tuple[int, int]:
        value = row.values["like"]
        if type(value) is list and len(value) == 2 and all(type(number) is int for number in value):
            line, num_like = value
            if line in self.contents and 0 < num_like <= len(self.contents[line]):
                return line, num_like
        raise row.error("like", "[line, n]: the first n ids, at least one, of a request on a line before this one")

    def _ids(self, content: _Content) -> Ids:
        pieces = [content.own]
        num_left, line = content.num_like, content.like
        while num_left:
            earlier = self.contents[line]
            pieces.append(earlier.own[: max(0, num_left - earlier.num_like)])
            num_left, line = min(num_left, earlier.num_like), earlier.like
        return np.concatenate(pieces[::-1])

    def _hold(self, prompt_len: int, total_len: int, ids: Ids) -> None:
        """The content of the request just started."""
        own_stream = next(self.streams)
        runs = self.tree.follow(ids)
        named_len = len(ids) * self.granule_len
        segments: list[tuple[int, int]] = []
        start = 0
        for stream, end in runs:
            if start < prompt_len:
                start = min(end * self.granule_len, prompt_len)
                segments.append((stream, start))
        if named_len < prompt_len:
            segments.append((own_stream, prompt_len))
        output_stream = runs[-1][0] if named_len > prompt_len else own_stream
        num_granules = prompt_len // self.granule_len
        self.builder.hold(prompt_len, total_len - prompt_len, segments, output_stream, num_granules)

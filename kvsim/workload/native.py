"""kvtwin's own trace format: everything a `Trace` holds, in JSON lines. What was generated can be kept and shared.

The first line is the header:

    {"kvtwin_trace": 1, "name": TEXT, "source": TEXT, "granule_len": N, "num_requests": N}

`kvtwin_trace` is the version, `source` the format or generator the trace came from. Every other line is a request, in
the order of their recorded starts, with exactly these fields, all of them integers unless said otherwise:

    session        from 0, less than num_requests
    start_ps       recorded start, picoseconds from the start of the trace; never decreasing
    after          the request whose completion starts this one, an earlier one, counted from 0; absent: it starts at
                   start_ps by itself
    delay_ps       pause between that completion and the start; absent with `after`
    input_len      tokens of the prompt, at least 1
    output_len     tokens of the answer
    content        the prompt as runs, [[stream, end], ...]: its tokens from the end of the run before, or 0, up to
                   `end` are those of the stream at the same places. Ends grow; the last one is input_len
    output_stream  the stream that the answer's tokens are in
    num_granules   content ids the source had for the prompt: input_len / granule_len, rounded down or up
    cached_len     prompt tokens that the provider reported as cached; in every request or in none

Streams are numbers below 2**26. Two prompts share a token and all before it exactly when they name it with the same
stream. So a stream is always entered at the same token, from the same stream.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import orjson

from kvcore.units import div_ceil
from kvsim.workload import files
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, MAX_TOKENS, PS_PER_S, Row, parse_row, trace_error
from kvsim.workload.trace import Trace

FORMAT = "kvtwin"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

SIGN = frozenset({"kvtwin_trace"})
FORMAT_VERSIONS = (1,)
"""Versions of the format that are understood; `lines` gives the last."""

MAX_PS = MAX_SPAN_S * PS_PER_S
MAX_STREAMS = 2**26
"""What counts blocks keeps an array of them."""
HEADER = ("kvtwin_trace", "name", "source", "granule_len", "num_requests")
ALWAYS = ("session", "start_ps", "input_len", "output_len", "content", "output_stream", "num_granules")
FOLLOWING = ("after", "delay_ps")
REPORT = "cached_len"

Entry: TypeAlias = tuple[int | None, int]
"""Where a stream is entered: from which stream, None at the root, and at which token."""


def lines(trace: Trace) -> Iterator[bytes]:
    """The trace as lines of this format; the same bytes for an equal trace."""
    return (orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in _documents(trace))


def read(path: Path) -> Trace:
    """The trace in `path` (plain or gzip); raises TraceError at the first line that breaks the format."""
    found = files.lines(path)
    first = next(found, None)
    if first is None:
        raise trace_error(f"{path}:1", "file", "no rows", "the header of a kvtwin trace")
    header = parse_row(f"{path}:1", first[1])
    header.choice("kvtwin_trace", FORMAT_VERSIONS)
    _check_fields(header, HEADER)
    name, source = header.text("name"), header.text("source")
    requests = _Requests(header.tokens("granule_len", at_least=1), header.tokens("num_requests", at_least=1))
    for number, line in found:
        row = parse_row(f"{path}:{number}", line)
        requests.add(row)
        if line.count(b'"') != 2 * len(row.values):  # nothing but names is quoted
            raise trace_error(row.where, "JSON", "a field twice", "each field once")
    num_read = len(requests.builder)
    if num_read != requests.num_requests:
        raise trace_error(
            f"{path}:{num_read + 1}", "file", f"{num_read} requests", f"num_requests = {requests.num_requests}"
        )
    return requests.builder.build(name, source, requests.granule_len)


class _Requests:
    """Collects requests line by line."""

    def __init__(self, granule_len: int, num_requests: int) -> None:
        self.granule_len = granule_len
        self.num_requests = num_requests
        self.builder = TraceBuilder()
        self._entries: dict[int, Entry] = {}

    def add(self, row: Row) -> None:
        """One request."""
        index, is_reported = len(self.builder), bool(self.builder.reported_cached_len)
        has_report = is_reported if index else REPORT in row.values
        follows = FOLLOWING if any(field in row.values for field in FOLLOWING) else ()
        _check_fields(row, (*ALWAYS, *follows, *((REPORT,) if has_report else ())))
        after = row.integer("after", below=index) if follows else None
        delay_ps = row.integer("delay_ps", below=MAX_PS) if follows else 0
        self.builder.start(self._start_ps(row), after, delay_ps, row.integer("session", below=self.num_requests))
        self._hold(row)
        if has_report:
            self.builder.report(row.integer(REPORT, below=self.builder.input_len[-1] + 1))

    def _start_ps(self, row: Row) -> int:
        start_ps = row.integer("start_ps", below=MAX_PS)
        if self.builder.arrival_ps and start_ps < self.builder.arrival_ps[-1]:
            raise row.error("start_ps", f"at least the previous request's {self.builder.arrival_ps[-1]}")
        return start_ps

    def _hold(self, row: Row) -> None:
        input_len, output_len = row.tokens("input_len", at_least=1), row.tokens("output_len", at_least=0)
        runs = self._runs(row, input_len)
        output_stream = row.integer("output_stream", below=MAX_STREAMS)
        fewest, most = input_len // self.granule_len, div_ceil(input_len, self.granule_len)
        num_granules = row.integer("num_granules", below=most + 1, at_least=fewest)
        self.builder.hold(input_len, output_len, runs, output_stream, num_granules)

    def _runs(self, row: Row, input_len: int) -> list[tuple[int, int]]:
        runs = _pairs(row)
        ends = [0, *(end for _, end in runs)]
        if any(start >= end for start, end in pairwise(ends)) or ends[-1] != input_len:
            raise row.error("content", f"ends that grow, up to input_len = {input_len}")
        parent = None
        for (stream, _), start in zip(runs, ends[:-1], strict=True):
            if self._entries.setdefault(stream, (parent, start)) != (parent, start):
                raise row.error("content", f"stream {stream} entered {_shown(self._entries[stream])}, as before")
            parent = stream
        return runs


def _documents(trace: Trace) -> Iterator[dict[str, object]]:
    name = trace.name.encode(errors="replace").decode()  # a file's name may hold what is no text
    about = (FORMAT_VERSIONS[-1], name, trace.format, trace.granule_len, trace.num_requests)
    yield dict(zip(HEADER, about, strict=True))
    ends = list(zip(trace.segment_stream.tolist(), trace.segment_end.tolist(), strict=True))
    content = [ends[start:end] for start, end in pairwise(trace.segment_offset.tolist())]
    columns = (trace.session, trace.arrival_ps, trace.input_len, trace.output_len, trace.output_stream)
    session, start_ps, input_len, output_len, output_stream = (column.tolist() for column in columns)
    always = zip(
        session, start_ps, input_len, output_len, content, output_stream, trace.num_granules.tolist(), strict=True
    )
    follows = list(zip(trace.after.tolist(), trace.delay_ps.tolist(), strict=True))
    cached_len = trace.reported_cached_len.tolist()
    for index, values in enumerate(always):
        following = zip(FOLLOWING, follows[index], strict=True) if follows[index][0] != index else ()
        report = {REPORT: cached_len[index]} if cached_len else {}
        yield {**dict(zip(ALWAYS, values, strict=True)), **dict(following), **report}


def _check_fields(row: Row, fields: tuple[str, ...]) -> None:
    """Nothing but these fields; what is missing is said where it is read."""
    for field in row.values:
        if field not in fields:
            raise row.error(field, f"only the fields {', '.join(fields)}")
    if REPORT in fields and REPORT not in row.values:
        raise row.error(REPORT, "a report in every request or in none")


def _pairs(row: Row) -> list[tuple[int, int]]:
    runs = row.values.get("content")
    if type(runs) is list and all(map(_is_run, runs)):
        return [(stream, end) for stream, end in runs]
    raise row.error("content", "a list of runs [stream, end], integers, 0 <= stream < 2**26, 0 < end < 2**32")


def _is_run(value: object) -> bool:
    if type(value) is not list or [type(number) for number in value] != [int, int]:
        return False
    stream, end = value
    return bool(0 <= stream < MAX_STREAMS and 0 < end < MAX_TOKENS)


def _shown(entry: Entry) -> str:
    parent, start = entry
    return "at token 0" if parent is None else f"at token {start} from stream {parent}"

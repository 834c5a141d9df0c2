"""Collects requests one by one and closes them into a `Trace`."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvsim.workload.trace import COLUMN_NAMES, Column, Trace


@dataclass(slots=True)
class TraceBuilder:
    """Rows in the order they were added; `build` puts them in the order of their recorded start."""

    arrival_ps: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    delay_ps: list[int] = field(default_factory=list)
    session: list[int] = field(default_factory=list)
    input_len: list[int] = field(default_factory=list)
    output_len: list[int] = field(default_factory=list)
    output_stream: list[int] = field(default_factory=list)
    num_granules: list[int] = field(default_factory=list)
    num_segments: list[int] = field(default_factory=list)
    segment_stream: list[int] = field(default_factory=list)
    segment_end: list[int] = field(default_factory=list)
    reported_cached_len: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.arrival_ps)

    def start(self, arrival_ps: int, after: int | None, delay_ps: int, session: int) -> None:
        """When the next request starts: by itself (`after` is None), or `delay_ps` after request `after` completed.

        `after` counts requests in the order they were added; a request that waits was not recorded to start before it.
        """
        self.after.append(len(self) if after is None else after)
        self.arrival_ps.append(arrival_ps)
        self.delay_ps.append(delay_ps)
        self.session.append(session)

    def hold(
        self,
        input_len: int,
        output_len: int,
        segments: Iterable[tuple[int, int]],
        output_stream: int,
        num_granules: int,
    ) -> None:
        """The content of the request just started; segments are (stream, end token), the last end is input_len."""
        before = len(self.segment_end)
        for stream, end in segments:
            self.segment_stream.append(stream)
            self.segment_end.append(end)
        self.num_segments.append(len(self.segment_end) - before)
        self.input_len.append(input_len)
        self.output_len.append(output_len)
        self.num_granules.append(num_granules)
        self.output_stream.append(output_stream)

    def hold_granules(
        self, input_len: int, output_len: int, granule_len: int, runs: list[tuple[int, int]], own_stream: int
    ) -> None:
        """`hold` for content that ids name: runs are (stream, end granule), what they leave is of `own_stream`."""
        segments = [(stream, min(end * granule_len, input_len)) for stream, end in runs]
        if not segments or segments[-1][1] < input_len:
            segments.append((own_stream, input_len))
        self.hold(input_len, output_len, segments, own_stream, num_granules=runs[-1][1] if runs else 0)

    def report(self, cached_len: int) -> None:
        """What the provider said it had cached of the prompt just started; told of every request or of none."""
        self.reported_cached_len.append(cached_len)

    def build(self, name: str, format: str, granule_len: int) -> Trace:
        """The trace, ordered by recorded start; requests of one instant stay in the order they were added."""
        columns = {name: _column(getattr(self, name)) for name in BUILT}
        return Trace(name, format, granule_len, **_in_order(columns, _column(self.num_segments)))


def restarted(trace: Trace, arrival_ps: Column) -> Trace:
    """The same requests with other starts, in order of these; whom a request waits for has not to start after it."""
    columns = {name: getattr(trace, name) for name in BUILT} | {"arrival_ps": arrival_ps}
    return replace(trace, **_in_order(columns, np.diff(trace.segment_offset)))


BUILT = tuple(name for name in COLUMN_NAMES if name != "segment_offset")


def _in_order(columns: dict[str, Any], num_segments: Column) -> dict[str, Any]:
    """The columns of rows, and of their segments, in order of arrival; rows of one instant stay in their order."""
    order = np.argsort(columns["arrival_ps"], kind="stable")
    row_of = np.empty_like(order)
    row_of[order] = np.arange(len(order))
    orders = dict.fromkeys(("segment_stream", "segment_end"), _gather(num_segments, order))
    if not len(columns["reported_cached_len"]):
        orders["reported_cached_len"] = np.empty(0, dtype=np.int64)
    moved = {name: column[orders.get(name, order)] for name, column in columns.items()}
    return moved | {"after": row_of[moved["after"]], "segment_offset": _offsets(num_segments[order])}


def _column(values: list[int]) -> Column:
    return np.array(values, dtype=np.int64)


def _offsets(lengths: Column) -> Column:
    """Start of each of the consecutive ranges of these lengths, and the end of the last."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _gather(lengths: Column, order: Column) -> Column:
    """Where the elements of ragged rows lie once the rows are put in `order`."""
    starts = _offsets(lengths)[:-1]
    moved = lengths[order]
    shift = starts[order] - _offsets(moved)[:-1]
    return np.arange(lengths.sum()) + np.repeat(shift, moved)

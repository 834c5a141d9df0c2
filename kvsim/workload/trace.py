"""The columnar trace: every reader and generator gives one, everything downstream takes one."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.types import Segment, Segments, StreamId

Column: TypeAlias = npt.NDArray[np.int64]


class TraceError(ValueError):
    """A trace that breaks its format's rule; one line: FILE:LINE: field, value, what was expected."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of their recorded start, as columns of length num_requests unless said otherwise.

    A request waits for nobody and starts at `arrival_ps`, or starts `delay_ps` after request `after[i] < i` has
    completed (closed loop). The prompt's content is in CSR form in token coordinates: segment j of request i, for j
    in [segment_offset[i], segment_offset[i + 1]), names tokens [end of the previous segment or 0, segment_end[j]) by
    stream segment_stream[j]. Two prompts share a token and everything before it exactly when they name it with the
    same stream (see `kvcore.types.Segment`).
    """

    name: str
    format: str
    granule_len: int
    """Tokens that one content id of the source names; hit curves count in this unit."""
    arrival_ps: Column
    """Recorded start, from the start of the trace; decides only for requests that wait for nobody."""
    after: Column
    """Request whose completion starts this one; its own index: starts at arrival_ps by itself."""
    delay_ps: Column
    """Pause between the completion of `after` and the start; 0 where a request waits for nobody."""
    session: Column
    input_len: Column
    output_len: Column
    output_stream: Column
    """Stream of the blocks whose last token is an output token."""
    num_granules: Column
    """Content ids the source gives for the prompt; the last one may name fewer than granule_len tokens."""
    segment_offset: Column
    """Length num_requests + 1."""
    segment_stream: Column
    """Length segment_offset[-1]."""
    segment_end: Column
    """Length segment_offset[-1]; strictly increasing inside a request, its last one is input_len."""
    reported_cached_len: Column = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Prompt tokens that the provider reported as cached; length 0 where the source has no such report."""

    def __post_init__(self) -> None:
        n = self.num_requests
        index = np.arange(n)
        for column in columns_of(self):
            assert column.dtype == np.int64, column.dtype
        per_request = (self.after, self.delay_ps, self.session, self.input_len, self.output_len, self.output_stream)
        assert all(len(column) == n for column in (*per_request, self.num_granules))
        assert len(self.segment_offset) == n + 1
        assert self.segment_offset[0] == 0
        assert len(self.segment_stream) == len(self.segment_end) == self.segment_offset[-1]
        assert (self.after <= index).all()
        assert (self.after >= 0).all()
        assert (np.diff(self.arrival_ps) >= 0).all()
        assert (self.input_len > 0).all()
        assert (self.output_len >= 0).all()
        assert (self.delay_ps >= 0).all()
        assert (np.diff(self.segment_offset) > 0).all()
        assert (self.segment_end[self.segment_offset[1:] - 1] == self.input_len).all()
        assert (self.segment_lengths() > 0).all()
        if len(self.reported_cached_len):
            assert len(self.reported_cached_len) == n
            assert (self.reported_cached_len >= 0).all()
            assert (self.reported_cached_len <= self.input_len).all()

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_ps)

    @property
    def num_sessions(self) -> int:
        """Number of sessions; they are numbered from 0."""
        return int(self.session.max()) + 1 if len(self.session) else 0

    def segment_starts(self) -> Column:
        """First token of each segment, one entry per segment."""
        starts = np.zeros_like(self.segment_end)
        starts[1:] = self.segment_end[:-1]
        starts[self.segment_offset[:-1]] = 0
        return starts

    def segment_lengths(self) -> Column:
        """Tokens of each segment, one entry per segment."""
        return self.segment_end - self.segment_starts()

    def head(self, num_requests: int) -> "Trace":
        """The first requests; whom they wait for is among them."""
        num_segments = int(self.segment_offset[: num_requests + 1][-1])
        lengths = {"segment_offset": num_requests + 1, "segment_stream": num_segments, "segment_end": num_segments}
        columns = {name: getattr(self, name)[: lengths.get(name, num_requests)] for name in COLUMN_NAMES}
        return replace(self, **columns)

    def segments(self, request: int, block_size: int) -> Segments:
        """Content of the full `block_size`-token blocks, prompt and output: [0, total tokens // block_size)."""
        rows = self._rows
        blocks: list[Segment] = []
        start = 0
        for j in range(rows.offset[request], rows.offset[request + 1]):
            end = rows.end[j] // block_size
            if end > start:
                blocks.append((rows.stream[j], start, end))
                start = end
        end = rows.total_len[request] // block_size
        if end > start:
            stream = rows.output_stream[request]
            if blocks and blocks[-1][0] == stream:
                start = blocks.pop()[1]
            blocks.append((stream, start, end))
        return tuple(blocks)

    @cached_property
    def _rows(self) -> "_Rows":
        total_len = self.input_len + self.output_len
        return _Rows(
            self.segment_offset.tolist(),
            self.segment_stream.tolist(),
            self.segment_end.tolist(),
            self.output_stream.tolist(),
            total_len.tolist(),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The columns `segments` reads, as Python integers: one element of a numpy array costs ten times a list's."""

    offset: list[int]
    stream: list[StreamId]
    end: list[int]
    output_stream: list[StreamId]
    total_len: list[int]


def columns_of(trace: Trace) -> tuple[Column, ...]:
    """The trace's columns in the order of their declaration."""
    return tuple(getattr(trace, name) for name in COLUMN_NAMES)


COLUMN_NAMES: tuple[str, ...] = tuple(
    column.name for column in fields(Trace) if column.name not in ("name", "format", "granule_len")
)

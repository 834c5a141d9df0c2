"""A bigger fleet out of recorded sessions: they are drawn with replacement, and each copy has content of its own.

A copy keeps what its session recorded: lengths, who waits for whom, pauses, distances between starts, and what its
requests share with each other. What it shares with other copies is declared, never guessed:

- "none": nothing.
- "system": the first `shared_len` tokens, one system prompt for all. Of a prompt it is what begins as its session's
  first prompt does, so that a sub-agent with another system prompt keeps its own.
- "recorded": what sessions of the trace are recorded to share with each other. What is one session's own is each
  copy's own, copies of the same session included: otherwise the second would find all of the first in the cache.

An answer is shared where it is so recorded as a whole, and only with "recorded".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from kvcore.errors import InvalidArgument, require
from kvcore.units import div_ceil
from kvsim.workload.agentic import random_stream
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, MAX_TOKENS, PS_PER_S, seconds_to_ps
from kvsim.workload.trace import Trace

MAX_REQUESTS = 10_000_000
SYSTEM_STREAM = 0

Share: TypeAlias = Literal["none", "system", "recorded"]
Draw: TypeAlias = Literal["stratified", "independent"]
Runs: TypeAlias = list[tuple[int, int]]
"""(stream, end token) of a prompt's content, in order."""


@dataclass(frozen=True, slots=True)
class Resample:
    """What is drawn and what is shared."""

    sessions: int
    share: Share = "none"
    shared_len: int = 0
    """Tokens of the system prompt, with share "system"."""
    draw: Draw = "stratified"
    """"stratified": every recorded session is drawn as often as every other, or once more. "independent": each draw is
    of all of them."""
    start_spread_s: float = 0.0
    """Sessions start uniformly at random in [0, start_spread_s)."""

    def __post_init__(self) -> None:
        require(1 <= self.sessions <= MAX_REQUESTS, "sessions", self.sessions, f"1 <= sessions <= {MAX_REQUESTS}")
        require(self.share in get_args(Share), "share", self.share, " or ".join(get_args(Share)))
        require(self.draw in get_args(Draw), "draw", self.draw, " or ".join(get_args(Draw)))
        bounds = "1 <= shared_len < 2**32 with share = system, the tokens of its prompt"
        is_sized = 1 <= self.shared_len < MAX_TOKENS if self.share == "system" else self.shared_len == 0
        require(is_sized, "shared_len", self.shared_len, bounds if self.share == "system" else "0, or share = system")
        bounds = f"0 <= start_spread_s < {MAX_SPAN_S // 2}"
        require(0 <= self.start_spread_s < MAX_SPAN_S // 2, "start_spread_s", self.start_spread_s, bounds)


def resample(trace: Trace, how: Resample, seed: int = 0) -> Trace:
    """Copies of the trace's sessions; the same for the same trace, `how` and seed. Raises InvalidArgument."""
    sessions = _sessions(trace, how)
    drawn = _drawn(len(sessions), how, seed)
    num_requests = sum(len(sessions[index]) for index in drawn)
    require(num_requests <= MAX_REQUESTS, "sessions", how.sessions, f"at most {MAX_REQUESTS} requests in all")
    spread_s = random_stream(seed, "starts of copies").random(how.sessions) * how.start_spread_s
    builder, names = TraceBuilder(), _Names()
    for copy, (index, start_s) in enumerate(zip(drawn, spread_s.tolist(), strict=True)):
        names.begin_copy()
        _add_copy(builder, sessions[index], names, copy, seconds_to_ps(start_s))
    return builder.build(f"{trace.name} x {how.sessions}", trace.format, trace.granule_len)


class _Request(NamedTuple):
    """One request of a recorded session."""

    since_ps: int
    """Recorded start, from the session's first."""
    after: int | None
    """The one it waits for, counted from the session's first."""
    delay_ps: int
    input_len: int
    output_len: int
    num_granules: int
    cached_len: int | None
    shared: Runs
    """The beginning that copies share, by names that stay."""
    own: Runs
    """The rest, by names that each copy has for itself."""
    output_stream: int
    is_output_shared: bool


def _drawn(num_recorded: int, how: Resample, seed: int) -> list[int]:
    """Which session each copy is of."""
    random = random_stream(seed, "copies")
    if how.draw == "independent":
        independent: list[int] = random.integers(num_recorded, size=how.sessions).tolist()
        return independent
    rounds = div_ceil(how.sessions, num_recorded)
    last = random.permutation(num_recorded)[: how.sessions - (rounds - 1) * num_recorded]
    drawn = np.concatenate((np.tile(np.arange(num_recorded), rounds - 1), last))
    chosen: list[int] = random.permutation(drawn).tolist()
    return chosen


def _sessions(trace: Trace, how: Resample) -> list[list[_Request]]:
    """The recorded sessions, in order of their first starts."""
    rows: dict[int, list[int]] = {}
    for index, session in enumerate(trace.session.tolist()):
        rows.setdefault(session, []).append(index)
    content = _contents(trace)
    shared_end = _shared_ends(trace, content) if how.share == "recorded" else {}
    return [list(_requests(trace, own_rows, content, how, shared_end)) for own_rows in rows.values()]


def _contents(trace: Trace) -> list[Runs]:
    """Each prompt's runs."""
    runs = list(zip(trace.segment_stream.tolist(), trace.segment_end.tolist(), strict=True))
    return [runs[start:end] for start, end in pairwise(trace.segment_offset.tolist())]


def _shared_ends(trace: Trace, content: list[Runs]) -> dict[int, int]:
    """Up to which token two sessions at least hold each stream: the second of the furthest ends."""
    furthest: dict[int, dict[int, int]] = {}
    columns = (trace.session, trace.output_stream, trace.input_len + trace.output_len)
    for runs, session, stream, end in zip(content, *(column.tolist() for column in columns), strict=True):
        for held_stream, held_end in (*runs, (stream, end)):
            ends = furthest.setdefault(held_stream, {})
            ends[session] = max(held_end, ends.get(session, 0))
    return {stream: sorted(ends.values())[-2] for stream, ends in furthest.items() if len(ends) > 1}


def _requests(
    trace: Trace, rows: list[int], content: list[Runs], how: Resample, shared_end: dict[int, int]
) -> Iterator[_Request]:
    place = {row: position for position, row in enumerate(rows)}
    first = content[rows[0]]
    for row in rows:
        before = int(trace.after[row])
        if before not in place:
            where = f"request {row} of {trace.name}"
            raise InvalidArgument("TRACE", where, "sessions of which none waits for another one")
        runs = content[row]
        shared_len = (
            min(how.shared_len, _common_len(first, runs)) if how.share == "system" else _kept_len(runs, shared_end)
        )
        input_len, output_len = int(trace.input_len[row]), int(trace.output_len[row])
        stream = int(trace.output_stream[row])
        shared = [(name, min(end, shared_len)) for (name, end), start in _with_starts(runs) if start < shared_len]
        yield _Request(
            int(trace.arrival_ps[row] - trace.arrival_ps[rows[0]]),
            None if before == row else place[before],
            int(trace.delay_ps[row]),
            input_len,
            output_len,
            int(trace.num_granules[row]),
            int(trace.reported_cached_len[row]) if len(trace.reported_cached_len) else None,
            [(SYSTEM_STREAM, shared_len)] if how.share == "system" and shared_len else shared,
            [(name, end) for name, end in runs if end > shared_len],
            stream,
            shared_len == input_len and shared_end.get(stream, 0) >= input_len + output_len,
        )


def _with_starts(runs: Runs) -> Iterator[tuple[tuple[int, int], int]]:
    return zip(runs, [0, *(end for _, end in runs)], strict=False)


def _common_len(left: Runs, right: Runs) -> int:
    """Tokens that two prompts begin with alike."""
    common_len = 0
    for (stream, end), (other, other_end) in zip(left, right, strict=False):
        if stream != other:
            return common_len
        common_len = min(end, other_end)
        if end != other_end:
            return common_len
    return common_len


def _kept_len(runs: Runs, shared_end: dict[int, int]) -> int:
    """Tokens at the beginning of a prompt that other sessions are recorded to hold as well."""
    kept_len = 0
    for stream, end in runs:
        kept_len = max(kept_len, min(end, shared_end.get(stream, 0)))
        if kept_len < end:
            return kept_len
    return kept_len


class _Names:
    """Streams of the trace that is made: those that copies share, and each copy's own."""

    def __init__(self) -> None:
        self._shared: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._num_used = 0

    def begin_copy(self) -> None:
        """What is own from now on is another copy's."""
        self._own = {}

    def shared(self, stream: int) -> int:
        """The name of a stream that copies share."""
        return self._named(self._shared, stream)

    def own(self, stream: int) -> int:
        """This copy's name of a stream."""
        return self._named(self._own, stream)

    def _named(self, names: dict[int, int], stream: int) -> int:
        if stream not in names:
            names[stream] = self._num_used
            self._num_used += 1
        return names[stream]


def _add_copy(builder: TraceBuilder, session: list[_Request], names: _Names, copy: int, start_ps: int) -> None:
    first = len(builder)
    for request in session:
        after = None if request.after is None else first + request.after
        last_s = (start_ps + request.since_ps) / PS_PER_S
        require(last_s < MAX_SPAN_S, "start_spread_s", last_s, f"starts within {MAX_SPAN_S} s")
        builder.start(start_ps + request.since_ps, after, request.delay_ps, copy)
        if request.cached_len is not None:
            builder.report(request.cached_len)
        runs = [(names.shared(stream), end) for stream, end in request.shared]
        runs += [(names.own(stream), end) for stream, end in request.own]
        name = names.shared if request.is_output_shared else names.own
        builder.hold(request.input_len, request.output_len, runs, name(request.output_stream), request.num_granules)

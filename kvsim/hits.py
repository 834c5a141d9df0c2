"""Hit-rate curves of a trace: which tokens of its prompts a cache of so many blocks would have held.

A block here is one granule of the trace (512 tokens for Mooncake, 64 for Claude Code), known by its whole prefix. A
request is looked up as one contiguous prefix before it uses its blocks; a last partial block counts its own tokens.
Time and generated tokens are ignored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from kvcore.errors import require
from kvcore.eviction.fifo import Fifo
from kvcore.eviction.leaf_first import LeafFirst
from kvcore.eviction.policy import BoundedCache, EvictionPolicy
from kvcore.eviction.session_aware import SessionAware
from kvsim import clairvoyant
from kvsim.workload.trace import Column, Trace

Curve: TypeAlias = Callable[["Accesses", Sequence[int]], Iterator[Column]]
"""Per capacity, the blocks that hit in each request."""


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Prompt tokens that hit, in the whole trace and in its last half (requests from num_requests // 2 on)."""

    hit_tokens: int
    last_half_hit_tokens: int


@dataclass(frozen=True, slots=True)
class CapacityHits(HitTokens):
    """The same under one capacity."""

    capacity_blocks: int


@dataclass(frozen=True, slots=True)
class HitsReport:
    """One curve per policy; `infinite` is what a cache without bound would hit."""

    requests: int
    total_tokens: int
    last_half_tokens: int
    infinite: HitTokens
    policies: dict[str, tuple[CapacityHits, ...]]

    def to_json(self) -> dict[str, object]:
        """The report in plain types."""
        return {
            "requests": self.requests,
            "total_tokens": self.total_tokens,
            "last_half_tokens": self.last_half_tokens,
            "infinite": _plain(self.infinite),
            "policies": {
                name: [{"capacity_blocks": point.capacity_blocks, **_plain(point)} for point in curve]
                for name, curve in self.policies.items()
            },
        }


def hits(
    trace: Trace,
    capacities_blocks: Sequence[int],
    policies: Sequence[str] = ("lru",),
    curves: Mapping[str, Curve] | None = None,
) -> HitsReport:
    """Hit tokens of each policy (a key of `curves`, default CURVES) at each capacity, requests in the trace's order."""
    curves = CURVES if curves is None else curves
    for name in policies:
        require(name in curves, "policy", name, f"one of {', '.join(curves)}")
    for capacity_blocks in capacities_blocks:
        require(0 < capacity_blocks < 2**63, "capacity_blocks", capacity_blocks, "at least 1, less than 2**63")
    accesses = Accesses(trace)
    return HitsReport(
        requests=trace.num_requests,
        total_tokens=int(trace.input_len.sum()),
        last_half_tokens=int(trace.input_len[trace.num_requests // 2 :].sum()),
        infinite=accesses.tokens(accesses.seen.blocks_within(accesses.num_blocks)),
        policies={name: _points(accesses, capacities_blocks, curves[name]) for name in policies},
    )


def _points(accesses: "Accesses", capacities_blocks: Sequence[int], curve: Curve) -> tuple[CapacityHits, ...]:
    found = []
    for capacity_blocks, blocks in zip(capacities_blocks, curve(accesses, capacities_blocks), strict=True):
        tokens = accesses.tokens(blocks)
        found.append(CapacityHits(tokens.hit_tokens, tokens.last_half_hit_tokens, capacity_blocks))
    return tuple(found)


def _plain(tokens: HitTokens) -> dict[str, int]:
    return {"hit_tokens": tokens.hit_tokens, "last_half_hit_tokens": tokens.last_half_hit_tokens}


# --- what a request uses ----------------------------------------------------------------------------------------------


class Accesses:
    """The blocks each request uses, as runs: blocks [start, end) of its prompt are blocks [start, end) of one stream.

    A stream is always entered at the same block, so what one request uses of it is a prefix of what it holds.
    """

    def __init__(self, trace: Trace) -> None:
        ends = trace.segment_end // trace.granule_len
        ends[trace.segment_offset[1:] - 1] = trace.num_granules
        request = np.repeat(np.arange(trace.num_requests), np.diff(trace.segment_offset))
        starts = np.zeros_like(ends)
        starts[1:] = np.where(request[1:] == request[:-1], ends[:-1], 0)
        used = starts < ends
        self.trace = trace
        self.request: Column = request[used]
        self.stream: Column = trace.segment_stream[used]
        self.start: Column = starts[used]
        self.end: Column = ends[used]

    def tokens(self, blocks: Column) -> HitTokens:
        """Tokens in the first blocks[i] blocks of each prompt i, summed."""
        hit_len = np.minimum(blocks * self.trace.granule_len, self.trace.input_len)
        return HitTokens(int(hit_len.sum()), int(hit_len[self.trace.num_requests // 2 :].sum()))

    @cached_property
    def seen(self) -> "Reuse":
        """Every reuse in the trace."""
        return _reuse(self)

    @cached_property
    def num_blocks(self) -> int:
        """Distinct blocks, and with that a capacity without bound."""
        return int((self.end - self.start).sum() - (self.seen.end - self.seen.start).sum())

    def prompts(self) -> Iterator[list[int]]:
        """Each request's blocks, root first, as integers that are equal exactly for equal blocks."""
        first = np.zeros(int(self.stream.max(initial=0)) + 1, dtype=np.int64)
        size_blocks = np.zeros_like(first)
        first[self.stream] = self.start
        np.maximum.at(size_blocks, self.stream, self.end - self.start)
        shift = np.cumsum(size_blocks) - size_blocks - first
        names = list(range(int(size_blocks.sum())))
        low, high = (self.start + shift[self.stream]).tolist(), (self.end + shift[self.stream]).tolist()
        offsets = np.searchsorted(self.request, np.arange(self.trace.num_requests + 1)).tolist()
        for begin, stop in pairwise(offsets):
            yield [name for run in range(begin, stop) for name in names[low[run] : high[run]]]


# --- LRU: all capacities at once --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reuse:
    """Runs of blocks that were used before: request, its blocks [start, end) of a stream, the request that used them
    last, and the depth of the first in LRU order.

    Depth is the number of distinct blocks used after a block's last use; inside a run it grows by one a block, along a
    prompt it never falls. LRU with room for C blocks holds exactly the blocks of depth < C: one pass, all capacities.
    (Stack distance: Mattson et al., "Evaluation techniques for storage hierarchies", 1970.)
    """

    num_requests: int
    request: Column
    before: Column
    stream: Column
    start: Column
    end: Column
    depth_blocks: Column

    def blocks_within(self, capacity_blocks: int) -> Column:
        """Leading blocks of each request whose depth is less than the capacity."""
        held = np.clip(capacity_blocks - self.depth_blocks, 0, self.end - self.start)
        return np.bincount(self.request, weights=held, minlength=self.num_requests).astype(np.int64)


def lru_curve(accesses: Accesses, capacities_blocks: Sequence[int]) -> Iterator[Column]:
    """Least recently used, leaf first so that the root is youngest."""
    return (accesses.seen.blocks_within(capacity_blocks) for capacity_blocks in capacities_blocks)


def _reuse(accesses: Accesses) -> Reuse:
    """One pass over the runs of all requests.

    Of each stream only the last users are kept, as intervals with the latest user nearest to its first block: a request
    that uses a block uses all before it. The depth of a block is then the blocks before it in its own prompt, which
    were all used after it, plus the other blocks whose last user is later than its own.
    """
    others = _Counts(accesses.trace.num_requests)
    users: dict[int, list[tuple[int, int]]] = {}  # stream -> (end, last user) of its intervals, deepest first
    found: list[tuple[int, int, int, int, int, int]] = []
    now = used_blocks = 0
    columns = (accesses.request, accesses.stream, accesses.start, accesses.end)
    for request, stream, start, end in zip(*(column.tolist() for column in columns), strict=True):
        if request != now:
            others.add(now, used_blocks)
            now = request
        intervals = users.setdefault(stream, [])
        block = start
        while intervals and block < end:
            interval_end, user = intervals[-1]
            stop = min(interval_end, end)
            found.append((request, user, stream, block, stop, block + others.after(user)))
            others.add(user, block - stop)
            if interval_end <= end:
                intervals.pop()
            block = stop
        intervals.append((end, request))
        used_blocks = end
    return Reuse(accesses.trace.num_requests, *np.array(found, dtype=np.int64).reshape(-1, 6).T)


class _Counts:
    """How many blocks each request is the last user of, with sums in logarithmic time (Fenwick, 1994)."""

    __slots__ = ("_sums", "_total")

    def __init__(self, num_requests: int) -> None:
        self._sums = [0] * (num_requests + 1)  # node i holds the counts of requests [i - lowest bit of i, i)
        self._total = 0

    def add(self, request: int, blocks: int) -> None:
        """Change the count of one request."""
        sums = self._sums
        self._total += blocks
        node = request + 1
        while node < len(sums):
            sums[node] += blocks
            node += node & -node

    def after(self, request: int) -> int:
        """Sum of the counts of all later requests."""
        sums = self._sums
        upto = 0
        node = request + 1
        while node:
            upto += sums[node]
            node &= node - 1
        return self._total - upto


# --- any other policy: one cache per capacity -------------------------------------------------------------------------


def replayed(policy: Callable[[], EvictionPolicy[int]]) -> Curve:
    """The curve of a policy, by running a cache with it."""

    def curve(accesses: Accesses, capacities_blocks: Sequence[int]) -> Iterator[Column]:
        for capacity_blocks in capacities_blocks:
            yield _replay(accesses, BoundedCache(capacity_blocks, policy()))

    return curve


def opt_curve(accesses: Accesses, capacities_blocks: Sequence[int]) -> Iterator[Column]:
    """Belady's bound: it is told the whole trace."""
    seen = accesses.seen
    runs = zip(accesses.request.tolist(), _stream_runs(accesses), strict=True)
    reuses = zip(seen.request.tolist(), seen.before.tolist(), _stream_runs(seen), strict=True)
    coming = clairvoyant.future(accesses.trace.num_requests, runs, reuses)
    return (clairvoyant.hit_blocks(coming, capacity_blocks) for capacity_blocks in capacities_blocks)


def _stream_runs(of: "Accesses | Reuse") -> Iterator[clairvoyant.StreamRun]:
    return zip(of.stream.tolist(), of.start.tolist(), of.end.tolist(), strict=True)


def _replay(accesses: Accesses, cache: BoundedCache[int]) -> Column:
    return np.fromiter(map(cache.request, accesses.prompts()), dtype=np.int64, count=accesses.trace.num_requests)


CURVES: Mapping[str, Curve] = {
    "lru": lru_curve,
    "fifo": replayed(Fifo),
    "leaf": replayed(LeafFirst),
    "session": replayed(SessionAware),
    "opt": opt_curve,
}
"""Policies by their name on the command line. A new one: a file in kvcore/eviction and an entry here."""

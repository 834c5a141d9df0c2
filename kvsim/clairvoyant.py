"""Belady's bound on runs: a cache that knows the whole trace and evicts what is needed last.

A request needs the first block of a stream no later than any other of it, so that what is needed last is the end of
some stream, and what is held of a stream is its first blocks. A cache is then one number for each stream, and an
eviction takes the end of a run, whatever its blocks count. (Belady, "A study of replacement algorithms", 1966.)
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[np.int64]
StreamRun: TypeAlias = tuple[int, int, int]
"""(stream, start, end): blocks [start, end) of a stream."""
Need: TypeAlias = tuple[int, int, int, int]
"""(-next request that needs them, -end, stream, start) of blocks that are used now: the least is needed last."""


@dataclass(frozen=True, slots=True)
class Future:
    """By request: the runs it uses, root first, and when each part of them is needed next."""

    runs: list[list[StreamRun]]
    needs: list[list[Need]]


def future(
    num_requests: int, runs: Iterator[tuple[int, StreamRun]], reuses: Iterator[tuple[int, int, StreamRun]]
) -> Future:
    """Of (request, run) in order, and of every reuse (request, the request before that used these blocks, run)."""
    runs_of: list[list[StreamRun]] = [[] for _ in range(num_requests)]
    needs: list[list[Need]] = [[] for _ in range(num_requests)]
    needed: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(num_requests)]
    for request, run in runs:
        runs_of[request].append(run)
    for request, before, (stream, start, end) in reuses:
        needs[before].append((-request, -end, stream, start))
        needed[before][stream] = max(end, needed[before][stream])
    for request, used in enumerate(runs_of):
        for stream, start, end in used:
            rest = max(start, needed[request][stream])
            if rest < end:
                needs[request].append((-num_requests, -end, stream, rest))
    return Future(runs_of, needs)


def hit_blocks(coming: Future, capacity_blocks: int) -> Column:
    """Leading blocks of each request that a cache of this capacity (>= 0) holds when it comes."""
    held_end: dict[int, int] = {}
    heap: list[Need] = []
    hits: list[int] = []
    size_blocks = 0
    for runs, needs in zip(coming.runs, coming.needs, strict=True):
        hits.append(_leading(runs, held_end))
        for stream, start, end in runs:
            size_blocks += max(0, end - held_end.get(stream, start))
            held_end[stream] = max(end, held_end.get(stream, start))
        for need in needs:
            heappush(heap, need)
        _evict(heap, held_end, size_blocks - capacity_blocks)
        size_blocks = min(size_blocks, capacity_blocks)
    return np.array(hits, dtype=np.int64)


def _leading(runs: Sequence[StreamRun], held_end: dict[int, int]) -> int:
    found = 0
    for stream, start, end in runs:
        held = min(held_end.get(stream, start), end)
        found += held - start
        if held < end:
            break
    return found


def _evict(heap: list[Need], held_end: dict[int, int], num_blocks: int) -> None:
    """Take out the blocks needed last; each held block is in one entry whose request is still to come."""
    while num_blocks > 0:
        when, negated_end, stream, start = heap[0]
        new_end = max(start, -negated_end - num_blocks)
        num_blocks -= -negated_end - new_end
        held_end[stream] = new_end
        if new_end > start:
            heapreplace(heap, (when, -new_end, stream, start))
        else:
            heappop(heap)

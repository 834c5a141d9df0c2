"""Set algebra on runs: every function takes and returns sorted, disjoint, non-empty, non-adjacent runs.

All are linear in the number of runs, never in the number of blocks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvcore.types import Run, Runs


def normalize(runs: Iterable[Run]) -> Runs:
    """Runs covering the same blocks as `runs`, which may overlap, touch, be empty or come in any order."""
    merged: list[Run] = []
    for start, end in sorted(runs):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            last_start, last_end = merged[-1]
            merged[-1] = (last_start, max(last_end, end))
        else:
            merged.append((start, end))
    return tuple(merged)


def single(run: Run) -> Runs:
    """The run, unless it is empty."""
    return (run,) if run[0] < run[1] else ()


def from_blocks(blocks: Iterable[int]) -> Runs:
    """The runs that hold exactly the given block indices."""
    return normalize((block, block + 1) for block in blocks)


def num_blocks(runs: Runs) -> int:
    """How many blocks the runs hold."""
    total = 0
    for start, end in runs:
        total += end - start
    return total


def union(left: Runs, right: Runs) -> Runs:
    """Blocks in either."""
    if not left or not right:
        return left or right
    (last, end), (start, first_end) = left[-1], right[0]
    if end < start:
        return left + right
    if end == start:
        return (*left[:-1], (last, first_end), *right[1:])
    return normalize(left + right)


def intersect(left: Runs, right: Runs) -> Runs:
    """Blocks in both."""
    if not left or left == right:
        return left
    if len(right) == 1:
        return _clip(left, *right[0])
    common: list[Run] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(left: Runs, right: Runs) -> Runs:
    """Blocks of `left` that are not in `right`."""
    if not right or not left:
        return left
    rest: list[Run] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return tuple(rest)


def _clip(runs: Runs, start: int, end: int) -> Runs:
    """Blocks of `runs` in [start, end)."""
    inside = runs[slice(*overlap(runs, start, end))]
    if not inside or (start <= inside[0][0] and inside[-1][1] <= end):
        return inside
    if len(inside) == 1:
        return ((max(start, inside[0][0]), min(end, inside[0][1])),)
    return ((max(start, inside[0][0]), inside[0][1]), *inside[1:-1], (inside[-1][0], min(end, inside[-1][1])))


def overlap(parts: Sequence[tuple[int, int, *tuple[object, ...]]], start: int, end: int) -> tuple[int, int]:
    """Indices [first, last) of the parts (start, end, ...), sorted and disjoint, that hold a block of [start, end)."""
    first = bisect_left(parts, (start,))
    last = bisect_left(parts, (end,), first)
    return first - (first > 0 and parts[first - 1][1] > start), last

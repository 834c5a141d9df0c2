"""Hit length on runs: linear in the runs that are present, whatever the number of blocks."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from kvcore.spec import GroupSpec, ModelSpec
from kvcore.types import Runs
from kvcore.units import align_down, div_ceil


def hit_len(model: ModelSpec, present: Sequence[Runs], limit: int) -> int:
    """Tokens that need not be computed: the largest boundary <= `limit` at which every group's blocks are present.

    `present` holds the blocks of each group, in the model's order. Each group lowers the candidate until all agree;
    the candidate only falls, and to boundaries that one group allows, so the loop ends.
    """
    candidate = align_down(limit, model.alignment)
    agreed = 0
    while agreed < len(model.groups):
        agreed = 0
        for group, runs in zip(model.groups, present, strict=True):
            allowed = _group_hit_len(group, runs, candidate, model.alignment)
            if allowed == candidate:
                agreed += 1
            candidate = allowed
    return candidate


def _group_hit_len(group: GroupSpec, runs: Runs, limit: int, alignment: int) -> int:
    """Largest aligned length <= `limit` whose needed blocks lie in `runs`.

    Needed ranges are monotone. So within one run [start, end) only the largest aligned length that ends in it has to
    be tried: if its range begins before `start`, that of every shorter length does too.
    """
    best = align_down(limit, math.lcm(alignment, group.free_step)) if group.free_step else 0
    for index in reversed(range(bisect_left(runs, (div_ceil(limit, group.block_size),)))):
        start, end = runs[index]
        if end * group.block_size <= best:
            break
        length = align_down(min(limit, end * group.block_size), alignment)
        first, last = group.needed_blocks(length)
        if length > best and start <= first and last <= end:
            return length
    return best

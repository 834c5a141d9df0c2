"""Hit length on runs: linear in the runs that are present, whatever the number of blocks."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from kvcore.spec import ModelSpec
from kvcore.types import Runs
from kvcore.units import align_down, div_ceil


def hit_len(model: ModelSpec, present: Sequence[Runs], limit: int) -> int:
    """Tokens that need not be computed: the largest boundary <= `limit` at which every group's proof is present.

    `present` holds the blocks of each group, in the model's order; `limit` as `ModelSpec.limit` gives it. Each group
    lowers the candidate until all agree; the candidate only falls, and to boundaries that one group allows, so the loop
    ends.
    """
    candidate = align_down(limit, model.alignment)
    agreed = 0
    while agreed < len(model.groups):
        agreed = 0
        for group, runs in enumerate(present):
            allowed = _group_hit_len(model, group, runs, candidate)
            if allowed == candidate:
                agreed += 1
            candidate = allowed
    return candidate


def _group_hit_len(model: ModelSpec, group: int, runs: Runs, limit: int) -> int:
    """Largest aligned length <= `limit` whose proof lies in `runs`.

    Proof ranges are monotone. So within one run [start, end) only the largest aligned length whose proof ends in it has
    to be tried: if its range begins before `start`, that of every shorter length does too.
    """
    spec, margin = model.groups[group], model.margins[group]
    best = 0
    if spec.free_step and not margin:
        best = align_down(limit, math.lcm(model.alignment, spec.free_step))
    for index in reversed(range(bisect_left(runs, (div_ceil(limit + margin, spec.block_size),)))):
        start, end = runs[index]
        length = align_down(min(limit, end * spec.block_size - margin), model.alignment)
        if length <= best:
            break
        first, last = model.proof_blocks(group, length)
        if start <= first and last <= end:
            return length
    return best

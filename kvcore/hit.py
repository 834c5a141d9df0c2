"""Hit length on runs: linear in the runs that are present, whatever the number of blocks."""

from collections.abc import Sequence

from kvcore.spec import GroupSpec, ModelSpec
from kvcore.types import Runs
from kvcore.units import align_down


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
    best = group.free_boundary(limit, alignment)
    for start, end in reversed(runs):
        if end * group.block_size <= best:
            break
        length = align_down(min(limit, end * group.block_size), alignment)
        if length > best and group.needed_blocks(length)[0] >= start:
            return length
    return best

"""Which blocks are worth asking for, and which are worth keeping: unions of needed ranges over boundaries.

Mode `exact`: the definition. The `*_runs` functions are what the planner uses; the `*_mask` functions follow the
engine's contract, a list of bool per group, or None where every block is meant.
"""

from kvcore.boundaries import Boundaries, hit_boundaries, store_boundaries
from kvcore.runs import intersect, normalize
from kvcore.spec import GroupSpec, ModelSpec
from kvcore.types import Run, Runs
from kvcore.units import align_up

Mask = list[bool] | None


def lookup_runs(model: ModelSpec, low: int, high: int) -> tuple[Runs, ...]:
    """Per group, the blocks that any hit of low < length <= high needs; no retention, as writers differ in theirs."""
    boundaries = hit_boundaries(model.alignment)
    return tuple(_needed_runs(group, boundaries, low, high) for group in model.groups)


def store_runs(
    model: ModelSpec, blocks: tuple[Run, ...], retention_interval: int | None, num_prompt_tokens: int
) -> tuple[Runs, ...]:
    """Per group, the blocks of the range `blocks[group]` that some later request can need.

    A group that is not saved by position keeps none. A prefix-closed group keeps all: any longer sequence needs them.
    """
    boundaries = store_boundaries(model.alignment, retention_interval, num_prompt_tokens)
    return tuple(
        _kept_runs(group, run, boundaries, model.alignment) for group, run in zip(model.groups, blocks, strict=True)
    )


def lookup_mask(model: ModelSpec, aligned_len: int) -> tuple[Mask, ...]:
    """Per group, whether block i in [0, aligned_len // block_size) can serve a hit; None: every one can."""
    runs = lookup_runs(model, 0, aligned_len)
    ends = (aligned_len // group.block_size for group in model.groups)
    return tuple(_mask(group_runs, (0, end)) for group_runs, end in zip(runs, ends, strict=True))


def store_mask(
    model: ModelSpec,
    aligned_len: int,
    start_len: int = 0,
    retention_interval: int | None = None,
    num_prompt_tokens: int | None = None,
) -> tuple[Mask, ...]:
    """Per group, whether the i-th block from `start_len` up to `aligned_len` is to be kept; None: every one is.

    Lengths in tokens. `num_prompt_tokens` None: the prompt's end is not known, and no replay boundary is kept for it.
    """
    blocks = tuple(_block_range(group, start_len, aligned_len) for group in model.groups)
    kept = store_runs(model, blocks, retention_interval, num_prompt_tokens or 0)
    return tuple(_mask(runs, run) for runs, run in zip(kept, blocks, strict=True))


def _needed_runs(group: GroupSpec, boundaries: Boundaries, low: int, high: int) -> Runs:
    """Union of the needed ranges of the boundaries in (low, high]."""
    if group.prefix_closed:
        return normalize((group.needed_blocks(boundaries.last(low, high)),))
    return normalize(group.needed_blocks(length) for length in boundaries.between(low, high))


def _kept_runs(group: GroupSpec, run: Run, boundaries: Boundaries, alignment: int) -> Runs:
    """The part of `run` that the boundaries need; those beyond its end count while their range reaches back into it."""
    start, end = run
    if not group.positional or start >= end:
        return ()
    if group.prefix_closed:
        return (run,)
    low, high = start * group.block_size, _last_length_that_reaches(group, end, boundaries, alignment)
    return intersect(_needed_runs(group, boundaries, low, high), (run,))


def _last_length_that_reaches(group: GroupSpec, end: int, boundaries: Boundaries, alignment: int) -> int:
    """A length whose needed range, like that of every longer one, starts at block `end` or later."""
    length = align_up(end * group.block_size, alignment)
    step = max(alignment, boundaries.step or 0)
    while group.needed_blocks(length)[0] < end:
        length += step
    return length


def _block_range(group: GroupSpec, start_len: int, end_len: int) -> Run:
    end = end_len // group.block_size
    return (min(end, align_up(start_len, group.block_size) // group.block_size), end)


def _mask(runs: Runs, run: Run) -> Mask:
    start, end = run
    if runs == normalize((run,)):
        return None
    mask = [False] * (end - start)
    for first, last in intersect(runs, ((start, end),)):
        mask[first - start : last - start] = [True] * (last - first)
    return mask

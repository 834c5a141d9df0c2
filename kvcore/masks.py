"""Which blocks are worth asking for, and which are worth keeping: unions of needed ranges over boundaries.

Mode `exact`: the definition. The `*_runs` functions are what the planner uses; the `*_mask` functions follow the
engine's contract, a list of bool per group, or None where every block is meant.
"""

from collections.abc import Callable
from typing import TypeAlias

from kvcore.boundaries import Boundaries, hit_boundaries, store_boundaries
from kvcore.errors import require
from kvcore.runs import intersect, normalize, union
from kvcore.spec import GroupSpec, ModelSpec
from kvcore.types import Run, Runs
from kvcore.units import align_up

Mask: TypeAlias = "list[bool] | None"

Retention: TypeAlias = "int | tuple[int | None, ...] | None"
"""Tokens between the lengths that a writer keeps resumable, of all groups or of each; see `store_boundaries`."""


def lookup_runs(model: ModelSpec, low: int, high: int) -> tuple[Runs, ...]:
    """Per group, the blocks that any hit of low < length <= high needs; no retention, as writers differ in theirs."""
    boundaries = hit_boundaries(model)
    return _once_per_spec(model, lambda group: _proof_runs(model, group, boundaries, low, high))


def store_runs(
    model: ModelSpec, blocks: tuple[Run, ...], retention: Retention, num_prompt_tokens: int
) -> tuple[Runs, ...]:
    """Per group, the blocks of the range `blocks[group]` that some later request can need.

    A group that is not saved by position keeps none. A prefix-closed group keeps all: any longer sequence needs them.
    Groups of one spec have one range.
    """
    boundaries = tuple(
        store_boundaries(model, interval, num_prompt_tokens) for interval in _intervals(model, retention)
    )
    if len(set(boundaries)) > 1:
        groups = range(len(model.groups))
        return tuple(_kept_runs(model, group, blocks[group], boundaries[group]) for group in groups)
    return _once_per_spec(model, lambda group: _kept_runs(model, group, blocks[group], boundaries[group]))


def lookup_mask(model: ModelSpec, aligned_len: int) -> tuple[Mask, ...]:
    """Per group, whether block i in [0, aligned_len // block_size) can serve a hit; None: every one can."""
    runs = lookup_runs(model, 0, aligned_len)
    ends = (aligned_len // group.block_size for group in model.groups)
    return tuple(_mask(group_runs, (0, end)) for group_runs, end in zip(runs, ends, strict=True))


def store_mask(
    model: ModelSpec,
    aligned_len: int,
    start_len: int = 0,
    retention: Retention = None,
    num_prompt_tokens: int | None = None,
) -> tuple[Mask, ...]:
    """Per group, whether the i-th block from `start_len` up to `aligned_len` is to be kept; None: every one is.

    Lengths in tokens. `num_prompt_tokens` None: the prompt's end is not known, and no replay boundary is kept for it.
    """
    blocks = tuple(block_range(group, start_len, aligned_len) for group in model.groups)
    kept = store_runs(model, blocks, retention, num_prompt_tokens or 0)
    return tuple(_mask(runs, run) for runs, run in zip(kept, blocks, strict=True))


def _intervals(model: ModelSpec, retention: Retention) -> tuple[int | None, ...]:
    if not isinstance(retention, tuple):
        return (retention,) * len(model.groups)
    require(len(retention) == len(model.groups), "retention", retention, f"one interval for each of {model.groups}")
    return retention


def _once_per_spec(model: ModelSpec, runs_of: Callable[[int], Runs]) -> tuple[Runs, ...]:
    """Per group, its runs; groups of one spec have the same."""
    seen: dict[GroupSpec, Runs] = {}
    for group, spec in enumerate(model.groups):
        if spec not in seen:
            seen[spec] = runs_of(group)
    return tuple(seen[spec] for spec in model.groups)


def _proof_runs(model: ModelSpec, group: int, boundaries: Boundaries, low: int, high: int) -> Runs:
    """Union of the proof ranges of the boundaries in (low, high]."""
    if model.groups[group].prefix_closed:
        last = boundaries.last(low, high)
        return normalize((model.proof_blocks(group, last),)) if last else ()
    regular = model.groups[group].needed_runs(boundaries.regular(low, high), model.margins[group])
    return union(regular, normalize(model.proof_blocks(group, length) for length in boundaries.odd(low, high)))


def _kept_runs(model: ModelSpec, group: int, run: Run, boundaries: Boundaries) -> Runs:
    """The part of `run` that the boundaries need; those whose range only reaches into it count."""
    spec, (start, end) = model.groups[group], run
    if not spec.positional or start >= end:
        return ()
    if spec.prefix_closed:
        return (run,)
    low = max(0, start * spec.block_size - model.margins[group])
    high = _last_length_that_reaches(model, group, end, boundaries)
    return intersect(_proof_runs(model, group, boundaries, low, high), (run,))


def _last_length_that_reaches(model: ModelSpec, group: int, end: int, boundaries: Boundaries) -> int:
    """A length whose needed range, like that of every longer one, starts at block `end` or later."""
    spec = model.groups[group]
    length = align_up(end * spec.block_size, model.alignment)
    step = max(model.alignment, boundaries.step or 0)
    while spec.needed_blocks(length)[0] < end:
        length, step = length + step, 2 * step
    return length


def block_range(group: GroupSpec, start_len: int, end_len: int) -> Run:
    """The blocks that begin and end in the tokens [start_len, end_len)."""
    end = end_len // group.block_size
    return (min(end, align_up(start_len, group.block_size) // group.block_size), end)


def _mask(runs: Runs, run: Run) -> Mask:
    inside = intersect(runs, (run,))
    return None if inside == normalize((run,)) else spelled_out(inside, run)


def spelled_out(runs: Runs, run: Run) -> list[bool]:
    """Whether each block of `run` is in `runs`, which lie in it."""
    start, end = run
    mask = [False] * (end - start)
    for first, last in runs:
        mask[first - start : last - start] = [True] * (last - first)
    return mask

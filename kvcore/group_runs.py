"""The same set algebra, group by group: what plans and answers carry."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvcore.runs import intersect, num_blocks, single, subtract, union
from kvcore.types import Run, Runs

GroupRuns: TypeAlias = tuple[Runs, ...]
"""One `Runs` per group, in the model's order; positions in the sequence. Tails follow: see `kvcore.tails`."""


def count_blocks(runs: GroupRuns) -> int:
    """Blocks in all groups."""
    return sum(map(num_blocks, runs))


def singles(runs: Iterable[Run]) -> GroupRuns:
    """One run, or none where it is empty, for each group."""
    return tuple(map(single, runs))


def common(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks in both."""
    if left == right or not any(left):
        return left
    return _per_group(intersect, left, right)


def minus(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks of `left` that are not in `right`."""
    if not any(right):
        return left
    if left == right:
        return ((),) * len(left)
    return _per_group(subtract, left, right)


def plus(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks in either."""
    if not any(right):
        return left
    if not any(left):
        return right
    return _per_group(union, left, right)


def _per_group(operation: Callable[[Runs, Runs], Runs], left: GroupRuns, right: GroupRuns) -> GroupRuns:
    if len(left) == 1 == len(right):
        return (operation(left[0], right[0]),)
    assert len(left) == len(right), (left, right)
    return tuple(map(operation, left, right))

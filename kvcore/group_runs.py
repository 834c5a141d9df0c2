"""The same set algebra, group by group: what plans and answers carry."""

from collections.abc import Callable
from typing import TypeAlias

from kvcore.runs import intersect, num_blocks, subtract, union
from kvcore.types import Runs

GroupRuns: TypeAlias = tuple[Runs, ...]
"""One `Runs` per group, in the model's order; positions in the sequence. Tails follow: see `kvcore.tails`."""


def count_blocks(runs: GroupRuns) -> int:
    """Blocks in all groups."""
    return sum(num_blocks(group_runs) for group_runs in runs)


def common(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks in both."""
    return _per_group(intersect, left, right)


def minus(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks of `left` that are not in `right`."""
    return _per_group(subtract, left, right)


def plus(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks in either."""
    return _per_group(union, left, right)


def _per_group(operation: Callable[[Runs, Runs], Runs], left: GroupRuns, right: GroupRuns) -> GroupRuns:
    return tuple(operation(a, b) for a, b in zip(left, right, strict=True))

"""A plan of one request while the worker half carries it out: what was asked for, and what the ranks have reported."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvconnector.jobs import Ended, Entry
from kvcore.group_runs import GroupRuns
from kvcore.keys import Namespace
from kvcore.runs import from_blocks

Place: TypeAlias = tuple[int, int]
"""(index in `GroupRuns`, position)."""


@dataclass(slots=True)
class PlanJob:
    """What was left out of the plan, its entries and their places, the blocks that a store has pinned.

    `tracked` is the caller's own; `end_plan(ticket, failed, now_ns)` ends the plan. The entries' keys are in
    `namespace`.
    """

    tracked: Any
    end_plan: Callable[[int, GroupRuns, int], int | None]
    ticket: int
    namespace: Namespace
    missing: list[Place]
    entries: tuple[Entry, ...]
    places: list[Place]
    pinned: list[Any]
    ranks_left: int
    _failed: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)

    def ended(self, report: Ended) -> bool:
        """Some ranks are done with it; whether now all are."""
        self.ranks_left -= report.num_ranks
        self._failed.update(report.failed)
        self._gone.update(report.gone)
        return self.ranks_left <= 0

    def failed(self, num_indices: int) -> GroupRuns:
        """What was not moved by every rank, and what was left out."""
        return _runs((*self.missing, *(self.places[entry] for entry in self._failed)), num_indices)

    def moved(self, num_indices: int) -> GroupRuns:
        """What was moved by every rank."""
        moved = (place for entry, place in enumerate(self.places) if entry not in self._failed)
        return _runs(moved, num_indices)

    def gone(self, num_indices: int) -> GroupRuns:
        """What a load found not to be in the pool."""
        return _runs((self.places[entry] for entry in self._gone), num_indices)


def _runs(places: Iterable[Place], num_indices: int) -> GroupRuns:
    blocks: list[list[int]] = [[] for _ in range(num_indices)]
    for index, position in places:
        blocks[index].append(position)
    return tuple(from_blocks(positions) for positions in blocks)

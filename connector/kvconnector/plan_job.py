"""A plan of one request while the worker half carries it out: what was asked for, and what the ranks have reported."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvconnector.block_table import Place
from kvconnector.jobs import Ended
from kvcore.group_runs import GroupRuns
from kvcore.keys import Namespace
from kvcore.runs import from_blocks


@dataclass(slots=True)
class PlanJob:
    """What was left out of the plan, the places of its entries in order, the blocks that a store has pinned.

    `tracked` is the caller's own; `end_plan(ticket, failed, now_ns)` ends the plan. The entries' keys are in
    `namespace`.
    """

    tracked: Any
    end_plan: Callable[[int, GroupRuns, int], int | None]
    ticket: int
    namespace: Namespace
    missing: Sequence[Place]
    places: Sequence[Place]
    pinned: Sequence[Any]
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
        return self._runs(self._failed, self.missing, num_indices)

    def moved(self, num_indices: int) -> GroupRuns:
        """What was moved by every rank."""
        numbers = range(sum(len(positions) for _, positions in self.places))
        return self._runs(set(numbers) - self._failed, (), num_indices)

    def gone(self, num_indices: int) -> GroupRuns:
        """What a load found not to be in the pool."""
        return self._runs(self._gone, (), num_indices)

    def _runs(self, entries: Collection[int], others: Sequence[Place], num_indices: int) -> GroupRuns:
        """The entries with these numbers, and the blocks of other places."""
        blocks: list[list[int]] = [[] for _ in range(num_indices)]
        for index, positions in others:
            blocks[index] += positions
        first = 0
        for index, positions in self.places if entries else ():
            blocks[index] += [position for number, position in enumerate(positions, first) if number in entries]
            first += len(positions)
        return tuple(from_blocks(positions) for positions in blocks)

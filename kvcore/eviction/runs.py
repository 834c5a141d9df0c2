"""Eviction on runs: policies for a tier that keeps runs of blocks, at a cost that does not grow with their length.

The tier numbers its calls and knows, of each run, the last one that used it. A policy adds who else stays young for it
(`Reach`), and in which lines those that may go wait (`Line`). Who may go at all and how many do is the tier's business:
leases, pins and watermarks are not known here.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from heapq import heappop, heappush
from typing import ClassVar, Protocol, TypeAlias

from kvcore.types import GroupId, StreamId

Lineage: TypeAlias = tuple[GroupId, StreamId]
"""Blocks of one group whose content one stream names."""

Piece: TypeAlias = tuple[Lineage, int, int]
"""Blocks [start, end) of a sequence, which one lineage names."""

Candidate: TypeAlias = tuple[int, int, int, Lineage]
"""(last call, -end, start, lineage) of blocks [start, end) that may go, from their end.

In their own order, the longest unused come first, and of one call's the deepest.
"""


class Reach(Enum):
    """What a use keeps young; where it is leased, what is leased with it."""

    BLOCK = "the block itself"
    PREFIX = "and all before it in its sequence, up to the first that is not held"


class Line(Protocol):
    """Runs that may go, in some order. Entries may be out of date: whoever takes one must look, and take the next."""

    def __iter__(self) -> Iterator[Candidate]:
        """Everyone in line, in any order."""

    def offer(self, candidate: Candidate) -> None:
        """May go from now on."""

    def take(self) -> Candidate | None:
        """Who goes next, out of the line; None when nobody stands there."""


class RunPolicy(Protocol):
    """The run form of an `EvictionPolicy`; the pieces of one call have no block in common."""

    reach: ClassVar[Reach]

    def arrive(self, call: int) -> None:
        """A call comes; its number is the time."""

    def use(self, pieces: Sequence[Piece]) -> None:
        """These have entered, or are held and wanted by another request."""

    def touch(self, pieces: Sequence[Piece]) -> None:
        """These are held, and were read for a use that was told before, or reached by one."""

    def line(self) -> Line:
        """A new line, for runs that are compared with one another only."""


class AgeLine:
    """The longest unused go first, of one call's the deepest."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[Candidate] = []

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._heap)

    @property
    def first(self) -> int | None:
        """The last call of who goes next."""
        return self._heap[0][0] if self._heap else None

    def offer(self, candidate: Candidate) -> None:
        """In its place."""
        heappush(self._heap, candidate)

    def take(self) -> Candidate | None:
        """The oldest."""
        return heappop(self._heap) if self._heap else None

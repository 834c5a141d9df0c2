"""Whom a read gets its bytes from, and from which type of replica."""

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage, Piece
from kvcore.types import Run, Runs
from kvsim.pool.places import Place, Ring, phase

PlacesOf: TypeAlias = Callable[[Lineage, int, int], list[Place]]
"""(lineage, start, end) -> where these blocks are."""


class ReplicaType(Enum):
    """Where a replica lies: as Mooncake's ReplicaType, whose LOCAL_DISK is here the one kind of disk."""

    MEMORY = "memory"
    DISK = "disk"


class Source(NamedTuple):
    """A client, which is the instance that lends the memory or owns the disk, and which of the two is read."""

    client: int
    replica_type: ReplicaType


@dataclass(frozen=True, slots=True)
class View:
    """What a reader goes by: its `own` segments, those `gone` that the master knows of, and those that are `silent`."""

    own: Container[int] = ()
    gone: Container[int] = ()
    silent: Container[int] = ()

    def choice(self, holders: Ring) -> int | None:
        """The copy that is read: its own before the first of those that the master names."""
        there = [segment for segment in holders if segment not in self.gone]
        return next((segment for segment in there if segment in self.own), there[0] if there else None)

    def fails(self, holders: Ring) -> bool:
        """Whether that copy cannot be read; 0.3.13 tries no other."""
        chosen = self.choice(holders)
        return chosen is None or chosen in self.silent


def read_from(place: Place, start_phase: int, view: View) -> Counter[int]:
    """How many of the place's blocks are read from each segment."""
    read = Counter[int]()
    for index, count in enumerate(place.counts(start_phase)):
        chosen = view.choice(place.holders(index))
        if count and chosen is not None:
            read[chosen] += count
    return read


def readable(wanted: Iterable[Piece], places: PlacesOf, view: View) -> Runs:
    """Of blocks that have places, those of which the copy that is chosen can be read."""
    wanted = list(wanted)
    runs = runs_of.normalize((start, end) for _, start, end in wanted)
    if not view.silent:
        return runs
    fail: list[Run] = []
    for lineage, start, end in wanted:
        for place in places(lineage, start, end):
            fail.extend(place.blocks(phase(lineage), view.fails))
    return runs_of.subtract(runs, runs_of.normalize(fail))

"""Whom a read gets its bytes from, and from which tier."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Set
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvcore import runs as runs_of
from kvcore.eviction.runs import Lineage, Piece
from kvcore.types import Run, Runs
from kvsim.pool.places import Place, Ring, phase

PlacesOf: TypeAlias = Callable[[Lineage, int, int], list[Place]]
"""(lineage, start, end) -> where these blocks are."""


class Tier(Enum):
    """Where the bytes lie."""

    MEMORY = "memory"
    DISK = "disk"


class Source(NamedTuple):
    """A client, which is the instance that lends the memory or owns the disk, and one of its tiers."""

    client: int
    tier: Tier


def read_from(place: Place, start_phase: int, own: Container[int], gone: Container[int]) -> Counter[int]:
    """How many of the place's blocks are read from each segment: one of the reader's own before the first copy's."""
    read = Counter[int]()
    for index, count in enumerate(place.counts(start_phase)):
        chosen = _choice(place.holders(index), own, gone)
        if count and chosen is not None:
            read[chosen] += count
    return read


def reachable(wanted: Iterable[Piece], places: PlacesOf, gone: Set[int]) -> Runs:
    """Of blocks that have places, those of which a copy is in a segment that is not gone."""
    wanted = list(wanted)
    runs = runs_of.normalize((start, end) for _, start, end in wanted)
    if not gone:
        return runs
    dead: list[Run] = []
    for lineage, start, end in wanted:
        for place in places(lineage, start, end):
            dead.extend(place.without(gone, phase(lineage)))
    return runs_of.subtract(runs, runs_of.normalize(dead))


def _choice(holders: Ring, own: Container[int], gone: Container[int]) -> int | None:
    there = [segment for segment in holders if segment not in gone]
    return next((segment for segment in there if segment in own), there[0] if there else None)

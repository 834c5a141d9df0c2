"""What is moved, and between which sites: the words of everything that carries bytes."""

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple

from kvcore.group_runs import GroupRuns
from kvcore.runs import num_blocks as count_runs
from kvcore.units import div_ceil


class Tier(Enum):
    """Where blocks lie, seen from an instance; beside its GPU cache, which nothing has to be moved from."""

    HOST = "host"
    """The instance's private cache in its own host memory."""
    LOCAL = "local"
    """The pool's segment in the instance's own host memory."""
    REMOTE = "remote"
    """The pool's memory elsewhere."""
    DISK = "disk"
    """A drive below the pool's memory."""


TIERS = tuple(Tier)
"""In the order in which records number them."""


class Site(NamedTuple):
    """A tier, and whose memory or drive it is; None: of all the others, in equal parts."""

    tier: Tier
    owner: int | None = None


HOST = Site(Tier.HOST)
POOL = Site(Tier.REMOTE)
LOCAL = Site(Tier.LOCAL)


class Parcel(NamedTuple):
    """Blocks on their way: bytes, the objects they are, and the contiguous pieces each rank of the request moves."""

    size_bytes: int
    num_objects: int
    num_pieces: int


def divided(parcel: Parcel, weights: Sequence[int]) -> list[Parcel]:
    """The parcel in parts as the weights say, rounded so that they add up to it."""
    if len(weights) < 2:
        return [parcel][: len(weights)]
    total = max(1, sum(weights))
    ends = [[number * weight // total for number in parcel] for weight in accumulate(weights, initial=0)]
    return [Parcel(*[end - start for start, end in zip(*each, strict=True)]) for each in pairwise(ends)]


class Packing(NamedTuple):
    """Per group: what a block weighs in the pool, in how many pieces a rank has it, and how many ranks have it alike.

    Each rank loads all that it holds, so that replicas are moved several times; they are stored once, by ranks in turn.
    """

    block_bytes: tuple[int, ...]
    block_pieces: tuple[int, ...]
    num_replicas: tuple[int, ...]

    def loaded(self, blocks: GroupRuns) -> Parcel:
        """All the blocks, to every rank that holds them."""
        size_bytes = num_blocks = num_pieces = 0
        for runs, size, pieces, replicas in zip(blocks, *self, strict=True):
            count = count_runs(runs)
            size_bytes += count * size * replicas
            num_blocks += count
            num_pieces += count * pieces
        return Parcel(size_bytes, num_blocks, num_pieces)

    def stored(self, blocks: GroupRuns) -> Parcel:
        """All the blocks, once."""
        size_bytes = num_blocks = num_pieces = 0
        for runs, size, pieces, replicas in zip(blocks, *self, strict=True):
            count = count_runs(runs)
            size_bytes += count * size
            num_blocks += count
            num_pieces += div_ceil(count * pieces, replicas)
        return Parcel(size_bytes, num_blocks, num_pieces)


def num_requests(parcel: Parcel, slice_bytes: int, num_ranks: int) -> int:
    """How many requests each rank posts for its share: one for each piece, and more where a piece exceeds a slice."""
    if not parcel.num_pieces:
        return 0
    piece_bytes = div_ceil(parcel.size_bytes, parcel.num_pieces * num_ranks)
    return parcel.num_pieces * max(1, div_ceil(piece_bytes, slice_bytes))

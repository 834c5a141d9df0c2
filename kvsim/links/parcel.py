"""What is moved, and between which sites: the words of everything that carries bytes."""

from enum import Enum
from typing import NamedTuple

from kvcore.group_runs import GroupRuns
from kvcore.runs import num_blocks
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
    """A tier, and whose memory or drive it is; None where nobody says: then its own links are not in the way."""

    tier: Tier
    owner: int | None = None


HOST = Site(Tier.HOST)
POOL = Site(Tier.REMOTE)
"""Somewhere in the pool."""


class Parcel(NamedTuple):
    """Blocks on their way: bytes, the objects they are, and the contiguous pieces of GPU memory at one end."""

    size_bytes: int
    num_objects: int
    num_pieces: int


class Packing(NamedTuple):
    """What a block of each group weighs, and in how many pieces it lies in the memory of one rank."""

    block_bytes: tuple[int, ...]
    block_pieces: tuple[int, ...]

    def parcel(self, blocks: GroupRuns) -> Parcel:
        """All the blocks as one."""
        counts = [num_blocks(runs) for runs in blocks]
        size_bytes = sum([count * size for count, size in zip(counts, self.block_bytes, strict=True)])
        num_pieces = sum([count * pieces for count, pieces in zip(counts, self.block_pieces, strict=True)])
        return Parcel(size_bytes, sum(counts), num_pieces)


def num_requests(parcel: Parcel, slice_bytes: int, num_ranks: int) -> int:
    """How many requests each rank posts for its share: one for each piece, and more where a piece exceeds a slice."""
    if not parcel.num_pieces:
        return 0
    piece_bytes = div_ceil(parcel.size_bytes, parcel.num_pieces * num_ranks)
    return parcel.num_pieces * max(1, div_ceil(piece_bytes, slice_bytes))

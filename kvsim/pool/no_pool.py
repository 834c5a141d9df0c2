"""What stands where a pool would, when an instance has a private cache alone."""

from collections.abc import Iterator

from kvcore.eviction.runs import Piece
from kvcore.types import GroupId, Runs, Segments
from kvsim.pool.store import MooncakePool


class NoPool(MooncakePool):
    """Holds nothing, and lacks nothing that is put: it takes nothing, and refuses nothing."""

    def __init__(self, block_bytes: tuple[int, ...]) -> None:
        super().__init__(1, block_bytes, 0, 1.0, 1.0)

    def _absent(self, group: GroupId, segments: Segments, runs: Runs) -> Iterator[Piece]:
        """Nothing."""
        return iter(())

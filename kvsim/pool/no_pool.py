"""What stands where a pool would, when an instance has a private cache alone."""

from kvcore.hints import NO_HINTS, Hints
from kvcore.types import GroupId, Runs, Segments
from kvsim.pool.store import MooncakePool


class NoPool(MooncakePool):
    """Holds nothing, is offered nothing, and refuses nothing."""

    def __init__(self, block_bytes: tuple[int, ...]) -> None:
        super().__init__(1, block_bytes, 0, 1.0, 1.0)

    def put(
        self,
        group: GroupId,
        segments: Segments,
        runs: Runs,
        now_ns: int,
        hints: Hints = NO_HINTS,
        writer: int | None = None,
    ) -> Runs:
        """Not kept here, and nothing that anybody has to be told of."""
        return ()

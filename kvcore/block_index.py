"""`BlockIndex` over a set: what somebody holds, as far as this process was told."""

from collections.abc import Sequence

from kvcore.keys import BlockKey


class MemoryIndex:
    """An unbounded `kvcore.ports.BlockIndex`."""

    def __init__(self) -> None:
        self._held: set[BlockKey] = set()

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Per key, whether it is known to be held."""
        return [key in self._held for key in keys]

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Remember the keys as held; adding twice changes nothing."""
        self._held.update(keys)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget the keys; unknown ones are ignored."""
        self._held.difference_update(keys)

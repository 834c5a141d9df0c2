"""`KVStore` over a dict: the pool of unit tests, and the plainest statement of what a pool must do."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

from kvcore.errors import require
from kvcore.keys import BlockKey
from kvcore.ports import Clock, StoreOutcome

MemoryBuffer: TypeAlias = bytearray | memoryview
"""One key's bytes in this process; `get` writes into it, so a memoryview must be writable and contiguous."""


class WhenFull(Enum):
    """What a put does that does not fit."""

    EVICT = "evict"
    """Drop the objects whose last get or put is longest ago until it fits."""
    REFUSE = "refuse"
    """Answer NO_SPACE and drop nothing."""


class MemoryStore:
    """A `kvcore.ports.KVStore[MemoryBuffer]`, deterministic. `clock` decides whether a deadline has passed.

    It holds at most `capacity_bytes` of objects (None: no limit); an object larger than that is always NO_SPACE.
    """

    def __init__(
        self, clock: Clock, *, capacity_bytes: int | None = None, when_full: WhenFull = WhenFull.EVICT
    ) -> None:
        require(capacity_bytes is None or capacity_bytes >= 0, "capacity_bytes", capacity_bytes, ">= 0, or None")
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._when_full = when_full
        self._objects: dict[BlockKey, bytes] = {}  # in order of last use, oldest first
        self.used_bytes = 0

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """OK or MISSING per key; asking is not using."""
        if self._expired(deadline_ns):
            return [StoreOutcome.TIMEOUT] * len(keys)
        return [StoreOutcome.OK if key in self._objects else StoreOutcome.MISSING for key in keys]

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[MemoryBuffer], deadline_ns: int) -> list[StoreOutcome]:
        """Copy each key's bytes into its buffer; anything but OK leaves the buffer as it was."""
        _require_pairs(keys, buffers)
        if self._expired(deadline_ns):
            return [StoreOutcome.TIMEOUT] * len(keys)
        return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[MemoryBuffer], deadline_ns: int) -> list[StoreOutcome]:
        """Copy each buffer's bytes in, in order, so that a later key of the batch may evict an earlier one."""
        _require_pairs(keys, buffers)
        if self._expired(deadline_ns):
            return [StoreOutcome.TIMEOUT] * len(keys)
        return [self._put(key, bytes(buffer)) for key, buffer in zip(keys, buffers, strict=True)]

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """Forget each key; MISSING when it was not there."""
        if self._expired(deadline_ns):
            return [StoreOutcome.TIMEOUT] * len(keys)
        return [self._remove(key) for key in keys]

    def _expired(self, deadline_ns: int) -> bool:
        return self._clock.now_ns() >= deadline_ns

    def _get(self, key: BlockKey, buffer: MemoryBuffer) -> StoreOutcome:
        data = self._objects.get(key)
        if data is None:
            return StoreOutcome.MISSING
        target = memoryview(buffer).cast("B")
        if target.nbytes != len(data):
            return StoreOutcome.BAD_LENGTH
        target[:] = data
        self._use(key)
        return StoreOutcome.OK

    def _put(self, key: BlockKey, data: bytes) -> StoreOutcome:
        if key in self._objects:
            self._use(key)
            return StoreOutcome.OK
        if not self._make_room(len(data)):
            return StoreOutcome.NO_SPACE
        self._objects[key] = data
        self.used_bytes += len(data)
        return StoreOutcome.OK

    def _remove(self, key: BlockKey) -> StoreOutcome:
        data = self._objects.pop(key, None)
        if data is None:
            return StoreOutcome.MISSING
        self.used_bytes -= len(data)
        return StoreOutcome.OK

    def _use(self, key: BlockKey) -> None:
        self._objects[key] = self._objects.pop(key)

    def _make_room(self, size_bytes: int) -> bool:
        capacity_bytes = self._capacity_bytes
        if capacity_bytes is None or self.used_bytes + size_bytes <= capacity_bytes:
            return True
        if self._when_full is WhenFull.REFUSE or size_bytes > capacity_bytes:
            return False
        while self.used_bytes + size_bytes > capacity_bytes:
            self._remove(next(iter(self._objects)))
        return True


def _require_pairs(keys: Sequence[BlockKey], buffers: Sequence[MemoryBuffer]) -> None:
    require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")

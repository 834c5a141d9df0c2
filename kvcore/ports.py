"""What the decisions need from the world. Each port has one contract suite that every implementation passes."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, TypeVar

from kvcore.keys import BlockKey

BufferT = TypeVar("BufferT", contravariant=True)


class StoreOutcome(Enum):
    """What became of one key in a batch. Everything but OK is a miss to the caller, and is counted by name."""

    OK = "ok"
    MISSING = "missing"
    NO_SPACE = "no_space"
    BAD_LENGTH = "bad_length"
    BAD_CONTENT = "bad_content"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"


class BlockIndex(Protocol):
    """Which blocks somebody holds, from memory alone."""

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Per key, whether it is known to be held."""

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Remember the keys as held; adding twice changes nothing."""

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget the keys; unknown ones are ignored."""


class KVStore(Protocol[BufferT]):
    """A shared pool of KV blocks. One outcome per key, in order; no call outlives its deadline, and none raises for
    what the world does (only for a caller's mistake: a buffer too few).

    `deadline_ns` is on the clock of the port's owner; a call that starts at or after it is TIMEOUT for every key. The
    keys of one batch differ. A key's buffer is whatever the implementation moves bytes from and to (memory for the
    in-memory store, address ranges for Mooncake); after any outcome of `get` but OK its content means nothing.
    """

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """OK for each key that a `get` would find now, else MISSING or why it is not known."""

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[BufferT], deadline_ns: int) -> list[StoreOutcome]:
        """Fill each buffer with its key's bytes; BAD_LENGTH when the stored length differs from the buffer's.

        BAD_CONTENT, where content is verified, when the bytes are not what was put under this key.
        """

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[BufferT], deadline_ns: int) -> list[StoreOutcome]:
        """Store each buffer's bytes; OK also when the key was there already (its bytes stay)."""

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """Forget each key; MISSING when it was not there."""


class Clock(Protocol):
    """Monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never decreases."""

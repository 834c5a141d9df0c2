"""What a policy is, and the bounded cache that asks it."""

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import ClassVar, Generic, Protocol, TypeVar

from kvcore.errors import require

KeyT = TypeVar("KeyT", bound=Hashable)


class Order(Enum):
    """In which order a request's blocks enter and are used: what is used last is youngest."""

    ROOT_FIRST = "root first"
    LEAF_FIRST = "leaf first"


class EvictionPolicy(Protocol[KeyT]):
    """Orders the keys of a cache for eviction; it never holds a key that the cache does not."""

    order: ClassVar[Order]

    def arrive(self, number: int) -> None:
        """A request comes, the one of that number; what is told until the next one is of this one."""

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """A key that was not held now is; `parent` is the block before it in its sequence, held or not."""

    def use(self, key: KeyT) -> None:
        """A held key was used again."""

    def evict(self) -> KeyT:
        """The key that leaves; there is at least one."""

    def leave(self, key: KeyT) -> None:
        """A held key left for another reason."""


class BoundedCache(Generic[KeyT]):
    """Keys under a capacity. A request is looked up as one contiguous prefix before any of its blocks is used."""

    __slots__ = ("_held", "_num_requests", "_policy", "capacity_blocks")

    def __init__(self, capacity_blocks: int, policy: EvictionPolicy[KeyT]) -> None:
        require(capacity_blocks >= 0, "capacity_blocks", capacity_blocks, "at least 0")
        self.capacity_blocks = capacity_blocks
        self._policy = policy
        self._held: set[KeyT] = set()
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._held

    def request(self, keys: Sequence[KeyT], local_blocks: int = 0) -> int:
        """Blocks of a request, root first, distinct: how many leading ones were held. Then all of them are used.

        The first `local_blocks` are in a faster tier: they count as hits, and are neither asked for nor used here.
        """
        hit_blocks = local_blocks
        while hit_blocks < len(keys) and keys[hit_blocks] in self._held:
            hit_blocks += 1
        self._num_requests += 1
        self._policy.arrive(self._num_requests)
        used = range(local_blocks, len(keys))
        for block in used if self._policy.order is Order.ROOT_FIRST else reversed(used):
            self._touch(keys[block], keys[block - 1] if block else None)
        return hit_blocks

    def discard(self, key: KeyT) -> None:
        """Forget a key; one that is not held is ignored."""
        if key in self._held:
            self._held.remove(key)
            self._policy.leave(key)

    def _touch(self, key: KeyT, parent: KeyT | None) -> None:
        if key in self._held:
            self._policy.use(key)
            return
        self._held.add(key)
        self._policy.enter(key, parent)
        if len(self._held) > self.capacity_blocks:
            self._held.remove(self._policy.evict())

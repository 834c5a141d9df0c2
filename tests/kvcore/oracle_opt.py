"""Belady's bound block by block: evict what is needed last. `kvsim.clairvoyant` has it on runs."""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import ClassVar, Generic

from kvcore.eviction.policy import KeyT, Order


class OracleOpt(Generic[KeyT]):
    """The key whose next use is farthest away leaves, which may be the one that just entered.

    An oracle: it is given every coming use, in the order in which `enter` and `use` will report them. Root first: a
    prefix is needed before what extends it, so it stays a prefix.
    """

    order: ClassVar[Order] = Order.ROOT_FIRST

    __slots__ = ("_heap", "_next_of", "_next_use", "_now", "_uses")

    def __init__(self, uses: Iterable[KeyT]) -> None:
        self._uses = tuple(uses)
        self._next_use = _next_uses(self._uses)
        self._now = 0
        self._heap: list[int] = []  # negated next uses; those of keys that left or were used since are stale
        self._next_of: dict[KeyT, int] = {}

    def arrive(self, number: int) -> None:
        """Known before."""

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """Its next use is known from now on."""
        self.use(key)

    def use(self, key: KeyT) -> None:
        """Its next use is the one after this."""
        assert self._uses[self._now] == key, (self._now, key)
        following = self._next_use[self._now]
        self._now += 1
        self._next_of[key] = following
        heappush(self._heap, -following)

    def evict(self) -> KeyT:
        """The key needed last, or never."""
        while True:
            following = -heappop(self._heap)
            key = self._uses[following % len(self._uses)]
            if self._next_of.get(key) == following:
                del self._next_of[key]
                return key

    def leave(self, key: KeyT) -> None:
        """Not held any more."""
        del self._next_of[key]


def _next_uses(uses: tuple[KeyT, ...]) -> list[int]:
    """Per use, when its key is used next; where it never is, the use's own position beyond the end."""
    never = len(uses)
    next_use = list(range(never, 2 * never))
    seen: dict[KeyT, int] = {}
    for now in range(never - 1, -1, -1):
        next_use[now] = seen.get(uses[now], next_use[now])
        seen[uses[now]] = now
    return next_use

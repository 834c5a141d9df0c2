"""Least recently used (Denning, "The working set model for program behavior", CACM 1968)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, Generic

from kvcore.eviction.policy import KeyT, Order
from kvcore.eviction.runs import AgeLine, Line, Piece, Reach


class Lru(Generic[KeyT]):
    """The key unused for longest leaves. Leaf first: a prefix outlives what extends it, so it stays a prefix."""

    order: ClassVar[Order] = Order.LEAF_FIRST

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: OrderedDict[KeyT, None] = OrderedDict()  # oldest first

    def arrive(self, number: int) -> None:
        """No matter: the order of uses says it."""

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """Youngest."""
        self._keys[key] = None

    def use(self, key: KeyT) -> None:
        """Youngest again."""
        self._keys.move_to_end(key)

    def evict(self) -> KeyT:
        """The oldest."""
        return self._keys.popitem(last=False)[0]

    def leave(self, key: KeyT) -> None:
        """Out of the order."""
        del self._keys[key]


class LruRuns:
    """`Lru` on runs: age is all there is to know."""

    reach: ClassVar[Reach] = Reach.BLOCK

    def arrive(self, call: int) -> None:
        """The tier counts."""

    def use(self, pieces: Sequence[Piece]) -> None:
        """The tier knows."""

    def touch(self, pieces: Sequence[Piece]) -> None:
        """The tier knows."""

    def line(self) -> Line:
        """By age."""
        return AgeLine()

"""First in, first out: the order of entering, whatever is used. A control: what knowing the uses is worth beyond it."""

from collections import OrderedDict
from typing import ClassVar, Generic

from kvcore.eviction.policy import KeyT, Order


class Fifo(Generic[KeyT]):
    """The key that entered first leaves."""

    order: ClassVar[Order] = Order.ROOT_FIRST

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: OrderedDict[KeyT, None] = OrderedDict()  # first in line first

    def arrive(self, number: int) -> None:
        """No matter."""

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """Last in line."""
        self._keys[key] = None

    def use(self, key: KeyT) -> None:
        """Changes nothing."""

    def evict(self) -> KeyT:
        """First in line."""
        return self._keys.popitem(last=False)[0]

    def leave(self, key: KeyT) -> None:
        """Out of the line."""
        del self._keys[key]

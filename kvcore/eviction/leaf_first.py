"""Leaves of the prefix tree only, least recently used first (Zheng et al., "SGLang", NeurIPS 2024: RadixAttention)."""

from heapq import heapify, heappop, heappush
from typing import ClassVar, Generic

from kvcore.eviction.lru import LruRuns
from kvcore.eviction.policy import KeyT, Order
from kvcore.eviction.runs import Reach


class LeafFirst(Generic[KeyT]):
    """Of the keys that no held key extends, the one unused for longest leaves; of one request's, the deepest.

    Where every request uses its prompt from the root on, a prefix is never older than what extends it, and this is
    `Lru`. It differs in a tier below another one: what the faster tier has is not used here, so that by age alone the
    roots would go, and what extends them would stay and be of no use.
    """

    order: ClassVar[Order] = Order.LEAF_FIRST

    __slots__ = ("_age", "_heap", "_num_children", "_parent", "_used")

    def __init__(self) -> None:
        self._age: dict[KeyT, int] = {}  # of held keys, the number of their last use
        self._parent: dict[KeyT, KeyT | None] = {}
        self._num_children: dict[KeyT, int] = {}  # held ones, also of keys that are not held
        self._used = 0
        self._heap: list[tuple[int, KeyT]] = []  # leaves by last use; those used or extended since are stale

    def arrive(self, number: int) -> None:
        """No matter: the order of uses says it."""

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """One more child of its parent."""
        self._parent[key] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self.use(key)

    def use(self, key: KeyT) -> None:
        """Youngest."""
        self._used += 1
        self._age[key] = self._used
        self._offer(key)

    def evict(self) -> KeyT:
        """The oldest leaf."""
        while True:
            age, key = heappop(self._heap)
            if self._age.get(key) == age and key not in self._num_children:
                self.leave(key)
                return key

    def leave(self, key: KeyT) -> None:
        """Its parent may be a leaf now."""
        del self._age[key]
        parent = self._parent.pop(key)
        if parent is None:
            return
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._age:
                self._offer(parent)

    def _offer(self, key: KeyT) -> None:
        """Enter the queue if it is a leaf, which is rebuilt when most of it is stale."""
        if key in self._num_children:
            return
        heappush(self._heap, (self._age[key], key))
        if len(self._heap) > 4 * len(self._age) + 64:
            self._heap = [(age, leaf) for leaf, age in self._age.items() if leaf not in self._num_children]
            heapify(self._heap)


class LeafFirstRuns(LruRuns):
    """`LeafFirst` on runs, without a tree: LRU in which a use of a block is one of the held blocks before it.

    A prefix is then younger than what extends it, and leased as long, so the oldest run that may go ends in a leaf. It
    is the one `LeafFirst` takes: a prefix that it has kept for its leaves alone is the next to go in both. Two prefixes
    may go before what extends them: of what is pinned or of a higher priority, which is of another line; and behind a
    gap that was filled since what is beyond it was leased.
    """

    reach: ClassVar[Reach] = Reach.PREFIX

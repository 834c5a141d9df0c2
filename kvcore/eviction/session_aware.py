"""What is least likely to return goes first (Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025)."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar, Generic

from kvcore.eviction.policy import KeyT, Order

MAX_TURN = 16
"""Blocks of later turns are taken for ones of this turn."""


@dataclass(slots=True)
class _Turn(Generic[KeyT]):
    """Blocks that so many requests have used: those held, oldest first, and how it went on with all of them so far."""

    held: OrderedDict[KeyT, int] = field(default_factory=OrderedDict)
    """When each was used last."""
    num_used: int = 0
    num_returned: int = 0
    waited: int = 0
    """Sum of the times until they returned."""

    def worth(self, now: int) -> float:
        """Chance that the oldest returns, per time that takes: the mean wait of its turn, and the oldest's age."""
        age = now - next(iter(self.held.values()))
        returned = self.num_returned + 1
        return returned * returned / ((self.num_used + 2) * (self.waited + 1 + age * returned))


class SessionAware(Generic[KeyT]):
    """A block that n requests have used is in the n-th turn of its session; turns differ in how likely they go on.

    The paper learns, for each category of requests (kind and turn), how likely and how soon a block returns, and evicts
    what is least likely to, of one request the deepest first. Here the category is the turn alone, told by content, so
    that traces without names of sessions have it too; and instead of an exponential fit the chance falls with
    1 / (mean wait + age). What it knows is the past: of evicted blocks it remembers turn and time (`memory_blocks` of
    them), or it would take for ended what it had only forgotten. Time is counted in uses.
    """

    order: ClassVar[Order] = Order.LEAF_FIRST

    __slots__ = ("_gone", "_memory_blocks", "_now", "_turn", "_turns")

    def __init__(self, memory_blocks: int = 1_000_000) -> None:
        self._memory_blocks = memory_blocks
        self._turns: list[_Turn[KeyT]] = [_Turn() for _ in range(MAX_TURN)]
        self._turn: dict[KeyT, int] = {}  # of held keys
        self._gone: OrderedDict[KeyT, tuple[int, int]] = OrderedDict()  # (turn, last use), oldest first
        self._now = 0

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """Another turn of what was evicted, or the first of something new."""
        self._now += 1
        turn, used = self._gone.pop(key, (None, 0))
        self._begin(key, 0 if turn is None else self._next(turn, used))

    def use(self, key: KeyT) -> None:
        """Another turn."""
        self._now += 1
        turn = self._turn[key]
        self._begin(key, self._next(turn, self._turns[turn].held.pop(key)))

    def evict(self) -> KeyT:
        """Of the oldest of each turn, the one worth least."""
        turn = min((turn for turn in self._turns if turn.held), key=lambda turn: turn.worth(self._now))
        key, used = turn.held.popitem(last=False)
        self._gone[key] = (self._turn.pop(key), used)
        if len(self._gone) > self._memory_blocks:
            self._gone.popitem(last=False)
        return key

    def leave(self, key: KeyT) -> None:
        """Not held any more."""
        del self._turns[self._turn.pop(key)].held[key]

    def _next(self, turn: int, used: int) -> int:
        """A block of that turn has returned."""
        record = self._turns[turn]
        record.num_returned += 1
        record.waited += self._now - used
        return min(turn + 1, MAX_TURN - 1)

    def _begin(self, key: KeyT, turn: int) -> None:
        self._turn[key] = turn
        record = self._turns[turn]
        record.num_used += 1
        record.held[key] = self._now

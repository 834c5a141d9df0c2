"""What was learnt about blocks lately, by content: bounded, and forgotten after a while."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcore.errors import require
from kvcore.group_runs import GroupRuns
from kvcore.runs import from_blocks

NameOf: TypeAlias = Callable[[int, int], Hashable]
"""(index in `GroupRuns`, position in the sequence) -> what names that block's content."""


@dataclass(slots=True)
class BlockMemory:
    """Names of at most `capacity_blocks`, each for `ttl_ns` after it was last noted; the oldest is forgotten first."""

    capacity_blocks: int
    ttl_ns: int
    _noted_ns: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)  # oldest first, in constant time

    def __post_init__(self) -> None:
        require(self.capacity_blocks > 0, "capacity_blocks", self.capacity_blocks, "at least 1")
        require(self.ttl_ns > 0, "ttl_ns", self.ttl_ns, "more than 0")

    def __len__(self) -> int:
        return len(self._noted_ns)

    def note(self, blocks: GroupRuns, name_of: NameOf, now_ns: int) -> None:
        """Remember the blocks from now on."""
        for _, _, name in _named(blocks, name_of):
            self._noted_ns[name] = now_ns
            self._noted_ns.move_to_end(name)
        while len(self._noted_ns) > self.capacity_blocks:
            self._noted_ns.popitem(last=False)

    def forget(self, blocks: GroupRuns, name_of: NameOf) -> None:
        """The blocks mean nothing any more; unknown ones are ignored."""
        if self._noted_ns:
            for _, _, name in _named(blocks, name_of):
                self._noted_ns.pop(name, None)

    def known(self, blocks: GroupRuns, name_of: NameOf, now_ns: int) -> GroupRuns:
        """Those of the blocks that are remembered. Costs nothing while nothing is."""
        self._expire(now_ns)
        found: list[list[int]] = [[] for _ in blocks]
        if self._noted_ns:
            for index, block, name in _named(blocks, name_of):
                if name in self._noted_ns:
                    found[index].append(block)
        return tuple(from_blocks(known) for known in found)

    def clear(self) -> None:
        """Forget everything."""
        self._noted_ns.clear()

    def _expire(self, now_ns: int) -> None:
        """Names are in the order they were last noted."""
        while self._noted_ns:
            oldest, noted_ns = next(iter(self._noted_ns.items()))
            if now_ns - noted_ns < self.ttl_ns:
                return
            del self._noted_ns[oldest]


def _named(blocks: GroupRuns, name_of: NameOf) -> Iterator[tuple[int, int, Hashable]]:
    for index, runs in enumerate(blocks):
        for start, end in runs:
            for block in range(start, end):
                yield index, block, name_of(index, block)


@dataclass(slots=True)
class Experience:
    """What all requests of one engine have learnt about the pool; a reset of the namespace clears it.

    `denied`: a lookup found it and a load did not get it. Not asked for again until it is forgotten (10 s: the lease
    that such an answer promises in Mooncake 0.3.13) or stored.
    `unsaved`: this engine computed it and the pool does not have it, because it was refused or not admitted. Offered
    when it is touched next. 65,536 blocks of 16 tokens are a million tokens.
    `num_storing`: blocks of stores in flight, which a reset does not end.
    """

    denied: BlockMemory = field(default_factory=lambda: BlockMemory(65_536, 10 * 10**9))
    unsaved: BlockMemory = field(default_factory=lambda: BlockMemory(65_536, 3_600 * 10**9))
    num_storing: int = 0

    def clear(self) -> None:
        """Another namespace begins."""
        self.denied.clear()
        self.unsaved.clear()

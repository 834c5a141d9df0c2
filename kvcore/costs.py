"""What it takes to have tokens again: to fetch their blocks from the pool, or to compute them. Integer nanoseconds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvcore.errors import require
from kvcore.group_runs import GroupRuns
from kvcore.runs import num_blocks

PS_PER_NS = 1_000

PrefillTime: TypeAlias = Callable[[int, int], int]
"""(start_len, end_len) -> ns to compute tokens [start_len, end_len) of a sequence on an engine that does nothing else.

A pure function; more tokens never take less, and 0 tokens take 0.
"""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """A `PrefillTime` without a model of the hardware: `token_ns` a token, and `pair_ps` for each one before it."""

    token_ns: int
    pair_ps: int = 0

    def __post_init__(self) -> None:
        require(self.token_ns >= 0, "token_ns", self.token_ns, "at least 0")
        require(self.pair_ps >= 0, "pair_ps", self.pair_ps, "at least 0")

    def __call__(self, start_len: int, end_len: int) -> int:
        """Nanoseconds for tokens [start_len, end_len)."""
        num_pairs = (end_len * (end_len - 1) - start_len * (start_len - 1)) // 2
        return self.token_ns * (end_len - start_len) + self.pair_ps * num_pairs // PS_PER_NS


@dataclass(frozen=True, slots=True)
class Costs:
    """One engine's two ways to a token.

    `block_ns`: time on the way from the pool of one block of each group, and of one tail of each group that has them,
    as `GroupRuns` lists them. `latency_ns`: what a fetch takes beyond that, once. All of it without anybody else on the
    way: whoever decides by these numbers does not know the queue at the link, nor that of the engine.
    """

    prefill_ns: PrefillTime
    block_ns: tuple[int, ...]
    latency_ns: int = 0

    def __post_init__(self) -> None:
        valid = self.block_ns and all(block_ns >= 0 for block_ns in self.block_ns)
        require(valid, "block_ns", self.block_ns, "at least 0, for each group and tail")
        require(self.latency_ns >= 0, "latency_ns", self.latency_ns, "at least 0")

    def fetch_ns(self, blocks: GroupRuns) -> int:
        """Time to fetch the blocks one after the other; 0 when there are none."""
        if not any(blocks):
            return 0
        timed = zip(blocks, self.block_ns, strict=True)
        return self.latency_ns + sum(num_blocks(runs) * block_ns for runs, block_ns in timed)

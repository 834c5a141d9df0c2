"""One fact per attention type: which blocks must be present so that the next token can be computed.

Everything else (hit length, what to ask, load and store) follows from `needed_blocks`. A new attention type is one
small class here or in the caller's own module; nothing else changes.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from kvcore.errors import require
from kvcore.types import Run
from kvcore.units import align_down, div_ceil


@dataclass(frozen=True, slots=True)
class GroupSpec(ABC):
    """One KV cache group: layers that share a block table. `block_size` is in tokens.

    `needed_blocks` must be monotone: both ends grow with `prefix_len`, the start without bound unless `prefix_closed`.
    """

    block_size: int

    prefix_closed: ClassVar[bool] = False
    """Whether resuming at a length needs every block before it, so that a longer sequence needs them all again."""

    positional: ClassVar[bool] = True
    """Whether block i of the block table holds token range i for good, so that a block can be saved by its position."""

    def __post_init__(self) -> None:
        require(self.block_size > 0, "block_size", self.block_size, "tokens in a block, at least 1")

    @abstractmethod
    def needed_blocks(self, prefix_len: int) -> Run:
        """Blocks that must be present so that token `prefix_len` (0-based) can be computed next."""

    @property
    def free_step(self) -> int | None:
        """Nothing is needed at the multiples of this many tokens; None: only at 0."""
        return None


@dataclass(frozen=True, slots=True)
class FullAttention(GroupSpec):
    """MHA, GQA, MLA: every earlier token is read."""

    prefix_closed: ClassVar[bool] = True

    def needed_blocks(self, prefix_len: int) -> Run:
        """[0, n)."""
        return (0, div_ceil(prefix_len, self.block_size))


@dataclass(frozen=True, slots=True)
class SlidingWindow(GroupSpec):
    """A token reads itself and the `window` - 1 tokens before it; `extra_retained_tokens` more are kept unread."""

    window: int
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        GroupSpec.__post_init__(self)
        require(self.window > 0, "window", self.window, "tokens in the window, at least 1 (the token itself)")
        require(self.extra_retained_tokens >= 0, "extra_retained_tokens", self.extra_retained_tokens, "at least 0")

    def needed_blocks(self, prefix_len: int) -> Run:
        """The blocks that hold tokens [prefix_len - (window - 1) - extra, prefix_len)."""
        first_token = max(0, prefix_len - (self.window - 1) - self.extra_retained_tokens)
        return (first_token // self.block_size, div_ceil(prefix_len, self.block_size))

    @property
    def free_step(self) -> int | None:
        """A window of one token reads nothing of the past."""
        return self.block_size if self.window == 1 and not self.extra_retained_tokens else None


@dataclass(frozen=True, slots=True)
class ChunkedLocal(GroupSpec):
    """A token reads the tokens before it in its own chunk of `chunk` tokens, a multiple of the block size."""

    chunk: int

    def __post_init__(self) -> None:
        GroupSpec.__post_init__(self)
        aligned = self.chunk > 0 and self.chunk % self.block_size == 0
        require(aligned, "chunk", self.chunk, f"a multiple of block_size = {self.block_size}")

    def needed_blocks(self, prefix_len: int) -> Run:
        """From the start of the chunk that holds token `prefix_len`."""
        return (align_down(prefix_len, self.chunk) // self.block_size, div_ceil(prefix_len, self.block_size))

    @property
    def free_step(self) -> int | None:
        """A chunk's first token reads nothing."""
        return self.chunk


@dataclass(frozen=True, slots=True)
class Recurrent(GroupSpec):
    """Mamba, GDN, KDA: the one state at the boundary, kept in the last block.

    Its block table is not append-only, so it is never saved by position; the engine hands the state over at exact
    boundaries.
    """

    positional: ClassVar[bool] = False

    def needed_blocks(self, prefix_len: int) -> Run:
        """[n - 1, n)."""
        end = div_ceil(prefix_len, self.block_size)
        return (max(0, end - 1), end)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The KV cache groups of one model, in the engine's order."""

    groups: tuple[GroupSpec, ...]
    alignment: int = field(init=False)
    """Every hit ends on a multiple of this many tokens: the least common multiple of the block sizes."""

    def __post_init__(self) -> None:
        require(self.groups, "groups", self.groups, "at least one KV cache group")
        object.__setattr__(self, "alignment", math.lcm(*(group.block_size for group in self.groups)))

    @property
    def prefix_closed(self) -> bool:
        """Whether every group needs all earlier blocks, so that an engine keeps all of a running request."""
        return all(group.prefix_closed for group in self.groups)

    @property
    def loads_in_part(self) -> bool:
        """Whether a load that failed in part leaves the tokens before the first missing block usable.

        Of several groups the engine cannot be told which one failed. Of a window it would resume at the first missing
        block, whose own past was never loaded. Such a request starts over.
        """
        return len(self.groups) == 1 and self.prefix_closed

"""One fact per attention type: which blocks must be present so that the next token can be computed.

Everything else (hit length, what to ask, load and store) follows from `needed_blocks`. A new attention type is one
small class here or in the caller's own module; nothing else changes.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from kvcore.errors import require
from kvcore.runs import normalize
from kvcore.types import Run, Runs
from kvcore.units import align_down, align_up, div_ceil


@dataclass(frozen=True, slots=True)
class GroupSpec(ABC):
    """One KV cache group: layers that share a block table. `block_size` is in tokens.

    `layout` tells apart groups of one shape that the engine does not treat as one, such as latent and grouped heads.
    `needed_blocks` must be monotone: both ends grow with `prefix_len`, the start without bound unless `prefix_closed`.
    """

    block_size: int
    layout: str = field(default="", kw_only=True)

    prefix_closed: ClassVar[bool] = False
    """Whether resuming at a length needs every block before it, so that a longer sequence needs them all again."""

    cacheable: ClassVar[bool] = True
    """Whether its blocks mean anything to another request."""

    splits_blocks: ClassVar[bool] = False
    """Whether a hit may end inside a block, on the hash unit."""

    drafts: ClassVar[bool] = True
    """Whether a draft head can have layers in it, so that EAGLE's proof applies."""

    positional: ClassVar[bool] = True
    """Whether block i of the block table holds token range i for good, so that a block can be saved by its position."""

    def __post_init__(self) -> None:
        require(self.block_size > 0, "block_size", self.block_size, "tokens in a block, at least 1")

    @abstractmethod
    def needed_blocks(self, prefix_len: int) -> Run:
        """Blocks that must be present so that token `prefix_len` (0-based) can be computed next."""

    def needed_runs(self, lengths: range, margin: int) -> Runs:
        """Blocks that some of the lengths (ascending) needs, each with what lies `margin` tokens beyond it."""
        needed = map(self.needed_blocks, lengths)
        if not margin:
            return normalize(needed)
        ends = (div_ceil(length + margin, self.block_size) for length in lengths)
        return normalize((start, end) for (start, _), end in zip(needed, ends, strict=True))

    def unneeded_from(self, block: int) -> int | None:
        """Shortest prefix beyond the block that does not need it, nor does any longer one; None: there is none."""
        return None

    @property
    def free_step(self) -> int | None:
        """Nothing is needed at the multiples of this many tokens; None: only at 0."""
        return None


@dataclass(frozen=True, slots=True)
class FullAttention(GroupSpec):
    """MHA, GQA, MLA: every earlier token is read."""

    prefix_closed: ClassVar[bool] = True
    splits_blocks: ClassVar[bool] = True

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

    def needed_runs(self, lengths: range, margin: int) -> Runs:
        """All but the first windows are equally wide: either none of them touch, or they make one run."""
        size = self.block_size
        if len(lengths) < 2 or lengths.start % size or lengths.step % size or margin % size:
            return GroupSpec.needed_runs(self, lengths, margin)
        start, last, after = self.needed_blocks(lengths[-1])[0], lengths[-1] // size, margin // size
        if start <= lengths[-2] // size + after:
            return ((self.needed_blocks(lengths[0])[0], last + after),)
        ends = range(lengths.start // size, last + 1, lengths.step // size)
        return tuple([(max(0, end - last + start), end + after) for end in ends]) if start < last + after else ()

    def unneeded_from(self, block: int) -> int | None:
        """When its last token has left the window."""
        return (block + 1) * self.block_size + self.window - 1 + self.extra_retained_tokens

    @property
    def free_step(self) -> int | None:
        """A window of one token reads nothing of the past."""
        return self.block_size if self.window == 1 and not self.extra_retained_tokens else None


@dataclass(frozen=True, slots=True)
class ChunkedLocal(GroupSpec):
    """A token reads the tokens before it in its own chunk of `chunk` tokens."""

    chunk: int

    def __post_init__(self) -> None:
        GroupSpec.__post_init__(self)
        require(self.chunk > 0, "chunk", self.chunk, "tokens in a chunk, at least 1")

    def needed_blocks(self, prefix_len: int) -> Run:
        """From the start of the chunk that holds token `prefix_len`."""
        return (align_down(prefix_len, self.chunk) // self.block_size, div_ceil(prefix_len, self.block_size))

    def unneeded_from(self, block: int) -> int | None:
        """At the end of the chunk of its last token."""
        return align_up((block + 1) * self.block_size, self.chunk)

    @property
    def free_step(self) -> int | None:
        """A chunk's first token reads nothing."""
        return math.lcm(self.chunk, self.block_size)


@dataclass(frozen=True, slots=True)
class Recurrent(GroupSpec):
    """Mamba, GDN, KDA: the one state at the boundary, kept in the last block.

    Its block table is not append-only, so it is never saved by position; the engine hands the state over at exact
    boundaries.
    """

    positional: ClassVar[bool] = False
    splits_blocks: ClassVar[bool] = True
    drafts: ClassVar[bool] = False

    def needed_blocks(self, prefix_len: int) -> Run:
        """[n - 1, n)."""
        end = div_ceil(prefix_len, self.block_size)
        return (max(0, end - 1), end)

    def unneeded_from(self, block: int) -> int | None:
        """When there is a state behind its own."""
        return (block + 1) * self.block_size + 1


@dataclass(frozen=True, slots=True)
class Scratch(GroupSpec):
    """Circular buffers and the like: a request's own, never shared, never asked for."""

    cacheable: ClassVar[bool] = False
    positional: ClassVar[bool] = False
    drafts: ClassVar[bool] = False

    def needed_blocks(self, prefix_len: int) -> Run:
        """None."""
        return (0, 0)

    @property
    def free_step(self) -> int | None:
        """Nothing is needed anywhere."""
        return self.block_size


def sharded(group: GroupSpec, num_context_ranks: int) -> GroupSpec:
    """The group as decode context parallelism leaves it: a block of the table spans the tokens of all ranks.

    For groups whose tokens are dealt out over the ranks (full attention). Recurrent states and replicated draft layers
    keep their block size: each rank holds all of it.
    """
    require(num_context_ranks > 0, "num_context_ranks", num_context_ranks, "ranks, at least 1")
    return replace(group, block_size=group.block_size * num_context_ranks)


class Kind(NamedTuple):
    """A kind of object in the pool: whose blocks, states or tails, and how many tokens lie between two of them."""

    group: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The KV cache groups of one model, in the engine's order, and where hits may end.

    `eagle_groups`: groups with layers of an EAGLE or MTP draft head. A draft layer's last entry of a block depends on
    the token that follows the block, so a hit counts only when the piece after it is there too: `proof_blocks`. Groups
    of one spec are cached and looked up together, so one draft group marks them all.
    `hash_unit`: tokens per block hash, dividing every cacheable block size; None: their greatest common divisor.
    `hit_unit`: hits end on its multiples. None: the alignment, the least common multiple of the block sizes. The hash
    unit: hits may end inside a block (`kvcore.tails`).
    """

    groups: tuple[GroupSpec, ...]
    eagle_groups: frozenset[int] = frozenset()
    hash_unit: int | None = None
    hit_unit: int | None = None
    alignment: int = field(init=False)
    """The engine's scheduler block size: the least common multiple of the block sizes, in tokens."""
    hashed_step: int = field(init=False)
    """`hash_unit`, resolved."""
    hit_step: int = field(init=False)
    """`hit_unit`, resolved."""
    margins: tuple[int, ...] = field(init=False)
    """Per group, tokens beyond a hit that must be there as well: what EAGLE matches and drops."""
    proof_margin: int = field(init=False)
    """The largest of them."""
    closed_groups: tuple[int, ...] = field(init=False)
    """Groups that need all earlier blocks."""
    other_groups: tuple[int, ...] = field(init=False)
    """The rest."""
    prefix_closed: bool = field(init=False)
    """Whether every group needs all earlier blocks, so that an engine keeps all of a running request."""
    tail_groups: tuple[int, ...] = field(init=False)
    """Groups whose blocks a hit may split; see `kvcore.tails`."""
    kinds: tuple[Kind, ...] = field(init=False)
    """Per index of what has runs of each group; tails are behind the groups. Object i ends at (i + 1) * num_tokens."""

    def __post_init__(self) -> None:
        require(self.groups, "groups", self.groups, "at least one KV cache group")
        sizes = [group.block_size for group in self.groups if group.cacheable]
        require(sizes, "groups", self.groups, "at least one group that can be cached")
        alignment = math.lcm(*(group.block_size for group in self.groups))
        hashed_step = math.gcd(*sizes) if self.hash_unit is None else self.hash_unit
        divides = hashed_step > 0 and all(size % hashed_step == 0 for size in sizes)
        require(divides, "hash_unit", self.hash_unit, f"a divisor of the block sizes {sorted(set(sizes))}")
        hit_step = alignment if self.hit_unit is None else self.hit_unit
        require(hit_step in (alignment, hashed_step), "hit_unit", self.hit_unit, f"{alignment} or {hashed_step}")
        whole = [g for g in self.groups if g.cacheable and not g.splits_blocks and g.block_size != hit_step]
        require(hit_step == alignment or not whole, "hit_unit", hit_step, f"{alignment}: {whole} cannot split a block")
        known = all(0 <= group < len(self.groups) for group in self.eagle_groups)
        require(known, "eagle_groups", sorted(self.eagle_groups), f"indices below {len(self.groups)}")
        object.__setattr__(self, "alignment", alignment)
        object.__setattr__(self, "hashed_step", hashed_step)
        object.__setattr__(self, "hit_step", hit_step)
        self._set_margins(self._margins())
        closed = tuple(group for group, spec in enumerate(self.groups) if spec.prefix_closed)
        object.__setattr__(self, "closed_groups", closed)
        object.__setattr__(self, "other_groups", tuple(g for g in range(len(self.groups)) if g not in closed))
        object.__setattr__(self, "prefix_closed", not self.other_groups)
        split = (g for g, spec in enumerate(self.groups) if spec.prefix_closed and spec.block_size > hit_step)
        object.__setattr__(self, "tail_groups", tuple(split) if hit_step < alignment else ())
        object.__setattr__(self, "kinds", self._kinds())

    def _kinds(self) -> tuple[Kind, ...]:
        """Where hits end inside blocks, so do states."""
        sizes = (min(g.block_size, self.hit_step) if not g.positional else g.block_size for g in self.groups)
        tails = (Kind(group, self.hit_step) for group in self.tail_groups)
        return (*(Kind(group, size) for group, size in enumerate(sizes)), *tails)

    def _set_margins(self, margins: tuple[int, ...]) -> None:
        object.__setattr__(self, "margins", margins)
        object.__setattr__(self, "proof_margin", max(margins))

    def _margins(self) -> tuple[int, ...]:
        marked = {self.groups[group] for group in self.eagle_groups}
        return tuple(
            min(group.block_size, self.hit_step) if group in marked and group.drafts else 0 for group in self.groups
        )

    def in_units(self) -> "ModelSpec":
        """The same model with blocks of one hit step each; itself when it splits none."""
        if not self.splits_blocks:
            return self
        units = ModelSpec(tuple(replace(group, block_size=self.hit_step) for group in self.groups))
        units._set_margins(self.margins)
        return units

    @property
    def splits_blocks(self) -> bool:
        """Whether hits may end inside a block."""
        return self.hit_step < self.alignment

    @property
    def loads_in_part(self) -> bool:
        """Whether a load that failed in part leaves the tokens before the first missing block usable.

        Of several groups the engine cannot be told which one failed. Of a window it would resume at the first missing
        block, whose own past was never loaded. Such a request starts over.
        """
        return len(self.groups) == 1 and self.prefix_closed

    def limit(self, num_tokens: int) -> int:
        """Longest hit of a sequence of `num_tokens`: at least one token is computed, and every proof has its hash."""
        longest = min(num_tokens - 1, align_down(num_tokens, self.hashed_step) - self.proof_margin)
        return align_down(longest, self.hit_step) if longest > 0 else 0

    def proof_blocks(self, group: int, hit_len: int) -> Run:
        """Blocks of the group that must be present for a hit of `hit_len`: the needed ones, and EAGLE's next piece."""
        spec = self.groups[group]
        start, end = spec.needed_blocks(hit_len)
        margin = self.margins[group]
        return (start, div_ceil(hit_len + margin, spec.block_size)) if margin else (start, end)

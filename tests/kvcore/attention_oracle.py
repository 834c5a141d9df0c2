"""Which blocks a resumption needs, from the attention mask alone: one token at a time, one boundary at a time.

Nothing here knows a formula of `kvcore`. An attention type is a function `reads(t)`: the earlier tokens whose KV must
be there when token `t` is computed. A later token reads nothing more of the past than the first one does (tested), so
the first one decides.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from hypothesis import strategies as st

from kvcore.runs import from_blocks
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow

FAR = 10_000
"""A token so far away that it reads nothing of a test's sequence unless it reads everything."""


@dataclass(frozen=True)
class Full:
    def reads(self, token):
        return range(token)


@dataclass(frozen=True)
class Window:
    """Itself and the window - 1 tokens before; `extra` more are kept."""

    window: int
    extra: int = 0

    def reads(self, token):
        return [earlier for earlier in range(token) if token - earlier < self.window + self.extra]


@dataclass(frozen=True)
class Chunked:
    chunk: int

    def reads(self, token):
        return [earlier for earlier in range(token) if earlier // self.chunk == token // self.chunk]


@dataclass(frozen=True)
class State:
    """The state after a token is kept where that token is; computing the next token reads it."""

    def reads(self, token):
        return [token - 1] if token else []


@dataclass(frozen=True)
class Group:
    """Attention over blocks of `block_size` tokens; a hit counts when the `margin` tokens after it are there too."""

    attention: Full | Window | Chunked | State
    block_size: int
    margin: int = 0

    def needed(self, prefix_len):
        """Blocks with a token that token `prefix_len` reads; also its own block, if that was begun before it.

        A block that is continued is named by all of its tokens when it is full, so that none of them may be missing.
        """
        blocks = {token // self.block_size for token in self.attention.reads(prefix_len)}
        if prefix_len % self.block_size:
            blocks.add(prefix_len // self.block_size)
        return blocks

    def proof(self, prefix_len):
        """What a hit of this length needs; one of nothing needs nothing."""
        if not prefix_len:
            return set()
        following = range(prefix_len, prefix_len + self.margin)
        return self.needed(prefix_len) | {token // self.block_size for token in following}

    @cached_property
    def by_position(self):
        return not isinstance(self.attention, State)

    @cached_property
    def reads_everything(self):
        return set(self.attention.reads(FAR)) >= set(range(FAR))


@dataclass(frozen=True)
class Oracle:
    """Every answer by trying every boundary."""

    groups: tuple[Group, ...]

    def boundary(self, length):
        return all(length % group.block_size == 0 for group in self.groups)

    @cached_property
    def margin(self):
        return max(group.margin for group in self.groups)

    @cached_property
    def step(self):
        return math.lcm(*(group.block_size for group in self.groups))

    def last_boundary(self, limit):
        return next(length for length in range(max(limit, 0), -1, -1) if self.boundary(length))

    def limit(self, num_tokens):
        """A token is left to compute, and all that a hit needs is hashed: the whole hash units of the sequence."""
        unit = math.gcd(*(group.block_size for group in self.groups))
        hashed_len = num_tokens // unit * unit
        return self.last_boundary(min(num_tokens - 1, hashed_len - self.margin))

    def resumable(self, length, present):
        return all(group.proof(length) <= blocks for group, blocks in zip(self.groups, present, strict=True))

    def hit_len(self, present, limit):
        lengths = range(max(limit, 0), -1, -1)
        return next(length for length in lengths if self.boundary(length) and self.resumable(length, present))

    def held(self, length):
        return tuple(group.needed(length) for group in self.groups)

    def lookup(self, low, high):
        """Per group, blocks that some hit in (low, high] needs."""
        lengths = [length for length in range(low + 1, high + 1) if self.boundary(length)]
        return tuple(set().union(*(group.proof(length) for length in lengths)) for group in self.groups)

    def kept(self, length, retention, num_prompt):
        """Whether a writer keeps this length resumable."""
        if length <= 0 or not self.boundary(length):
            return False
        if retention is None or length in self.replayed(num_prompt):
            return True
        return retention > 0 and length % retention == 0

    def replayed(self, num_prompt):
        """Where the engine resumes the same prompt and, with a draft head, which costs a step of hits, a longer one."""
        if not self.margin:
            return {self.last_boundary(num_prompt - 1)}
        return {self.last_boundary(length) - self.step for length in (num_prompt - 1, num_prompt)}

    def store(self, ranges, retention, num_prompt, horizon):
        """Per group, the blocks of [first, end) that a kept boundary needs, or that all longer sequences need."""
        lengths = [length for length in range(horizon) if self.kept(length, retention, num_prompt)]
        return tuple(
            self._stored(group, set(range(*run)), lengths) for group, run in zip(self.groups, ranges, strict=True)
        )

    def _stored(self, group, blocks, lengths):
        if not group.by_position:
            return set()
        if group.reads_everything:
            return blocks
        return blocks & set().union(*(group.proof(length) for length in lengths))


def oracle_of(model):
    """The mask of each group of a model, from its parameters. Groups of one spec are drafts together."""
    drafts = {model.groups[group] for group in model.eagle_groups}
    return Oracle(
        tuple(
            Group(attention_of(spec), spec.block_size, spec.block_size * (spec in drafts and spec.drafts))
            for spec in model.groups
        )
    )


def attention_of(spec):
    match spec:
        case SlidingWindow():
            return Window(spec.window, spec.extra_retained_tokens)
        case ChunkedLocal():
            return Chunked(spec.chunk)
        case Recurrent():
            return State()
        case FullAttention():
            return Full()
    return getattr(spec, "attention", None)


# -- wrong specs: each must be told apart -----------------------------------------------------------------------------


class WindowOfOneMore(SlidingWindow):
    """Wrong: counts the window without the token itself."""

    def needed_blocks(self, prefix_len):
        return (max(0, prefix_len - self.window) // self.block_size, -(-prefix_len // self.block_size))


class WindowOfOneLess(SlidingWindow):
    """Wrong: misses the oldest token of the window."""

    def needed_blocks(self, prefix_len):
        start, end = max(0, prefix_len - self.window + 2) // self.block_size, -(-prefix_len // self.block_size)
        return (min(start, end), end)


class ChunkOfLastToken(ChunkedLocal):
    """Wrong: takes the chunk of the last token of the prefix, not of the token to compute."""

    free_step = None

    def needed_blocks(self, prefix_len):
        start = max(0, prefix_len - 1) // self.chunk * self.chunk
        return (start // self.block_size, -(-prefix_len // self.block_size))


class NextState(Recurrent):
    """Wrong: takes the state after the token to compute."""

    def needed_blocks(self, prefix_len):
        end = -(-prefix_len // self.block_size)
        return (end, end + 1) if end else (0, 0)


class FullWithoutTail(FullAttention):
    """Wrong: forgets the last block when it is partial."""

    def needed_blocks(self, prefix_len):
        return (0, prefix_len // self.block_size)


WRONG = {
    "window of one more": lambda: WindowOfOneMore(4, window=5),
    "window of one less": lambda: WindowOfOneLess(4, window=6),
    "chunk of the last token": lambda: ChunkOfLastToken(4, chunk=8),
    "next state": lambda: NextState(4),
}
"""Wrong at aligned lengths already; `FullWithoutTail` only inside a block."""


# -- random models ----------------------------------------------------------------------------------------------------

BLOCK_SIZES = st.sampled_from((1, 2, 3, 4, 6, 8))


@st.composite
def specs(draw):
    block_size = draw(BLOCK_SIZES)
    kind = draw(st.sampled_from(("full", "window", "window", "chunked", "recurrent")))
    if kind == "window":
        return SlidingWindow(block_size, draw(st.integers(1, 20)), draw(st.sampled_from((0, 0, 1, 5))))
    if kind == "chunked":
        return ChunkedLocal(block_size, draw(st.one_of(st.integers(1, 5).map(block_size.__mul__), st.integers(1, 20))))
    return FullAttention(block_size) if kind == "full" else Recurrent(block_size)


@st.composite
def models(draw, max_groups=4):
    """In a third of the cases some groups are of draft layers."""
    groups = tuple(draw(st.lists(specs(), min_size=1, max_size=max_groups)))
    drafts = st.sets(st.sampled_from(range(len(groups))), min_size=1, max_size=2)
    return ModelSpec(groups, draw(st.one_of(st.just(()), st.just(()), drafts).map(frozenset)))


@st.composite
def presences(draw, model, num_tokens):
    """Per group, a set of blocks: all, none, a prefix, a tail, what some boundaries need, less a few lost ones."""
    oracle = model if isinstance(model, Oracle) else oracle_of(model)
    return tuple(draw(_presence(group, num_tokens)) for group in oracle.groups)


@st.composite
def _presence(draw, group, num_tokens):
    num_blocks = -(-num_tokens // group.block_size)
    everything = set(range(num_blocks))
    kind = draw(st.sampled_from(("all", "all", "prefix", "tail", "boundaries", "any", "none")))
    if kind == "any":
        return draw(st.sets(st.integers(0, max(0, num_blocks - 1)))) & everything
    if kind == "boundaries":
        lengths = draw(st.sets(st.integers(0, num_tokens), max_size=5))
        present = set().union(*(group.needed(length) for length in lengths)) & everything
    else:
        cut = draw(st.integers(0, num_blocks))
        present = {
            "all": everything,
            "none": set(),
            "prefix": set(range(cut)),
            "tail": set(range(cut, num_blocks)),
        }[kind]
    lost = draw(st.sets(st.integers(0, max(0, num_blocks - 1)), max_size=3))
    return present - lost


def as_runs(present):
    return tuple(from_blocks(blocks) for blocks in present)


def as_blocks(runs):
    return {block for start, end in runs for block in range(start, end)}


def as_sets(group_runs):
    return tuple(as_blocks(runs) for runs in group_runs)

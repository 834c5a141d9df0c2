"""The engine's own prefix cache: one pool of blocks, and a block table per group of each sequence that holds some.

What vLLM's KVCacheManager does with its hybrid coordinator, on runs. The groups of a model share the blocks. A hit
is one that all groups have (`kvcore.engine.hit`). A group keeps of its full blocks what `kvcore.engine.masks` says, and
gives back while the sequence goes on what it needs no more (`GroupSpec.needed_blocks`). Recurrent groups: align mode.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvcore.engine.blocks import admission_cap, chunk_end, require_simulated
from kvcore.engine.hit import find
from kvcore.engine.masks import cached_len, kept_boundaries, reachable_runs, require_retention
from kvcore.engine.model import EngineModel
from kvcore.group_runs import GroupRuns
from kvcore.holding import Holding, Match
from kvcore.pool import BlockPool, hit_limit
from kvcore.spec import ModelSpec
from kvcore.types import Segments, StreamId
from kvcore.units import align_down, align_up

Names: TypeAlias = tuple[Segments, ...]
"""Per group, the segments that name a sequence's blocks."""

NEVER = 2**62
"""A length that no sequence has."""


class Hit(NamedTuple):
    """What a sequence finds, as of one moment, and how it would begin: at `resume_len` tokens."""

    hit_len: int
    junction: int | None
    """Where another sequence left its prefix: `kvcore.engine.hit.Found`."""
    matches: tuple[Match, ...]
    """Per group, the blocks of the hit that resuming there needs."""
    ends: tuple[int, ...]
    """Per group, the length of the block table, in blocks."""
    num_free: int
    """Free blocks that holding it takes."""


class Tables:
    """The block tables of one sequence. Only the cache changes them."""

    __slots__ = ("cache_len", "drop_len", "holdings", "junction", "num_prompt_tokens", "room_len")

    def __init__(self, holdings: list[Holding], num_prompt_tokens: int, junction: int | None) -> None:
        self.holdings = holdings
        self.num_prompt_tokens = num_prompt_tokens
        self.junction = junction
        self.room_len = 0
        """Up to this length a sequence that grows token by token takes no block and gives none back."""
        self.drop_len = NEVER
        """With so many tokens computed it gives one back."""
        self.cache_len = 0
        """Up to this length, not included, no block of it enters the cache."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Per group, the length in blocks."""
        return tuple([holding.end for holding in self.holdings])


NO_TABLES = Tables([], 0, None)
"""Of a sequence that holds no block."""


class GpuCache:
    """The cache of one engine of `model` that computes at most `max_num_new_tokens` in a step; see `require_simulated`.

    `retention` as in `kvcore.engine.masks.store_runs`; vLLM's default is 0. `max_len`: tokens of the longest sequence.
    """

    def __init__(
        self, model: ModelSpec, num_blocks: int, max_num_new_tokens: int, max_len: int, retention: int | None = 0
    ) -> None:
        require_simulated(model)
        self.model = model
        self.blocks = BlockPool(num_blocks, len(model.groups))
        self.keeps_all = model.prefix_closed
        """Whether sequences give no block back while they go on."""
        self.has_states = not all(group.positional for group in model.groups)
        self._engine = EngineModel(model)
        require_retention(self._engine, retention)
        self._retention = retention
        self._max_chunk = max_num_new_tokens
        self._sizes = tuple(group.block_size for group in model.groups)
        self._step = 1 if len(model.groups) == 1 else model.hit_step
        caps = (admission_cap(group, max_num_new_tokens, max_len) for group in model.groups)
        self._caps = tuple(NEVER if cap is None else cap for cap in caps)
        self._uncapped = (NEVER,) * len(self._caps)
        self._fresh: set[tuple[int, StreamId, int]] = set()

    def names(self, segments: Segments) -> Names:
        """Per group, the segments of its blocks, of those in hash units."""
        return block_names(self.model, segments)

    # -- before admission -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step is going to be decided."""
        self._fresh.clear()

    def find(self, names: Names, num_tokens: int) -> Hit:
        """The longest hit of a sequence of `num_tokens`; changes nothing."""
        limit = num_tokens - 1
        ends = [limit // size for size in self._sizes]
        present = [self.blocks.present(*which) for which in zip(names, ends, range(len(ends)), strict=True)]
        found = find(self._engine, present, limit, align_down(num_tokens, self.model.hashed_step))
        return self.resumed(Hit(found.hit_len, found.junction, (), (), 0), names, found.hit_len)

    def resumed(self, hit: Hit, names: Names, resume_len: int) -> Hit:
        """The hit of a sequence that resumes at `resume_len`, with what lies beyond the hit loaded."""
        matches, ends = [], []
        num_free = 0
        for group, (spec, size) in enumerate(zip(self.model.groups, self._sizes, strict=True)):
            end, start = hit.hit_len // size, spec.needed_blocks(resume_len)[0]
            match = self.blocks.match(names[group], end, min(start, end), group)
            matches.append(match)
            ends.append(max(start, end))
            # A state of which a load makes another one counts as taken: the engine's mistake, kept here.
            num_free += match.num_free if spec.positional or not hit.matches else hit.matches[group].num_free
        return Hit(hit.hit_len, hit.junction, tuple(matches), tuple(ends), num_free)

    def is_fresh(self, hit: Hit) -> bool:
        """Whether the hit is on a state that the step which is being decided computes: nobody can use that yet."""
        last = ((match.group, match.spans[-1][0].stream, match.end - 1) for match in hit.matches if match.spans)
        return bool(self._fresh) and not self._fresh.isdisjoint(last)

    def chunk(self, start: int, end: int, num_prompt_tokens: int, num_tokens: int, junction: int | None) -> int:
        """Where a chunk [start, end) of a sequence is to end."""
        if not self.has_states:
            return end
        return chunk_end(self._sizes[0], start, end, num_prompt_tokens, num_tokens, junction, self._max_chunk)

    def missing(self, ends: tuple[int, ...], num_tokens: int) -> int:
        """Blocks that tables of these lengths lack for `num_tokens`."""
        return self._missing(ends, num_tokens, self._uncapped)

    def lacking(self, tables: Tables, num_tokens: int) -> int:
        """Blocks that a sequence lacks for `num_tokens`."""
        return self._missing(tables.ends, num_tokens, self._uncapped)

    def lacking_at_most(self, num_new: int) -> int:
        """Blocks that any sequence which has those of its tokens lacks for so many more."""
        return sum([-(-num_new // size) for size in self._sizes])

    def missing_at_most(self, ends: tuple[int, ...], num_tokens: int) -> int:
        """Blocks that they come to lack on the way there, given back what is needed no more."""
        return self._missing(ends, num_tokens, self._caps)

    def promised(self, tables: Tables, num_tokens: int) -> int:
        """The same for a sequence with these tables, or with none yet."""
        return self.missing_at_most(tables.ends or (0,) * len(self._sizes), num_tokens)

    def _missing(self, ends: tuple[int, ...], num_tokens: int, caps: tuple[int, ...]) -> int:
        total = 0
        for spec, end, size, cap in zip(self.model.groups, ends, self._sizes, caps, strict=True):
            lacking = min(-(-num_tokens // size), cap) - end
            if lacking > 0:
                total += lacking if spec.positional else 1
        return total

    # -- a sequence that holds blocks -------------------------------------------------------------------------

    def hold(self, hit: Hit, num_prompt_tokens: int) -> Tables:
        """The tables that a sequence with this hit begins with."""
        holdings = []
        for match, end in zip(hit.matches, hit.ends, strict=True):
            holding = self.blocks.hold(match)
            holding.skip(end)
            holdings.append(holding)
        return Tables(holdings, num_prompt_tokens, hit.junction)

    def drop(self, tables: Tables, computed_len: int) -> None:
        """Give back what a sequence needs no more that has computed so much."""
        if computed_len < tables.drop_len:
            return
        for spec, holding in zip(self.model.groups, tables.holdings, strict=True):
            start = min(spec.needed_blocks(computed_len)[0], holding.end)
            if start > holding.start:
                self.blocks.drop(holding, start)

    def grow(self, tables: Tables, num_tokens: int) -> None:
        """Take what `num_tokens` lack (`missing`)."""
        room_len = drop_len = NEVER
        for spec, holding, size in zip(self.model.groups, tables.holdings, self._sizes, strict=True):
            end = -(-num_tokens // size)
            if end > holding.end:
                if not spec.positional:
                    holding.skip(end - 1)
                self.blocks.allocate(holding, end - holding.end)
            room_len = min(room_len, holding.end * size)
            unneeded_from = spec.unneeded_from(holding.start)
            if unneeded_from is not None:
                drop_len = min(drop_len, unneeded_from)
        tables.room_len, tables.drop_len = min(room_len, drop_len), drop_len

    def enter(self, tables: Tables, names: Names, computed_len: int) -> list[tuple[int, int]]:
        """Let others find the blocks that are full with so many tokens; (group, tokens) of the states among them."""
        states = []
        cache_len = NEVER
        for group, (holding, size) in enumerate(zip(tables.holdings, self._sizes, strict=True)):
            end = cached_len(self._engine, group, computed_len) // size
            if end > holding.cached_end:
                self.blocks.cache(holding, names[group], end, self._kept(tables, group, end))
                if not self.model.groups[group].positional and holding.spans and holding.spans[-1][2] == end:
                    states.append((group, end * size))
            cache_len = min(cache_len, (holding.cached_end + 1) * size)
        tables.cache_len = align_up(cache_len, self._step)
        if self.has_states:
            self._note_fresh(tables, states, computed_len)
        return states

    def advance(self, tables: Tables, names: Names, num_tokens: int) -> None:
        """What the last of some decode steps up to this length does: drop, grow and enter."""
        if num_tokens > tables.room_len:
            self.drop(tables, num_tokens - 1)
            self.grow(tables, num_tokens)
        if num_tokens >= tables.cache_len:
            self.enter(tables, names, num_tokens)

    def pin(self, tables: Tables, blocks: GroupRuns) -> list[Holding]:
        """Hold these full blocks for a reader that may outlive the sequence."""
        pairs = zip(tables.holdings, blocks, strict=True)
        return [self.blocks.pin(holding, run) for holding, runs in pairs for run in runs]

    def free(self, tables: Tables) -> None:
        """Give everything back."""
        for holding in tables.holdings:
            self.blocks.free(holding)

    # -- inside -----------------------------------------------------------------------------------------------

    def _kept(self, tables: Tables, group: int, end: int) -> tuple[tuple[int, int], ...] | None:
        """Of the full blocks before `end` that are not cached, those that are to be; None: all."""
        if self.model.groups[group].prefix_closed:
            return None
        boundaries = kept_boundaries(self._engine, group, tables.num_prompt_tokens, tables.junction)
        run = (tables.holdings[group].cached_end, end)
        return reachable_runs(self._engine, group, run, self._retention, boundaries)

    def _note_fresh(self, tables: Tables, states: list[tuple[int, int]], computed_len: int) -> None:
        """The engine also counts a prompt's last state as new in the step that begins with it."""
        full, last = computed_len // self._sizes[0], (tables.num_prompt_tokens - 1) // self._sizes[0]
        new = dict(states)
        for group, holding in enumerate(tables.holdings):
            if self.model.groups[group].positional or not holding.spans:
                continue
            lane, _, end = holding.spans[-1]
            is_prompt_state = end == full == last
            if group in new or is_prompt_state:
                self._fresh.add((group, lane.stream, end - 1))
            if is_prompt_state:
                tables.cache_len = computed_len + 1


class OneGroupCache(GpuCache):
    """The same for one group that keeps all of the past, in fewer steps."""

    def find(self, names: Names, num_tokens: int) -> Hit:
        """The longest prefix that is cached."""
        (size,) = self._sizes
        match = self.blocks.match(names[0], hit_limit(num_tokens, size))
        return Hit(match.end * size, None, (match,), (match.end,), match.num_free)

    def _missing(self, ends: tuple[int, ...], num_tokens: int, caps: tuple[int, ...]) -> int:
        return max(0, -(-num_tokens // self._sizes[0]) - ends[0])

    def lacking(self, tables: Tables, num_tokens: int) -> int:
        """What is beyond the end of its only table."""
        return max(0, -(-num_tokens // self._sizes[0]) - tables.holdings[0].end)

    def drop(self, tables: Tables, computed_len: int) -> None:
        """Nothing is ever given back."""

    def grow(self, tables: Tables, num_tokens: int) -> None:
        """Take what is missing."""
        (holding,), (size,) = tables.holdings, self._sizes
        end = -(-num_tokens // size)
        if end > holding.end:
            self.blocks.allocate(holding, end - holding.end)
        tables.room_len = holding.end * size

    def enter(self, tables: Tables, names: Names, computed_len: int) -> list[tuple[int, int]]:
        """Every full block enters at once."""
        (holding,), (size,) = tables.holdings, self._sizes
        end = computed_len // size
        if end > holding.cached_end:
            self.blocks.cache(holding, names[0], end)
        tables.cache_len = (holding.cached_end + 1) * size
        return []


def gpu_cache(
    model: ModelSpec, num_blocks: int, max_num_new_tokens: int, max_len: int, retention: int | None = 0
) -> GpuCache:
    """The cache of an engine of the model, as in `GpuCache`."""
    one_group = len(model.groups) == 1 and model.prefix_closed
    return (OneGroupCache if one_group else GpuCache)(model, num_blocks, max_num_new_tokens, max_len, retention)


def block_names(model: ModelSpec, segments: Segments) -> Names:
    """Per group, the segments of its blocks, of those of blocks of one hash unit.

    A block belongs to the stream of its last unit.
    """
    factors = [group.block_size // model.hashed_step for group in model.groups]
    by_factor = {factor: _coarsened(segments, factor) for factor in set(factors)}
    return tuple([by_factor[factor] for factor in factors])


def _coarsened(segments: Segments, factor: int) -> Segments:
    if factor == 1:
        return segments
    blocks = ((stream, start // factor, end // factor) for stream, start, end in segments)
    return tuple([block for block in blocks if block[1] < block[2]])

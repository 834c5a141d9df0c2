"""What to ask, load and store for one sequence of one model. Pure functions of lengths and runs, group by group."""

from dataclasses import dataclass, field

from kvcore.boundaries import store_boundaries
from kvcore.errors import InvalidArgument
from kvcore.frontier import Frontier
from kvcore.group_runs import GroupRuns, minus, plus, singles
from kvcore.hit import hit_len
from kvcore.masks import Retention, lookup_runs, store_runs
from kvcore.runs import normalize
from kvcore.spec import ModelSpec
from kvcore.tails import cover, objects_for
from kvcore.types import Run
from kvcore.units import align_down


@dataclass(frozen=True, slots=True)
class Planner:
    """The decisions about one model's blocks; `retention` as in `kvcore.masks.store_runs`."""

    model: ModelSpec
    retention: Retention = None
    nothing: GroupRuns = field(init=False, repr=False, compare=False)
    """No block in any group."""

    _no_tails: GroupRuns = field(init=False, repr=False, compare=False)
    _units: ModelSpec = field(init=False, repr=False, compare=False)
    _keeps_all: bool = field(init=False, repr=False, compare=False)
    _block_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_no_tails", ((),) * len(self.model.tail_groups))
        object.__setattr__(self, "nothing", ((),) * len(self.model.groups) + self._no_tails)
        object.__setattr__(self, "_units", self.model.in_units())
        object.__setattr__(self, "_block_sizes", tuple({g.block_size for g in self.model.groups if g.positional}))
        object.__setattr__(self, "_keeps_all", all(g.prefix_closed and g.positional for g in self.model.groups))
        store_runs(self.model, ((0, 0),) * len(self.model.groups), self.retention, 0)

    def limit(self, num_tokens: int) -> int:
        """Longest hit of a sequence of `num_tokens`; see `ModelSpec.limit`."""
        return self.model.limit(num_tokens)

    def require_hit(self, local_hit_len: int) -> None:
        """Raise InvalidArgument unless an engine can resume there on its own: at 0 or a multiple of `hit_step`."""
        step = self.model.hit_step
        if local_hit_len < 0 or local_hit_len % step:
            expected = f"0 or a multiple of {step}: round down to where hits of this model end"
            raise InvalidArgument("local_hit_len", local_hit_len, expected)

    def frontier(self, local_hit_len: int, num_tokens: int, denied: GroupRuns | None = None) -> Frontier:
        """The dialogue that finds out what the pool holds beyond the engine, by asking for as little as it can.

        `local_hit_len` as `require_hit` has it.
        """
        self.require_hit(local_hit_len)
        return Frontier(self.model, local_hit_len, self.limit(num_tokens), denied or self.nothing)

    def lookup(self, local_hit_len: int, num_tokens: int) -> GroupRuns:
        """All blocks that some hit longer than the local one could need and the engine does not hold, at once.

        What a pool without `frontier` is asked. Only of a model that splits no blocks.
        """
        assert not self.model.splits_blocks, "frontier knows about tails"
        asked = lookup_runs(self.model, local_hit_len, self.limit(num_tokens))
        return minus(asked, self.held(local_hit_len))

    def beyond(self, local_hit_len: int, num_tokens: int) -> GroupRuns:
        """All blocks, states and tails between the local hit and the longest one, needed or not."""
        limit = self.limit(num_tokens)
        return tuple(
            normalize(((local_hit_len // size, (limit + self.model.margins[group]) // size),))
            for group, size in self.model.kinds
        )

    def hit(self, local_hit_len: int, num_tokens: int, present: GroupRuns) -> int:
        """Tokens that engine (up to `local_hit_len`) and pool (`present`) hold together, at least the local hit."""
        together = plus(cover(self.model, present), _needed(self._units, local_hit_len))
        return max(local_hit_len, hit_len(self._units, together, self.limit(num_tokens)))

    def load(self, local_hit_len: int, resume_len: int, present: GroupRuns) -> GroupRuns:
        """Blocks to fetch so that token `resume_len` can be computed next, given what the engine holds.

        Of what can serve, that which is `present`; what is not cannot be had.
        """
        missing = minus(_needed(self._units, resume_len), _needed(self._units, local_hit_len))
        return objects_for(self.model, missing, present)

    def usable(self, present: GroupRuns, resume_len: int) -> GroupRuns:
        """Of what is present, all but states when none is the one after just `resume_len` tokens."""
        sizes = zip(self.model.groups, self._units.groups, strict=True)
        states = {g for g, (spec, unit) in enumerate(sizes) if not spec.positional and resume_len % unit.block_size}
        return tuple(() if index in states else runs for index, runs in enumerate(present))

    def held(self, prefix_len: int) -> GroupRuns:
        """Blocks an engine that resumes at `prefix_len` holds; no tails, which are in blocks."""
        return _needed(self.model, prefix_len) + self._no_tails

    def full(self, num_tokens: int) -> GroupRuns:
        """Blocks, states and tails that end within so many tokens."""
        return singles([(0, num_tokens // kind.num_tokens) for kind in self.model.kinds])

    def store(self, stored_len: int, computed_len: int, num_prompt_tokens: int) -> GroupRuns:
        """Blocks that became full between the two lengths (tokens) and that a later request can need."""
        blocks = tuple([(stored_len // g.block_size, computed_len // g.block_size) for g in self.model.groups])
        return self._needed_later(blocks, num_prompt_tokens)

    def kept(self, prefix_len: int, num_prompt_tokens: int) -> GroupRuns:
        """Of the full blocks that an engine holds which resumes at `prefix_len`, those that a later request can need.

        The same as `store` from nothing on, of what is `held`; but what windows left behind costs nothing.
        """
        needed = ((group.needed_blocks(prefix_len), group.block_size) for group in self.model.groups)
        blocks = tuple((start, min(end, prefix_len // size)) for (start, end), size in needed)
        return self._needed_later(blocks, num_prompt_tokens)

    def next_block_end(self, prefix_len: int) -> int | None:
        """Where the first block ends that `prefix_len` tokens do not fill; None of a model without such blocks."""
        return min([prefix_len // size * size + size for size in self._block_sizes], default=None)

    def store_state(self, group: int, state_len: int, num_prompt_tokens: int) -> GroupRuns:
        """The state of a recurrent group after `state_len` tokens, if a later request can resume there.

        Where that is inside blocks of other groups, their tails up to there come with it.
        """
        if not 0 < state_len == align_down(state_len, self.model.hit_step):
            return self.nothing
        retention = self.retention[group] if isinstance(self.retention, tuple) else self.retention
        boundaries = store_boundaries(self.model, retention, num_prompt_tokens)
        if boundaries.last(state_len - 1, state_len) != state_len:
            return self.nothing
        state = state_len // self._units.groups[group].block_size - 1
        tail = state_len // self.model.hit_step - 1
        split = (self.model.groups[tail_group].block_size for tail_group in self.model.tail_groups)
        tails = (((tail, tail + 1),) if state_len % block_size else () for block_size in split)
        states = (((state, state + 1),) if index == group else () for index in range(len(self.model.groups)))
        return (*states, *tails)

    def valid_len(self, resume_len: int, failed: GroupRuns) -> int:
        """Tokens still usable of `resume_len` when the `failed` blocks hold no data; see `ModelSpec.loads_in_part`."""
        if not any(failed):
            return resume_len
        if not self.model.loads_in_part:
            return 0
        steps = (self.model.groups[0].block_size, self.model.hit_step)
        firsts = (runs[0][0] * step for runs, step in zip(failed, steps, strict=False) if runs)
        return align_down(min(resume_len, *firsts), self.model.alignment)

    def _needed_later(self, blocks: tuple[Run, ...], num_prompt_tokens: int) -> GroupRuns:
        if self._keeps_all:
            return singles(blocks) + self._no_tails
        return store_runs(self.model, blocks, self.retention, num_prompt_tokens) + self._no_tails


def _needed(model: ModelSpec, prefix_len: int) -> GroupRuns:
    return singles([group.needed_blocks(prefix_len) for group in model.groups])

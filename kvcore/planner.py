"""What to ask, load and store for one sequence of one model. Pure functions of lengths and runs, group by group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.hit import hit_len
from kvcore.masks import Retention, lookup_runs, store_runs
from kvcore.runs import intersect, normalize, num_blocks, subtract, union
from kvcore.spec import ModelSpec
from kvcore.types import Runs

GroupRuns = tuple[Runs, ...]
"""One `Runs` per group, in the model's order; positions in the sequence."""


@dataclass(frozen=True, slots=True)
class Planner:
    """The decisions about one model's blocks; `retention` as in `kvcore.masks.store_runs`."""

    model: ModelSpec
    retention: Retention = None

    @property
    def nothing(self) -> GroupRuns:
        """No block in any group."""
        return ((),) * len(self.model.groups)

    def limit(self, num_tokens: int) -> int:
        """Longest hit of a sequence of `num_tokens`; see `ModelSpec.limit`."""
        return self.model.limit(num_tokens)

    def lookup(self, local_hit_len: int, num_tokens: int) -> GroupRuns:
        """Blocks to ask the pool for: those a hit longer than the local one could need and the engine does not hold."""
        asked = lookup_runs(self.model, local_hit_len, self.limit(num_tokens))
        return _per_group(subtract, asked, self.held(local_hit_len))

    def hit(self, local_hit_len: int, num_tokens: int, present: GroupRuns) -> int:
        """Tokens that engine (up to `local_hit_len`) and pool (`present`) hold together, at least the local hit."""
        together = _per_group(union, present, self.held(local_hit_len))
        return max(local_hit_len, hit_len(self.model, together, self.limit(num_tokens)))

    def load(self, local_hit_len: int, resume_len: int) -> GroupRuns:
        """Blocks to fetch so that token `resume_len` can be computed next, given what the engine holds."""
        return _per_group(subtract, self.held(resume_len), self.held(local_hit_len))

    def held(self, prefix_len: int) -> GroupRuns:
        """Blocks an engine that resumes at `prefix_len` holds."""
        return tuple(normalize((group.needed_blocks(prefix_len),)) for group in self.model.groups)

    def store(self, stored_len: int, computed_len: int, num_prompt_tokens: int) -> GroupRuns:
        """Blocks that became full between the two lengths (tokens) and that a later request can need."""
        blocks = tuple(
            (stored_len // group.block_size, computed_len // group.block_size) for group in self.model.groups
        )
        return store_runs(self.model, blocks, self.retention, num_prompt_tokens)

    def valid_len(self, resume_len: int, failed: GroupRuns) -> int:
        """Tokens still usable of `resume_len` when the `failed` blocks hold no data; see `ModelSpec.loads_in_part`."""
        if not any(failed):
            return resume_len
        if not self.model.loads_in_part:
            return 0
        return hit_len(self.model, minus(self.held(resume_len), failed), resume_len)


def count_blocks(runs: GroupRuns) -> int:
    """Blocks in all groups."""
    return sum(num_blocks(group_runs) for group_runs in runs)


def common(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks in both."""
    return _per_group(intersect, left, right)


def minus(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks of `left` that are not in `right`."""
    return _per_group(subtract, left, right)


def plus(left: GroupRuns, right: GroupRuns) -> GroupRuns:
    """Per group, blocks in either."""
    return _per_group(union, left, right)


def _per_group(operation: Callable[[Runs, Runs], Runs], left: Sequence[Runs], right: Sequence[Runs]) -> GroupRuns:
    return tuple(operation(a, b) for a, b in zip(left, right, strict=True))

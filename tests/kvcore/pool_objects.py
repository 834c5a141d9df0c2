"""What a pool may have of a sequence, object by object, and how far it reaches, by trying every length.

An entry of `GroupRuns` is a kind of object: a group's blocks, or its states, or behind the groups the tails of those
that have some.
"""

from dataclasses import dataclass

from kvcore.spec import Recurrent
from tests.kvcore.attention_oracle import Full, State, attention_of


@dataclass(frozen=True)
class Kind:
    """Objects of a group that end every `step` tokens and lie in one of its blocks."""

    group: int
    step: int
    block_size: int
    is_state: bool
    is_tail: bool = False

    def end(self, position):
        """Tokens up to the end of the object; they name it."""
        return (position + 1) * self.step

    def block(self, position):
        """Where in the group's block table it lies."""
        return (self.end(position) - 1) // self.block_size

    def tokens(self, position):
        """Those whose KV it holds; of a state, the one after which it is what it is."""
        end = self.end(position)
        return range(end - 1 if self.is_state else self.block(position) * self.block_size, end)


def kinds_of(model):
    """In the order of `GroupRuns`."""
    unit = model.hit_step
    states = [isinstance(group, Recurrent) for group in model.groups]
    sizes = [group.block_size for group in model.groups]
    steps = [unit if state and model.splits_blocks else size for size, state in zip(sizes, states, strict=True)]
    whole = [Kind(*parts) for parts in zip(range(len(sizes)), steps, sizes, states, strict=True)]
    return (*whole, *(Kind(group, unit, sizes[group], False, True) for group in model.tail_groups))


def objects_of(model, num_tokens):
    """All that a pool can have of so many tokens. A tail that ends where its block does is that block."""
    return tuple(
        {p for p in range(num_tokens // kind.step) if not kind.is_tail or kind.end(p) % kind.block_size}
        for kind in kinds_of(model)
    )


def brute_hit(model, local, limit, pool):
    """The longest length at which every token or state that the next one reads is held, and each draft's proof.

    By objects that end inside the sequence: where the limit is inside a block, its whole block is none. `local` when
    nothing beyond it is.
    """
    held = held_tokens(model, limit, pool)
    lengths = range(limit, local, -1)
    return next((n for n in lengths if n % model.hit_step == 0 and resumes(model, n, local, held)), local)


def held_tokens(model, limit, pool):
    """Per group, tokens whose KV (or state) the pool holds."""
    held = [set() for _ in model.groups]
    for kind, positions in zip(kinds_of(model), pool, strict=True):
        for position in positions:
            if kind.end(position) <= limit + model.margins[kind.group]:
                held[kind.group].update(kind.tokens(position))
    return held


def resumes(model, length, local, held):
    """Whether pool and an engine that could resume at `local` hold all that a hit of this length needs."""
    needed = needed_tokens(model, length, local)
    return all(tokens <= there for tokens, there in zip(needed, held, strict=True))


def needed_tokens(model, length, local):
    """Per group, tokens that a hit of this length needs of the pool."""
    return [
        {*attention_of(spec).reads(length), *range(length, length + margin)}
        - engine_tokens(attention_of(spec), spec.block_size, local)
        for spec, margin in zip(model.groups, model.margins, strict=True)
    ]


def engine_tokens(attention, block_size, local):
    """What the next token at `local` reads, and what shares a block with it."""
    if isinstance(attention, Full):
        return set(range(local))
    reads = set(attention.reads(local))
    if isinstance(attention, State):
        return reads
    blocks = {token // block_size for token in reads}
    return {token for token in range(local) if token // block_size in blocks}

"""Which keys a sequence enters into the engine's own prefix cache, step by step (`cache_blocks` of every manager).

    sequence = CachedSequence(Writer(engine), Beginning(num_prompt_tokens=100))
    sequence.compute(Step(start=0, end=64, num_tokens=100))
    sequence.entries                    per group, what another sequence with the same tokens finds

Keys stay when the sequence ends or is preempted; what a full pool gives up is the pool's affair.
"""

from kvcore.engine.masks import cached_len, kept_boundaries, reachable_runs
from kvcore.engine.states import StateTable
from kvcore.engine.writer import Beginning, Entries, Step, Writer
from kvcore.runs import intersect, single, union
from kvcore.spec import FullAttention, Recurrent
from kvcore.units import align_down


class CachedSequence:
    """One sequence from its admission to its end or preemption."""

    __slots__ = ("_tables", "_writer")

    def __init__(self, writer: Writer, beginning: Beginning) -> None:
        self._writer = writer
        self._tables = [
            (StateTable if isinstance(spec, Recurrent) else BlockTable)(writer, group, beginning)
            for group, spec in enumerate(writer.engine.specs)
        ]

    def compute(self, step: Step) -> None:
        """Take blocks for the step, and enter those that it fills. The engine enters them before they are computed."""
        num_known = min(step.end, step.num_tokens)
        for group, table in enumerate(self._tables):
            table.place(step)
            table.enter(cached_len(self._writer.engine, group, num_known, self._writer.num_reprefilled))

    @property
    def entries(self) -> tuple[Entries, ...]:
        """Per group, all keys entered so far."""
        return tuple(table.entries for table in self._tables)


class BlockTable:
    """The blocks of one sequence in an attention group."""

    __slots__ = ("_boundaries", "_first_held", "_group", "_num_cached", "_tail_len", "_writer", "entries")

    def __init__(self, writer: Writer, group: int, beginning: Beginning) -> None:
        spec, total = writer.engine.specs[group], beginning.hit_len + beginning.loaded_len
        self._writer = writer
        self._group = group
        self._boundaries = kept_boundaries(writer.engine, group, beginning.num_prompt_tokens, beginning.junction)
        self._first_held = spec.needed_blocks(total)[0]
        self._num_cached = beginning.hit_len // spec.block_size
        self._tail_len = prompt_tail(writer, group, beginning.num_prompt_tokens)
        self.entries = Entries()

    def place(self, step: Step) -> None:
        """Give up the blocks that are neither read nor retained any more."""
        spec = self._writer.engine.specs[self._group]
        self._first_held = max(self._first_held, spec.needed_blocks(step.settled_len)[0])

    def enter(self, length: int) -> None:
        """Enter the full blocks of the first `length` tokens that are still held, and the prompt's tail."""
        writer, spec = self._writer, self._writer.engine.specs[self._group]
        run = (self._num_cached, length // spec.block_size)
        if run[0] < run[1]:
            kept = reachable_runs(writer.engine, self._group, run, writer.retention, self._boundaries)
            held = single((max(self._first_held, run[0]), run[1]))
            new = held if kept is None else intersect(kept, held)
            self.entries = Entries(union(self.entries.blocks, new), self.entries.tails)
            self._num_cached = run[1]
        if self._tail_len is not None and self._tail_len <= length and not self.entries.tails:
            self.entries = Entries(self.entries.blocks, (self._tail_len,))


def prompt_tail(writer: Writer, group: int, num_prompt_tokens: int) -> int | None:
    """The length inside a block of full attention at which a resent prompt may end its hit; None: there is none.

    A draft head looks at all of the prompt, others leave a token to compute.
    """
    engine, spec = writer.engine, writer.engine.specs[group]
    looked_at = num_prompt_tokens - (group not in engine.eagle_groups)
    length = align_down(looked_at, engine.model.hashed_step)
    return length if isinstance(spec, FullAttention) and length % spec.block_size else None

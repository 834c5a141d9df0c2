"""The block table of a recurrent group in align mode, and the keys its blocks have (vLLM's MambaManager)."""

from kvcore.engine.masks import kept_boundaries, reachable_runs
from kvcore.engine.writer import Beginning, Entries, Step, Writer
from kvcore.runs import from_blocks
from kvcore.types import Run
from kvcore.units import div_ceil


class StateTable:
    """The states of one sequence. A block's keys are the lengths whose state it is said to hold.

        index   0     1     2     3     4
              null  null  state  ...  ...      behind the running state the blocks for drafts

    Most of the table is null: a chunk makes one state, in the block of its last token.
    """

    __slots__ = (
        "_beginning",
        "_blocks",
        "_boundaries",
        "_checkpoint",
        "_group",
        "_is_placed",
        "_left",
        "_length",
        "_num_cached",
        "_size",
        "_tail_block",
        "_writer",
    )

    def __init__(self, writer: Writer, group: int, beginning: Beginning) -> None:
        self._writer = writer
        self._group = group
        self._beginning = beginning
        self._size = writer.engine.specs[group].block_size
        self._boundaries = kept_boundaries(writer.engine, group, beginning.num_prompt_tokens, beginning.junction)
        self._blocks: dict[int, set[int]] = {}
        self._length = 0
        self._left: set[int] = set()
        self._num_cached = 0
        self._is_placed = False
        self._tail_block: int | None = None
        self._checkpoint: tuple[int, int] | None = None

    @property
    def entries(self) -> Entries:
        """All keys that the sequence entered, of the blocks it gave up as well."""
        lengths = sorted(self._left.union(*self._blocks.values()))
        full = from_blocks(length // self._size - 1 for length in lengths if length % self._size == 0)
        return Entries(full, tuple(length for length in lengths if length % self._size))

    def place(self, step: Step) -> None:
        """Give up old states and take the blocks that the step needs."""
        self._retire(step.settled_len)
        self._checkpoint = self._checkpoint_of(step)
        if not self._is_placed:
            self._admit()
        self._allocate(div_ceil(step.end, self._size))

    def enter(self, length: int) -> None:
        """Enter the states of the first `length` tokens that are in the table."""
        run = (self._num_cached, length // self._size)
        if run[0] < run[1]:
            for index in self._kept(run):
                self._blocks[index] = {(index + 1) * self._size}
            self._num_cached = run[1]
        if self._checkpoint:
            self._enter_checkpoint(*self._checkpoint)
        elif self._is_prompt_state(length):
            self._enter_tail(length)

    # -- the table ----------------------------------------------------------------------------------------------------

    def _retire(self, settled_len: int) -> None:
        """Blocks before the settled state are given up. They keep their keys until the pool takes them."""
        last = (settled_len - 1) // self._size
        for index in [index for index in self._blocks if index < last]:
            self._left |= self._blocks.pop(index)

    def _admit(self) -> None:
        """The state of a hit, in a block of others; a loaded one, in a new block."""
        hit_len, total = self._beginning.hit_len, self._beginning.hit_len + self._beginning.loaded_len
        if not total:
            return
        skipped, num_hit = (total - 1) // self._size, div_ceil(hit_len, self._size)
        self._num_cached = self._length = max(skipped, num_hit)
        if num_hit > skipped:
            self._blocks[num_hit - 1] = {hit_len}
            if hit_len % self._size:
                self._tail_block = self._num_cached = num_hit - 1
        if self._beginning.loaded_len:
            self._extend(div_ceil(total, self._size))

    def _allocate(self, end: int) -> None:
        """Blocks for the state at the end of the chunk, block `end` - 1, and for the drafts behind it."""
        num_drafts, before = self._writer.num_draft_states, self._length
        first_placed = end - 1 - (self._checkpoint is not None)
        self._length = max(before, first_placed)
        if self._is_placed:
            self._relocate_drafts(range(before - num_drafts, min(before, first_placed)))
        self._split_tail()
        self._extend(end + num_drafts)
        self._is_placed = True

    def _relocate_drafts(self, indices: range) -> None:
        for index in indices:
            self._blocks[self._length] = self._blocks.pop(index)
            self._length += 1

    def _split_tail(self) -> None:
        """A state inside a block stays with its key in a copy; the sequence goes on in a block without one."""
        if self._tail_block is not None:
            self._left |= self._blocks[self._tail_block]
            self._blocks[self._tail_block] = set()
        self._tail_block = None

    def _extend(self, length: int) -> None:
        self._blocks.update((index, set()) for index in range(self._length, length))
        self._length = max(self._length, length)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _kept(self, run: Run) -> list[int]:
        writer = self._writer
        kept = reachable_runs(writer.engine, self._group, run, writer.retention, self._boundaries)
        runs = (run,) if kept is None else kept
        return [index for index in self._blocks if any(start <= index < end for start, end in runs)]

    def _is_prompt_state(self, length: int) -> bool:
        """Whether a resent prompt looks for this one, or a sequence that leaves the prompt at a junction."""
        writer, beginning = self._writer, self._beginning
        unit = writer.engine.model.hashed_step
        if length <= 0 or length % unit:
            return False
        at_junction = writer.enters_junctions and length == beginning.junction
        return length == writer.prompt_boundary(beginning.num_prompt_tokens, unit) or (
            at_junction and length <= beginning.num_prompt_tokens
        )

    def _enter_tail(self, length: int) -> None:
        index = div_ceil(length, self._size) - 1
        if index not in self._blocks:
            return
        keys = self._blocks[index]
        if keys and max(keys) < length:
            keys.clear()
        keys.add(length)
        if length % self._size:
            self._tail_block = index

    # -- prefill checkpoints ------------------------------------------------------------------------------------------

    def _checkpoint_of(self, step: Step) -> tuple[int, int] | None:
        """(length, index) of the state that the chunk saves inside it, in the block before its last; None: none."""
        writer, unit = self._writer, self._writer.engine.model.hashed_step
        if writer.checkpoint_step is None or (writer.retention == 0 and step.end < self._prefill_end(step)):
            return None
        length = writer.prompt_boundary(step.end, writer.engine.model.hit_step)
        index = div_ceil(step.end, self._size) - 2
        exports = (
            step.start % unit == 0
            and index > (step.start - 1) // self._size
            and step.start < length < step.end
            and (length - step.start) % writer.checkpoint_step == 0
        )
        return (length, index) if exports else None

    def _prefill_end(self, step: Step) -> int:
        return max(self._beginning.num_prompt_tokens, step.num_tokens - 1)

    def _enter_checkpoint(self, length: int, index: int) -> None:
        """The block's state was replaced by the checkpoint's; one that nobody looks for has no key."""
        self._blocks[index] = {length} if self._is_retained(length) else set()

    def _is_retained(self, length: int) -> bool:
        writer, beginning, end = self._writer, self._beginning, length // self._size
        if length == beginning.junction:
            return True
        if length == writer.prompt_boundary(beginning.num_prompt_tokens, writer.engine.model.hit_step):
            return True
        if length % self._size:
            return False
        return reachable_runs(writer.engine, self._group, (end - 1, end), writer.retention, ()) != ()

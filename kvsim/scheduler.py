"""The engine's scheduler, step by step: who runs with how many tokens, who is admitted, who is preempted.

It takes the decisions of vLLM's V1 `Scheduler` (first come first served, chunked prefill, recompute on preemption,
whole prompts must fit) for one full-attention group; the pool's decisions come from `kvcore.request`.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvcore.errors import require
from kvcore.group_runs import GroupRuns
from kvcore.plans import Load, Lookup, Offer, Store
from kvcore.pool import BlockPool, Holding, Match, hit_limit
from kvcore.units import div_ceil
from kvsim.sequence import Sequence, Status
from kvsim.step import Step


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's own bounds on one step and on its memory; `num_blocks` leaves out the engine's null block."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence, prompt and output, that the cache can hold."""
        return self.num_blocks * self.block_size


class Pool(Protocol):
    """Carries out a request's plans; reports come back to the request and to the instance later."""

    def lookup(self, sequence: Sequence, plan: Lookup) -> None:
        """Ask; `lookup_answered` follows."""

    def load(self, sequence: Sequence, plan: Load) -> None:
        """Fetch into the sequence's blocks; `load_finished` follows."""

    def store(self, sequence: Sequence, plan: Store) -> None:
        """Write from the sequence's blocks, which are pinned until `store_finished`."""

    def wake_at(self, sequence: Sequence, at_ns: int) -> None:
        """Schedule again at that time, if the sequence is still to be considered again then."""


class Scheduler:
    """Queues and blocks of one instance. Times are arguments; nothing here waits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool: Pool | None = None
        """Who carries out the plans of sequences that have a machine."""
        self.blocks = BlockPool(limits.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.block_holders: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._loaded: set[Sequence] = set()
        self._prefilling: dict[Sequence, None] = {}
        self._admitted: list[tuple[Sequence, int, int]] = []
        self._in_vain: list[tuple[Sequence, Match]] = []
        self._now_ns = 0

    @property
    def has_waiting(self) -> bool:
        """Whether some request is not running, whatever it waits for."""
        return bool(self.waiting or self.block_holders)

    @property
    def has_requests(self) -> bool:
        """Whether some request is not finished."""
        return bool(self.running or self.waiting or self.block_holders)

    # -- events ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A request arrived; it can fit (`Limits.capacity_tokens`)."""
        self.waiting.append(sequence)

    def load_finished(self, sequence: Sequence, valid_len: int) -> None:
        """The blocks of a loading sequence hold its first `valid_len` tokens; it is scheduled again from there."""
        sequence.num_computed = valid_len
        self._loaded.add(sequence)

    def complete(self, step: Step, num_steps: int, now_ns: int) -> list[Sequence]:
        """`step` ran `num_steps` times (more than once: pure decode). Returns the sequences that finished by it."""
        self._now_ns = now_ns
        finished: list[Sequence] = []
        for sequence, before, num_new in step.scheduled:
            computed_len = sequence.num_computed = before + num_new + num_steps - 1
            if computed_len >= sequence.num_tokens:
                sequence.num_tokens = computed_len + 1
                if computed_len + 1 == sequence.end_len:
                    finished.append(sequence)
        for sequence in finished:
            self._finish(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]
        return finished

    def pin(self, sequence: Sequence, blocks: GroupRuns) -> list[Holding]:
        """Hold these blocks of the sequence, which may lose its own meanwhile, until `unpin`; they are full."""
        assert sequence.holding is not None
        return [self.blocks.pin(sequence.holding, run) for runs in blocks for run in runs]

    def unpin(self, pinned: list[Holding]) -> None:
        """Nobody reads them any more."""
        for holding in pinned:
            self.blocks.free(holding)

    # -- one step ----------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> Step:
        """Decide the next step and take its blocks; an empty one means that there is nothing to run now."""
        self._now_ns = now_ns
        step = Step()
        self._admitted = step.admitted
        self._in_vain.clear()
        budget = self._schedule_running(step)
        if not step.preempted and self.has_waiting:
            self._schedule_waiting(step, budget)
        return step

    def jump_limit(self, step: Step) -> int:
        """How often the pure decode `step`, whose blocks are taken, can run before a sequence finishes or lacks blocks.

        At least 1. Nothing else can change by itself: whoever waits in vain now would do so in every such step. A step
        that preempts does not consider who waits, so the next one must; one that stores ends before the bytes leave.
        """
        if step.preempted or step.num_stores:
            return 1
        steps = min([sequence.remaining_output for sequence, _, _ in step.scheduled])
        if any(self._may_lengthen(sequence, match) for sequence, match in self._in_vain):
            steps = min(steps, self._steps_before_block(step))
        may_shorten = any(match.num_free and sequence.kv is not None for sequence, match in self._in_vain)
        num_free = self.blocks.num_anonymous if may_shorten else self.blocks.num_free
        if self._blocks_for_jump(step, steps) <= num_free:
            return steps
        return bisect_right(range(2, steps), num_free, key=partial(self._blocks_for_jump, step)) + 1

    def take_jump_blocks(self, step: Step, num_steps: int) -> None:
        """Allocate what `num_steps` of the pure decode `step` need beyond the first; others find what is full."""
        block_size = self.limits.block_size
        for sequence, before, _ in step.scheduled:
            self._grow(sequence, div_ceil(before + num_steps, block_size))
            self._cache(sequence, before + num_steps)

    def _may_lengthen(self, sequence: Sequence, match: Match) -> bool:
        """Whether some running sequence generates what comes next in this one."""
        following = next((stream for stream, _, end in sequence.segments if end > match.num_blocks), None)
        return any(running.segments and running.segments[-1][0] == following for running in self.running)

    def _steps_before_block(self, step: Step) -> int:
        """Steps until, not including, the next one after the first that fills a block."""
        block_size = self.limits.block_size
        return min(block_size - (before + 1) % block_size for _, before, _ in step.scheduled)

    def _blocks_for_jump(self, step: Step, num_steps: int) -> int:
        block_size = self.limits.block_size
        # Each holds the blocks of its tokens, the next one's included, and no more.
        return sum(
            [-(-(before + num_steps) // block_size) - sequence.num_blocks for sequence, before, _ in step.scheduled]
        )

    # -- running sequences -------------------------------------------------------------------------------------

    def _schedule_running(self, step: Step) -> int:
        """Tokens for those that run already, in order; returns the budget that is left."""
        budget, block_size = self.limits.max_num_batched_tokens, self.limits.block_size
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            computed_len = sequence.num_computed
            num_new = min(sequence.num_tokens - computed_len, budget)
            num_tokens = computed_len + num_new
            if num_tokens > sequence.num_blocks * block_size and not self._make_room(sequence, num_tokens, step):
                break
            self._run(sequence, num_new, step)
            budget -= num_new
            index += 1
        return budget

    def _make_room(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Take blocks for `num_tokens`, preempting the last admitted until it fits; False: it preempted itself."""
        num_blocks = div_ceil(num_tokens, self.limits.block_size)
        while num_blocks - sequence.num_blocks > self.blocks.num_free:
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is sequence:
                return False
        self._grow(sequence, num_blocks)
        return True

    def _preempt(self, victim: Sequence, step: Step) -> None:
        self._free(victim)
        step.preempted.append((victim, victim.num_computed))
        victim.status = Status.PREEMPTED
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._prefilling.pop(victim, None)
        if victim.kv is not None:
            victim.kv.preempted()
        self.waiting.appendleft(victim)

    # -- waiting sequences -------------------------------------------------------------------------------------

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        """Admit in order while tokens, slots and blocks last; who waits for the pool is passed over, not waited for."""
        passed_holders: list[Sequence] = []
        passed: list[Sequence] = []
        while budget > 0 and len(self.running) < self.limits.max_num_seqs:
            queue = self.block_holders or self.waiting
            if not queue:
                break
            sequence = queue[0]
            num_new = self._admit(sequence, budget)
            if num_new is None:
                break
            queue.popleft()
            if num_new:
                self.running.append(sequence)
                self._run(sequence, num_new, step)
                budget -= num_new
            else:
                (passed_holders if sequence.status is Status.LOADING else passed).append(sequence)
        self.block_holders.extendleft(reversed(passed_holders))
        self.waiting.extendleft(reversed(passed))

    def _admit(self, sequence: Sequence, budget: int) -> int | None:
        """Tokens it computes in this step; 0: it waits for the pool; None: no room, and nobody behind it may pass."""
        if sequence.status is Status.LOADING:
            if sequence not in self._loaded:
                return 0
            self._resume_after_load(sequence)
        if sequence.num_computed:
            return self._admit_with(sequence, None, budget)
        match = self.blocks.match(sequence.segments, hit_limit(sequence.num_tokens, self.limits.block_size))
        num_new = self._admit_matched(sequence, match, budget)
        if not num_new and sequence.status is not Status.LOADING:
            self._watch(sequence, match)
        return num_new

    def _admit_matched(self, sequence: Sequence, match: Match, budget: int) -> int | None:
        external_len = self._external_len(sequence, match.num_blocks * self.limits.block_size)
        if external_len is None:
            return 0
        if external_len:
            return self._start_load(sequence, match, external_len)
        return self._admit_with(sequence, match, budget)

    def _watch(self, sequence: Sequence, match: Match) -> None:
        """Who was considered in vain is considered again when time changes the answer, or its local hit may change."""
        self._in_vain.append((sequence, match))
        if sequence.kv is not None and sequence.kv.reconsider_at_ns is not None:
            assert self.pool is not None
            self.pool.wake_at(sequence, sequence.kv.reconsider_at_ns)

    def _external_len(self, sequence: Sequence, local_hit_len: int) -> int | None:
        """Tokens the pool offers beyond the local hit; None while it has not answered."""
        sequence.local_hit_len = sequence.local_hit_len if sequence.admitted else local_hit_len
        if sequence.kv is None:
            return 0
        assert self.pool is not None
        answer = sequence.kv.consider(local_hit_len, sequence.num_tokens, self._now_ns)
        if isinstance(answer, Offer):
            return answer.num_tokens
        if isinstance(answer, Lookup):
            self.pool.lookup(sequence, answer)
        return None

    def _start_load(self, sequence: Sequence, match: Match, external_len: int) -> int | None:
        """Take the blocks of local and external hit, and leave the batch until the load has ended."""
        assert sequence.kv is not None
        assert self.pool is not None
        resume_len = match.num_blocks * self.limits.block_size + external_len
        reserved = sum(self._missing_blocks(other) for other in self._prefilling)
        if not self._fits(sequence, match, resume_len, reserved):
            return None
        sequence.holding = self.blocks.hold(match)
        sequence.num_blocks = match.num_blocks
        self._allocate(sequence, div_ceil(resume_len, self.limits.block_size))
        self._record_admission(sequence, external_len)
        load = sequence.kv.granted(external_len, self._now_ns)
        assert load is not None
        sequence.status = Status.LOADING
        sequence.num_computed = resume_len
        self._prefilling[sequence] = None
        self.pool.load(sequence, load)
        return 0

    def _resume_after_load(self, sequence: Sequence) -> None:
        self._loaded.discard(sequence)
        sequence.status = Status.PREEMPTED if sequence.num_preemptions else Status.WAITING
        if sequence.num_computed:
            self._cache(sequence, sequence.num_computed)
        else:
            self._free(sequence)

    def _admit_with(self, sequence: Sequence, match: Match | None, budget: int) -> int | None:
        """Admit without (more) loading; `match` None: it holds its computed blocks already."""
        computed_len = sequence.num_computed if match is None else match.num_blocks * self.limits.block_size
        num_new = min(sequence.num_tokens - computed_len, budget)
        if not self._fits(sequence, match, computed_len + num_new, 0):
            return None
        if match is not None:
            sequence.holding = self.blocks.hold(match)
            sequence.num_blocks = match.num_blocks
        sequence.num_computed = computed_len
        self._grow(sequence, div_ceil(computed_len + num_new, self.limits.block_size))
        self._record_admission(sequence, 0)
        if sequence.kv is not None:
            sequence.kv.granted(0, self._now_ns)
        sequence.status = Status.RUNNING
        if computed_len + num_new < sequence.num_tokens:
            self._prefilling[sequence] = None
        return num_new

    def _fits(self, sequence: Sequence, match: Match | None, num_tokens: int, reserved_blocks: int) -> bool:
        """Whether the whole sequence could be held, and `num_tokens` of it now beside what others were promised."""
        whole = self._wanted_blocks(sequence, match, sequence.num_tokens)
        now = self._wanted_blocks(sequence, match, num_tokens)
        watermark = self.limits.watermark_blocks if self.running else 0
        free = self.blocks.num_free
        return whole + watermark <= free and now + watermark <= free - reserved_blocks

    def _wanted_blocks(self, sequence: Sequence, match: Match | None, num_tokens: int) -> int:
        """Free blocks that holding `num_tokens` takes: new ones, and matched ones that nobody holds now."""
        required = div_ceil(num_tokens, self.limits.block_size)
        if match is None:
            return max(required - sequence.num_blocks, 0)
        return max(required - match.num_blocks, 0) + match.num_free

    def _missing_blocks(self, sequence: Sequence) -> int:
        return max(div_ceil(sequence.num_tokens, self.limits.block_size) - sequence.num_blocks, 0)

    def _record_admission(self, sequence: Sequence, external_len: int) -> None:
        if not sequence.admitted:
            sequence.admitted = True
            sequence.external_hit_len = external_len
            self._admitted.append((sequence, sequence.local_hit_len, external_len))

    # -- blocks ------------------------------------------------------------------------------------------------

    def _run(self, sequence: Sequence, num_new: int, step: Step) -> None:
        """The step computes `num_new` tokens of it; the blocks they fill are found by others from now on."""
        before = sequence.num_computed
        computed_len = before + num_new
        step.scheduled.append((sequence, before, num_new))
        self._cache(sequence, computed_len)
        kv = sequence.kv
        if kv is not None and kv.next_store_len is not None and computed_len >= kv.next_store_len:
            store = kv.computed(computed_len, self._now_ns)
            step.num_stores += store is not None
            self._store(sequence, store)
        if computed_len >= sequence.num_tokens:
            self._prefilling.pop(sequence, None)

    def _grow(self, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks > sequence.num_blocks:
            self._allocate(sequence, num_blocks)

    def _allocate(self, sequence: Sequence, num_blocks: int) -> None:
        assert sequence.holding is not None
        self.blocks.allocate(sequence.holding, num_blocks - sequence.num_blocks)
        sequence.num_blocks = num_blocks

    def _cache(self, sequence: Sequence, num_tokens: int) -> None:
        assert sequence.holding is not None
        num_blocks = num_tokens // self.limits.block_size
        if num_blocks > sequence.holding.cached_end:
            self.blocks.cache(sequence.holding, sequence.segments, num_blocks)

    def _store(self, sequence: Sequence, plan: Store | None) -> None:
        if plan is not None:
            assert self.pool is not None
            self.pool.store(sequence, plan)

    def _free(self, sequence: Sequence) -> None:
        if sequence.holding is None:
            return
        self.blocks.free(sequence.holding)
        sequence.holding = None
        sequence.num_blocks = 0

    def _finish(self, sequence: Sequence) -> None:
        if sequence.kv is not None:
            self._store(sequence, sequence.kv.finished(sequence.num_computed, self._now_ns))
        self._free(sequence)
        sequence.status = Status.FINISHED

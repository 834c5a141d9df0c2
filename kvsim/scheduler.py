"""The engine's scheduler, step by step: who runs with how many tokens, who is admitted, who is preempted.

It takes the decisions of vLLM's V1 `Scheduler` (first come first served, chunked prefill, recompute on preemption,
whole prompts must fit); what blocks they take is `kvcore.gpu_cache`'s to say, and the pool's decisions come from
`kvcore.request`.
"""

from bisect import bisect_right
from collections import deque
from functools import partial
from typing import Protocol

from kvcore.gpu_cache import NO_TABLES, Hit
from kvcore.group_runs import GroupRuns
from kvcore.holding import Holding
from kvcore.plans import Load, Lookup, Offer, Store
from kvsim import decode_jump
from kvsim.limits import Limits
from kvsim.sequence import Sequence, Status
from kvsim.step import Step


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
        self.cache = limits.make_cache()
        self.blocks = self.cache.blocks
        self.waiting: deque[Sequence] = deque()
        self.block_holders: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._loaded: set[Sequence] = set()
        self._prefilling: dict[Sequence, None] = {}
        self._admitted: list[tuple[Sequence, int, int]] = []
        self._in_vain: list[tuple[Sequence, Hit]] = []
        self._awaits_state = self._lacks_room = False
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
        sequence.names = self.cache.names(sequence.segments)
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
        return self.cache.pin(sequence.tables, blocks)

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
        self._awaits_state = self._lacks_room = False
        self.cache.begin_step()
        budget = self._schedule_running(step)
        if not step.preempted and self.has_waiting:
            self._schedule_waiting(step, budget)
        return step

    def jump_limit(self, step: Step) -> int:
        """How often the pure decode `step`, whose blocks are taken, can run before a sequence finishes or lacks blocks.

        At least 1. Nothing else can change by itself: whoever waits in vain now would do so in every such step. A step
        that preempts does not consider who waits, so the next one must; one that stores ends before the bytes leave.
        """
        if step.preempted or step.num_stores or self._awaits_state:
            return 1
        steps = min([sequence.remaining_output for sequence, _, _ in step.scheduled])
        if any(self._may_lengthen(sequence, hit) for sequence, hit in self._in_vain):
            steps = min(steps, decode_jump.steps_before_block(step))
        if not self.cache.keeps_all:
            steps = min(steps, decode_jump.steps_before_store(self.cache, step))
            steps = min(steps, decode_jump.steps_before_drop(step)) if self._lacks_room else steps
        may_shorten = any(hit.num_free and self._reads_match(sequence) for sequence, hit in self._in_vain)
        num_free = self.blocks.num_anonymous if may_shorten else self.blocks.num_free
        if self.cache.lacking_at_most(steps) * len(step.scheduled) <= num_free:
            return steps
        blocks_for = partial(decode_jump.blocks_for, self.cache, step)
        return steps if blocks_for(steps) <= num_free else bisect_right(range(2, steps), num_free, key=blocks_for) + 1

    def take_jump_blocks(self, step: Step, num_steps: int) -> None:
        """Allocate what `num_steps` of the pure decode `step` need beyond the first; others find what is full."""
        decode_jump.take_blocks(self.cache, step, num_steps)

    def _may_lengthen(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether some running sequence generates what this one may come to hit."""
        unit = self.limits.block_size
        following = {stream for stream, _, end in sequence.segments if end * unit > hit.hit_len}
        return any(running.segments and running.segments[-1][0] in following for running in self.running)

    def _reads_match(self, sequence: Sequence) -> bool:
        """Whether a shorter hit may be admitted where a longer one is not: it is offered other tokens, or windows."""
        return sequence.kv is not None or not self.cache.keeps_all

    # -- running sequences -------------------------------------------------------------------------------------

    def _schedule_running(self, step: Step) -> int:
        """Tokens for those that run already, in order; returns the budget that is left."""
        budget, has_states = self.limits.max_num_batched_tokens, self.cache.has_states
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            index += 1
            tables, computed_len = sequence.tables, sequence.num_computed
            num_new = min(sequence.num_tokens - computed_len, budget)
            if has_states:
                num_new = self._chunk(sequence, tables.junction, computed_len, num_new)
                if not num_new:
                    continue
            num_tokens = computed_len + num_new
            if num_tokens > tables.room_len and not self._make_room(sequence, num_tokens, step):
                break
            self._run(sequence, num_new, step)
            budget -= num_new
        return budget

    def _chunk(self, sequence: Sequence, junction: int | None, start: int, num_new: int) -> int:
        """Tokens of a chunk of at most `num_new`, of a model with states; 0: with so few it makes none that counts."""
        return self.cache.chunk(start, start + num_new, sequence.input_len, sequence.num_tokens, junction) - start

    def _make_room(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Take blocks for `num_tokens`, preempting the last admitted until it fits; False: it preempted itself."""
        tables = sequence.tables
        self.cache.drop(tables, sequence.num_computed)
        while self.cache.lacking(tables, num_tokens) > self.blocks.num_free:
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is sequence:
                return False
        self.cache.grow(tables, num_tokens)
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
        hit = self.cache.find(sequence.names, sequence.num_tokens)
        num_new = self._admit_hit(sequence, hit, budget)
        if not num_new and sequence.status is not Status.LOADING:
            self._watch(sequence, hit)
        return num_new

    def _admit_hit(self, sequence: Sequence, hit: Hit, budget: int) -> int | None:
        external_len = self._external_len(sequence, hit.hit_len)
        if external_len is None:
            return 0
        if external_len:
            return self._start_load(sequence, hit, external_len)
        return self._admit_with(sequence, hit, budget)

    def _watch(self, sequence: Sequence, hit: Hit) -> None:
        """Who was considered in vain is considered again when time changes the answer, or its local hit may change."""
        self._in_vain.append((sequence, hit))
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

    def _start_load(self, sequence: Sequence, hit: Hit, external_len: int) -> int | None:
        """Take the blocks of local and external hit, and leave the batch until the load has ended."""
        assert sequence.kv is not None
        assert self.pool is not None
        resume_len = hit.hit_len + external_len
        beginning = self.cache.resumed(hit, sequence.names, resume_len)
        reserved = sum([self.cache.promised(other.tables, other.num_tokens) for other in self._prefilling])
        if not self._fits(sequence, beginning.ends, beginning, resume_len, reserved):
            return None
        sequence.tables = self.cache.hold(beginning, sequence.input_len)
        self.cache.grow(sequence.tables, resume_len)
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
            self.cache.enter(sequence.tables, sequence.names, sequence.num_computed)
        else:
            self._free(sequence)

    def _admit_with(self, sequence: Sequence, hit: Hit | None, budget: int) -> int | None:
        """Admit without (more) loading; `hit` None: it holds its computed blocks already."""
        computed_len = sequence.num_computed if hit is None else hit.hit_len
        junction, ends = (sequence.tables.junction, sequence.tables.ends) if hit is None else (hit.junction, hit.ends)
        num_new = min(sequence.num_tokens - computed_len, budget)
        if self.cache.has_states:
            num_new = self._chunk(sequence, junction, computed_len, num_new)
        if not num_new or not self._fits(sequence, ends, hit, computed_len + num_new, 0):
            return None
        if hit is not None:
            sequence.tables = self.cache.hold(hit, sequence.input_len)
        sequence.num_computed = computed_len
        self.cache.grow(sequence.tables, computed_len + num_new)
        self._record_admission(sequence, 0)
        if sequence.kv is not None:
            sequence.kv.granted(0, self._now_ns)
        sequence.status = Status.RUNNING
        if computed_len + num_new < sequence.num_tokens:
            self._prefilling[sequence] = None
        return num_new

    def _fits(self, sequence: Sequence, ends: tuple[int, ...], hit: Hit | None, num_tokens: int, reserved: int) -> bool:
        """Whether the whole sequence could be held, and `num_tokens` of it now beside what others were promised."""
        if hit is not None and self.cache.is_fresh(hit):
            self._awaits_state = True
            return False
        matched = self.limits.watermark_blocks if self.running else 0
        matched += 0 if hit is None else hit.num_free
        whole = self.cache.missing_at_most(ends, sequence.num_tokens) + matched
        now = self.cache.missing(ends, num_tokens) + matched
        fits = whole <= self.blocks.num_free and now <= self.blocks.num_free - reserved
        self._lacks_room |= not fits
        return fits

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
        tables, kv = sequence.tables, sequence.kv
        states = self.cache.enter(tables, sequence.names, computed_len) if computed_len >= tables.cache_len else ()
        if kv is not None and kv.next_store_len is not None and computed_len >= kv.next_store_len:
            self._plan_store(sequence, kv.computed(computed_len, self._now_ns), step)
        if kv is not None and states:
            for group, state_len in states:
                self._plan_store(sequence, kv.state_saved(group, state_len, self._now_ns), step)
        if computed_len >= sequence.num_tokens:
            self._prefilling.pop(sequence, None)

    def _plan_store(self, sequence: Sequence, plan: Store | None, step: Step) -> None:
        step.num_stores += plan is not None
        self._store(sequence, plan)

    def _store(self, sequence: Sequence, plan: Store | None) -> None:
        if plan is not None:
            assert self.pool is not None
            self.pool.store(sequence, plan)

    def _free(self, sequence: Sequence) -> None:
        self.cache.free(sequence.tables)
        sequence.tables = NO_TABLES

    def _finish(self, sequence: Sequence) -> None:
        if sequence.kv is not None:
            self._store(sequence, sequence.kv.finished(sequence.num_computed, self._now_ns))
        self._free(sequence)
        sequence.status = Status.FINISHED

"""The scheduler half: hands vLLM's scheduler events to each request's machine, and its plans to the worker half.

No decision is taken here; `kvcore.request` takes them. Nothing here waits: lookups run on their own thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from kvconnector.block_table import Located, located
from kvconnector.events import PoolEvents
from kvconnector.keys import KeySpace
from kvconnector.lookups import LookupThread, Told
from kvconnector.metadata import Ended, JobId, LoadJob, StepMetadata, StoreJob, WorkerReport
from kvconnector.metrics import LOOKUPS, PINNED, WAITING, Operation, Tally
from kvconnector.plan_job import PlanJob
from kvconnector.record import Life
from kvcore.access import ALL_ACCESS, Access
from kvcore.group_runs import GroupRuns, count_blocks
from kvcore.keys import BlockHash, BlockKey, Namespace, shard_keys, whole_blocks
from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import Load, Lookup, Offer, PoolPolicy, Store
from kvcore.ports import Clock, StoreOutcome
from kvcore.request import KVRequest, State
from kvcore.types import Run
from kvcore.units import div_ceil

_NO_JOBS = StepMetadata((), ())


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request, and its machine; `starts_over` from when a load left nothing until it is considered again.

    `filled_len`: tokens that are in its blocks, as far as is known: blocks may be another connector's to fill.
    """

    request: Any
    machine: KVRequest
    life: Life
    starts_over: bool = False
    filled_len: int = 0
    failed_ns: int = 0
    local_hit_len: int = 0
    is_asking: bool = False
    has_resumed: bool = False
    has_run: bool = False


class SchedulerHalf:
    """One per engine. Each request whose last plan has ended goes to `on_closed` and, with its times, to `record`.

    `access` says at any time what may be done with the pool. What becomes of blocks in it goes to `events`, if any.
    """

    def __init__(
        self,
        planner: Planner,
        policy: PoolPolicy,
        keys: KeySpace,
        lookups: LookupThread,
        clock: Clock,
    ) -> None:
        self.on_closed: Callable[[Any, KVRequest], None] = lambda request, machine: None
        self.access: Callable[[], Access] = lambda: ALL_ACCESS
        self.record: Callable[[Any, KVRequest, Life], None] = lambda request, machine, life: None
        self.events: PoolEvents | None = None
        self._planner = planner
        self._configured = self._policy = policy
        self._heeded = ALL_ACCESS
        self._keys = keys
        self._ranks = keys.num_ranks
        self._shards = tuple((kind.group, keys.num_shards(kind.group)) for kind in planner.model.kinds)
        self._lookups = lookups
        self._clock = clock
        self._experience = Experience()
        self._pool: Any = None
        self._tracked: dict[str, _Tracked] = {}
        self._jobs: dict[JobId, PlanJob] = {}
        self._starting_over: set[_Tracked] = set()
        self._landing: dict[_Tracked, int] = {}
        self._loads: list[LoadJob] = []
        self._stores: list[StoreJob] = []
        self._next_job = 0
        self._num_pinned = 0
        self.tally = Tally()
        """What this half counts; its owner may add gauges."""
        self.tally.watch(WAITING.of(Operation.LOOKUP.value), lambda: lookups.num_waiting)
        self.tally.watch(PINNED.of(), lambda: self._num_pinned)

    @property
    def namespace(self) -> Namespace:
        """Of the keys that are asked, loaded and stored."""
        return self._keys.namespace

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """The engine's block pool, whose reference counts pin what a store reads."""
        self._pool = pool

    # -- before admission -------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the local hit, asynchronously); None while the pool has not answered.

        None also once after a load that left nothing: the engine ends its scan of those that wait at the first that
        finds no room, and this one could wait for blocks of another whose load failed too and who is never seen.
        """
        self._heed_access()
        tracked = self._track(request)
        tracked.local_hit_len = tracked.filled_len = num_computed_tokens
        tracked.has_resumed = False
        if tracked.starts_over:
            tracked.starts_over = False
            return None, False
        if tracked.machine.state is State.COMPUTING:
            tracked.machine.preempted()  # the engine does not say so before it asks again
        self._take_answers()
        answer = tracked.machine.consider(num_computed_tokens, request.num_tokens, self._clock.now_ns())
        if isinstance(answer, Lookup):
            self._ask(tracked, answer)
        if not isinstance(answer, Offer):
            return None, False
        if answer.num_tokens and self._must_wait(tracked, num_computed_tokens + answer.num_tokens):
            return (0 if self._held_back_long() else None), False
        return answer.num_tokens, answer.num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The scheduler admitted the request; what it granted is loaded into the blocks it allocated."""
        tracked = self._track(request)
        self._starting_over.discard(tracked)
        self._ask_no_more(tracked)
        now_ns = self._clock.now_ns()
        tracked.life.admitted(now_ns)
        tracked.filled_len += num_external_tokens
        load = tracked.machine.granted(num_external_tokens, now_ns)
        if load is not None:
            self._landing[tracked] = self._num_blocks_after(tracked, load.resume_len)
            self._load(tracked, load, blocks.get_block_ids())

    # -- a step -----------------------------------------------------------------------------------------------

    def build_connector_meta(self, output: Any) -> StepMetadata:
        """What the worker half is to do in this step: loads that were granted, stores of what the step fills."""
        self._heed_access()
        now_ns = self._clock.now_ns()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if self._landing:
                self._landing.pop(tracked, None)
            if not tracked.has_resumed:
                tracked.has_resumed = True
                self._resume(tracked, now_ns)
            request, machine = tracked.request, tracked.machine
            # A step may also compute tokens nobody knows yet: drafts, and what an overlapping step samples.
            tracked.filled_len = num_valid = min(request.num_computed_tokens + num_tokens, request.num_tokens)
            if machine.next_store_len is None or num_valid < machine.next_store_len:
                continue
            store = machine.computed(num_valid, now_ns)
            if store is not None:
                self._store(tracked, store, output.kv_connector_block_state.get_block_ids(request_id))
        if output.kv_connector_block_state is not None:
            self._save_states(output.kv_connector_block_state, now_ns)
        if not self._loads and not self._stores:
            return _NO_JOBS
        loads, self._loads = self._loads, []
        stores, self._stores = self._stores, []
        return StepMetadata(tuple(loads), tuple(stores))

    def update_connector_output(self, report: WorkerReport | None) -> None:
        """Jobs that ended at some rank: the last report ends the plan and takes the pins off its blocks."""
        if report is None:
            return
        for ended in report.finished:
            self._report(ended)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """The request ended; its blocks may be freed at once, those still to be stored are pinned."""
        self._heed_access()
        # Its id may come again while its last plans are under way, which keep it alive.
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._starting_over.discard(tracked)
        self._landing.pop(tracked, None)
        self._ask_no_more(tracked)
        # The last sampled token, and what an overlapping step may still be computing, has no KV yet.
        num_valid = min(request.num_computed_tokens, request.num_tokens - 1, tracked.filled_len)
        tracked.life.finished_ns = now_ns = self._clock.now_ns()
        store = tracked.machine.finished(num_valid, now_ns)
        if store is not None:
            self._store(tracked, store, block_ids)
        self._close(tracked)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping so that jobs can be reported."""
        return bool(self._jobs)

    def move_to(self, namespace: Namespace) -> None:
        """From now on ask, load and store under other keys; what is under way goes on under the old ones."""
        self._keys = replace(self._keys, namespace=namespace)
        self._experience.clear()
        if self.events is not None:
            self.events.reset()
        for tracked in {*self._tracked.values(), *(job.tracked for job in self._jobs.values())}:
            self._ask_no_more(tracked)
            tracked.machine.reset()

    # -- inside -----------------------------------------------------------------------------------------------

    def _heed_access(self) -> None:
        """From here on requests are decided under what is allowed now."""
        access = self.access()
        if access == self._heeded:
            return
        self._heeded, self._policy = access, access.limit(self._configured)
        for tracked in self._tracked.values():
            tracked.machine.policy = self._policy

    def _track(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            names_of = partial(self._hashes_of, request.block_hashes)
            machine = KVRequest(self._planner, self._policy, request.num_prompt_tokens, self._experience, names_of)
            tracked = self._tracked[request.request_id] = _Tracked(request, machine, Life(self._clock.now_ns()))
        return tracked

    def _resume(self, tracked: _Tracked, now_ns: int) -> None:
        """Its first step since it was admitted: what is in its blocks beyond cache and pool is another connector's.

        But for less than the engine's hits are told in: its own cache splits blocks.
        """
        resume_len, model = tracked.request.num_computed_tokens, self._planner.model
        if model.tail_groups and tracked.filled_len < resume_len < tracked.filled_len + model.alignment:
            tracked.local_hit_len += resume_len - tracked.filled_len
            tracked.filled_len = resume_len
        if not tracked.has_run:
            tracked.has_run, tracked.life.started_ns = True, now_ns
            self.tally.prompt(tracked.request, tracked.local_hit_len, tracked.filled_len)
        if resume_len > tracked.filled_len:
            tracked.machine.adopted(resume_len)

    def _must_wait(self, tracked: _Tracked, resume_len: int) -> bool:
        """Whether a load up to `resume_len` could wait for ever for room, or let others do so, as vLLM 0.32 counts.

        It keeps the room of a load that left nothing reserved, against other loads, until its request is admitted. And
        for a window it reserves less than the next step takes: loads that have ended could hold all blocks but those
        which each of them lacks. Here those are kept free until a load that was granted has led to a step.
        """
        if self._starting_over:
            return tracked not in self._starting_over
        if not self._landing:
            return False
        held = count_blocks(self._planner.held(resume_len))
        lacking = self._num_blocks_after(tracked, resume_len) + sum(self._landing.values())
        return bool(self._pool.get_num_free_blocks() < held + lacking)

    def _held_back_long(self) -> bool:
        """Whether one that starts over has not been seen for so long that others compute rather than wait for it."""
        overdue_ns = self._clock.now_ns() - self._policy.offer_ttl_ns
        return any(other.failed_ns < overdue_ns for other in self._starting_over)

    def _num_blocks_after(self, tracked: _Tracked, resume_len: int) -> int:
        """Blocks, of all groups, for the tokens from `resume_len` on."""
        sizes = [group.block_size for group in self._planner.model.groups]
        return sum(div_ceil(tracked.request.num_tokens, size) - resume_len // size for size in sizes)

    def _hashes_of(self, hashes: Sequence[bytes], index: int, run: Run) -> Sequence[BlockHash]:
        """What names the content of each block, state or tail of the run: the hash where it ends."""
        step = self._planner.model.kinds[index].num_tokens // self._keys.hash_block_size
        return cast(Sequence[BlockHash], hashes[(run[0] + 1) * step - 1 : run[1] * step : step])

    def _ask(self, tracked: _Tracked, lookup: Lookup) -> None:
        self._ask_no_more(tracked)
        tracked.is_asking = True
        ask = partial(self._question, self._keys, tracked.request.block_hashes)
        self.tally.add(LOOKUPS.of(), 1)
        self._lookups.submit(tracked, lookup, ask)

    def _ask_no_more(self, tracked: _Tracked) -> None:
        if tracked.is_asking:
            tracked.is_asking = False
            self._lookups.forget(tracked)

    def _take_answers(self) -> None:
        for tracked, lookup in self._lookups.take_answers():
            tracked.is_asking = False
            now_ns = self._clock.now_ns()
            self.tally.answered(lookup, lookup.deadline_ns - self._policy.lookup_deadline_ns, now_ns)
            tracked.life.answered(lookup.dialogue, self._shards)
            tracked.machine.lookup_answered(lookup.ticket, now_ns)

    def _question(self, names: KeySpace, hashes: Sequence[bytes], question: GroupRuns) -> tuple[list[BlockKey], Told]:
        """Its keys; what is told are the blocks all of whose shards are there. Runs on the lookup thread."""

        def told(outcomes: Sequence[StoreOutcome]) -> GroupRuns:
            self.tally.keys(Operation.LOOKUP, outcomes)
            return whole_blocks(self._shards, question, [outcome is StoreOutcome.OK for outcome in outcomes])

        return shard_keys(names.namespace, self._shards, partial(self._hashes_of, hashes), question), told

    def _load(self, tracked: _Tracked, load: Load, block_ids: Sequence[Sequence[int]]) -> None:
        stretches, places, missing = self._in_table(tracked, load.blocks, block_ids)
        assert not missing, f"no block to load into: {missing}"
        unproven, _, _ = self._in_table(tracked, load.unproven, block_ids)
        end_plan, namespace = tracked.machine.load_finished, self._keys.namespace
        job = PlanJob(tracked, end_plan, load.ticket, namespace, (), places, (), self._ranks)
        unwritten = tuple(block_id for stretch in unproven for block_id in stretch.block_ids)
        self._loads.append(LoadJob(self._open(job), tracked.request.request_id, namespace, stretches, unwritten))

    def _save_states(self, offers: Any, now_ns: int) -> None:
        """The engine lends the blocks that hold recurrent states at exact boundaries, in this step."""
        for request_id, handed in offers.boundary_state_offloads.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.machine.state is not State.COMPUTING:
                continue
            for group, block_id, state_len in handed:
                store = tracked.machine.state_saved(group, state_len, now_ns)
                if store is not None:
                    self._store(tracked, store, offers.get_block_ids(request_id), {group: block_id})

    def _store(
        self,
        tracked: _Tracked,
        store: Store,
        block_ids: Sequence[Sequence[int]],
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """A window group may have given a block back before it was to be stored; that one counts as not written.

        `states`: block of the state to store, by group; it is not in the block table, or not where it belongs.
        """
        stretches, places, missing = self._in_table(tracked, store.blocks, block_ids, states)
        blocks = self._pool.blocks
        pinned = [blocks[block_id] for stretch in stretches for block_id in stretch.block_ids]
        self._pool.touch(pinned)
        self._num_pinned += len(pinned)
        end_plan, namespace = tracked.machine.store_finished, self._keys.namespace
        job = PlanJob(tracked, end_plan, store.ticket, namespace, missing, places, pinned, self._ranks)
        self._stores.append(StoreJob(self._open(job), tracked.request.request_id, namespace, stretches))

    def _open(self, job: PlanJob) -> JobId:
        self._next_job += 1
        job_id = JobId(self._next_job)
        self._jobs[job_id] = job
        return job_id

    def _report(self, ended: Ended) -> None:
        job = self._jobs.get(ended.job_id)
        if job is None or not job.ended(ended):
            return
        del self._jobs[ended.job_id]
        self._pool.free_blocks(reversed(job.pinned))
        self._num_pinned -= len(job.pinned)
        self._tell(job)
        num_indices = len(self._planner.nothing)
        valid_len = job.end_plan(job.ticket, job.failed(num_indices), self._clock.now_ns())
        if valid_len == 0 and job.tracked.machine.state is State.WAITING:
            job.tracked.starts_over, job.tracked.failed_ns = True, self._clock.now_ns()
            self._starting_over.add(job.tracked)
            self._landing.pop(job.tracked, None)
        self._close(job.tracked)

    def _tell(self, job: PlanJob) -> None:
        """Only of keys that are still in use."""
        if self.events is None or job.namespace != self._keys.namespace:
            return
        num_indices, request = len(self._planner.nothing), job.tracked.request
        self.events.gone(request, job.gone(num_indices))
        if job.pinned:
            self.events.stored(request, job.moved(num_indices))

    def _close(self, tracked: _Tracked) -> None:
        if tracked.machine.closed:
            self.tally.closed(tracked.machine.decisions)
            self.on_closed(tracked.request, tracked.machine)
            self.record(tracked.request, tracked.machine, tracked.life)

    def _in_table(
        self,
        tracked: _Tracked,
        blocks: GroupRuns,
        block_ids: Sequence[Sequence[int]],
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> Located:
        names_of = partial(self._hashes_of, tracked.request.block_hashes)
        return located(self._planner.model, blocks, names_of, block_ids, states)

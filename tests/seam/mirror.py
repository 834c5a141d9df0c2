"""A machine that tells the connector's scheduler half, in vLLM's words, all that it is told, and compares the plans.

Whoever drives it (the simulator, or any interleaving) drives both: every question, answer and plan must be the same.
"""

from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

from kvconnector.jobs import Ended

from kvcore.keys import Namespace
from kvcore.memory import Experience
from kvcore.plans import Lookup, Offer
from kvcore.ports import StoreOutcome
from kvcore.request import KVRequest, State
from tests.kvcore.attention_oracle import as_blocks

NUM_RANKS = 2
NUM_BLOCKS = 10_000
"""Positions that a group's block table has; block id 0 is the engine's null block."""
LENT = 10**6
"""Beyond the block tables: the block of a state that the engine lends."""


class Lookups:
    """In place of the thread: a dialogue stays until its twin goes on."""

    def __init__(self):
        self.asked = []
        self.answered = []

    def submit(self, asker, lookup, ask):
        self.asked.append((asker, lookup, ask))

    def take_answers(self):
        answered, self.answered = self.answered, []
        return answered

    def forget(self, asker):
        """The request has ended; what is answered after that must be ignored."""


class Pins:
    """In place of vLLM's block pool."""

    def __init__(self):
        self.blocks = range(1 << 30)
        self.held = []

    def get_num_free_blocks(self):
        return len(self.blocks)

    def touch(self, blocks):
        self.held += blocks

    def free_blocks(self, blocks):
        for block in blocks:
            self.held.remove(block)


class Hashes:
    """A request's chain of hashes: of what `content` calls the first tokens; remembers how many those were."""

    def __init__(self, unit, content):
        self.unit, self.content = unit, content
        self.length_of = {}

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[each] for each in range(index.start, index.stop, index.step)]
        length = (index + 1) * self.unit
        block_hash = repr(self.content(length)).encode()
        self.length_of[block_hash] = length
        return block_hash


class Half:
    """A scheduler half of one request, and vLLM's side of it; `experience` is that of its engine."""

    def __init__(self, machine, content, experience):
        from kvconnector.keys import KeySpace
        from kvconnector.scheduler import SchedulerHalf

        self.model = machine.planner.model
        self.clock = SimpleNamespace(now_ns=lambda: self.now_ns)
        self.now_ns = self.num_resets = 0
        self.lookups, self.pins, self.closed = Lookups(), Pins(), []
        keys = KeySpace(Namespace("mirror"), self.model.hashed_step, NUM_RANKS)
        self.scheduler = SchedulerHalf(*self.deciders(machine), keys, self.lookups, self.clock)
        self.scheduler._experience = experience
        self.scheduler.bind_gpu_block_pool(self.pins)
        self.scheduler.on_closed = lambda request, twin: self.closed.append(twin)
        self.request = SimpleNamespace(
            request_id="one",
            num_prompt_tokens=machine.num_prompt_tokens,
            num_tokens=machine.num_prompt_tokens,
            num_computed_tokens=0,
            block_hashes=Hashes(self.model.hashed_step, content),
        )
        self.told = False
        self.dialogues = {}
        self.jobs = {}

    def deciders(self, machine):
        """The planner and the policy that the half has."""
        return machine.planner, machine.policy

    def block_ids(self):
        groups = range(len(self.model.groups))
        return tuple(range(group * NUM_BLOCKS + 1, (group + 1) * NUM_BLOCKS) for group in groups)

    def filled_len(self):
        """Tokens that the half knows to be in the request's blocks."""
        return self.scheduler._tracked[self.request.request_id].filled_len

    def compute_to(self, num_tokens, store, now_ns):
        """The steps up to there, as one: what a simulator jumps over, or does not tell, stores nothing."""
        self.now_ns = now_ns
        self.request.num_computed_tokens = min(self.filled_len(), num_tokens - 1)
        self.request.num_tokens = max(self.request.num_tokens, num_tokens)
        self.expect_plans(None, store, {self.request.request_id: num_tokens - self.request.num_computed_tokens})

    def reset(self):
        self.num_resets += 1
        self.scheduler.move_to(Namespace(f"mirror{self.num_resets}"))

    def expect_lookup(self, lookup):
        """A dialogue that begins with the same question and has the same deadline, or none."""
        asked, self.lookups.asked = self.lookups.asked, []
        assert len(asked) == (lookup is not None and 1)
        if lookup is not None:
            ((_, twin, _),) = asked
            assert (twin.dialogue.question, twin.deadline_ns) == (lookup.dialogue.question, lookup.deadline_ns)
            self.dialogues[lookup.ticket] = *asked[0], self.scheduler.namespace

    def round(self, ticket, question, present):
        """The connector puts the same question: every block at every rank, of which some lack the shard of one."""
        _, twin, ask, namespace = self.dialogues[ticket]
        assert twin.dialogue.question == question
        there = set(listed(present))
        keys, told = ask(question)
        assert {key.namespace for key in keys} <= {namespace}
        assert [self.place_of(key) for key in keys[::NUM_RANKS]] == listed(question)
        assert [key.rank for key in keys] == list(range(NUM_RANKS)) * (len(keys) // NUM_RANKS)
        twin.dialogue.answered(told([self.outcome(key, there) for key in keys]))

    def outcome(self, key, there):
        found = self.place_of(key) in there or key.rank != sum(self.place_of(key)) % NUM_RANKS
        return StoreOutcome.OK if found else StoreOutcome.MISSING

    def end_lookup(self, ticket):
        """Ends are noticed whenever a request is considered."""
        self.lookups.answered.append(self.dialogues[ticket][:2])
        other = SimpleNamespace(request_id="other", num_prompt_tokens=1, num_tokens=1, block_hashes=[])
        assert self.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)

    def expect_plans(self, load, store, scheduled=MappingProxyType({}), lent=MappingProxyType({})):
        """The next step brings exactly these plans to the worker; `lent` is (state block, state length) by group."""
        handed = [(group, block_id, length) for group, (block_id, length) in lent.items()]
        state = SimpleNamespace(
            get_block_ids=lambda request_id: self.block_ids(),
            boundary_state_offloads={self.request.request_id: handed} if handed else {},
        )
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        metadata = self.scheduler.build_connector_meta(output)
        self.expect_job(metadata.loads, load, {})
        self.expect_job(metadata.stores, store, lent)
        if load is not None:
            assert list(metadata.loads[0].unwritten) == [self.block_id(*place) for place in listed(load.unproven)]

    def expect_job(self, jobs, plan, lent):
        """What the plan moves under its names, into or from its places in the block table."""
        assert len(jobs) == (plan is not None and 1)
        if plan is None:
            return
        (job,) = jobs
        assert job.namespace == self.scheduler.namespace
        assert [self.place_of(entry) for entry in job.entries] == listed(plan.blocks)
        for entry in job.entries:
            index, position = self.place_of(entry)
            block_id = lent[entry.group][0] if entry.group in lent else self.block_id(index, position)
            assert (entry.position, entry.block_id) == (position, block_id)
        self.jobs[plan.ticket] = job

    def end_job(self, ticket, failed):
        """Rank by rank; each failed block fails at one of the ranks."""
        job, lost = self.jobs.pop(ticket, None), listed(failed)
        if job is None:
            return
        failed_at = [index for index, entry in enumerate(job.entries) if self.place_of(entry) in lost]
        for rank in range(NUM_RANKS):
            mine = tuple(index for index in failed_at if index % NUM_RANKS == rank)
            self.scheduler.update_connector_output(SimpleNamespace(finished=[Ended(job.job_id, 1, mine)]))

    def place_of(self, named):
        """(index in `GroupRuns`, position) of what carries a group and a hash; what ends with a block is no tail."""
        length = self.request.block_hashes.length_of[named.block_hash]
        fitting = (
            (index, length // kind.num_tokens - 1)
            for index, kind in enumerate(self.model.kinds)
            if kind.group == named.group and length % kind.num_tokens == 0
        )
        return next(fitting)

    def block_id(self, index, position):
        """Of the block that holds it, in the block table."""
        kind = self.model.kinds[index]
        last_token = (position + 1) * kind.num_tokens - 1
        return self.block_ids()[kind.group][last_token // self.model.groups[kind.group].block_size]


def listed(blocks):
    return [(index, position) for index, runs in enumerate(blocks) for position in sorted(as_blocks(runs))]


class Dialogue:
    """The machine's own, whose rounds the connector takes part in."""

    def __init__(self, ticket, dialogue, half):
        self.ticket, self.dialogue, self.half = ticket, dialogue, half

    def __getattr__(self, name):
        return getattr(self.dialogue, name)

    def answered(self, present):
        self.half.round(self.ticket, self.dialogue.question, present)
        self.dialogue.answered(present)


class Mirror(KVRequest):
    """The machine under one driver; `half` is the other.

    `content` names the first tokens, given how many; `twin` is what the connector's engine has learnt.
    """

    half_type = Half

    def __init__(self, planner, policy, num_prompt_tokens, *learning, content=int, twin=None):
        super().__init__(planner, policy, num_prompt_tokens, *learning)
        self.half = self.half_type(self, content, twin or Experience())

    def consider(self, local_hit_len, num_tokens, now_ns):
        answer = super().consider(local_hit_len, num_tokens, now_ns)
        self.half.now_ns, self.half.request.num_tokens = now_ns, num_tokens
        self.half.told = True
        reply = self.half.scheduler.get_num_new_matched_tokens(self.half.request, local_hit_len)
        offer = answer.num_tokens if isinstance(answer, Offer) else None
        assert reply == (offer, bool(offer))
        self.half.expect_lookup(answer if isinstance(answer, Lookup) else None)
        if isinstance(answer, Lookup):
            return replace(answer, dialogue=Dialogue(answer.ticket, answer.dialogue, self.half))
        return answer

    def lookup_answered(self, ticket, now_ns):
        super().lookup_answered(ticket, now_ns)
        self.half.now_ns = now_ns
        self.half.end_lookup(ticket)

    def granted(self, num_tokens, now_ns):
        load = super().granted(num_tokens, now_ns)
        self.half.now_ns = now_ns
        blocks = SimpleNamespace(get_block_ids=self.half.block_ids)
        self.half.scheduler.update_state_after_alloc(self.half.request, blocks, num_tokens)
        self.half.expect_plans(load, None)
        return load

    def load_finished(self, ticket, failed, now_ns):
        valid_len = super().load_finished(ticket, failed, now_ns)
        self.half.now_ns = now_ns
        self.half.end_job(ticket, failed)
        if valid_len == 0 and self.state is State.WAITING:  # the engine looks at the others first
            assert self.half.scheduler.get_num_new_matched_tokens(self.half.request, 0) == (None, False)
        self.compare()
        return valid_len

    def computed(self, num_tokens, now_ns):
        store = super().computed(num_tokens, now_ns)
        self.half.compute_to(num_tokens, store, now_ns)
        return store

    def state_saved(self, group, state_len, now_ns):
        store = super().state_saved(group, state_len, now_ns)
        self.half.now_ns = now_ns
        self.half.expect_plans(None, store, lent={group: (LENT, state_len)})
        return store

    def store_finished(self, ticket, rejected, now_ns):
        super().store_finished(ticket, rejected, now_ns)
        self.half.now_ns = now_ns
        self.half.end_job(ticket, rejected)
        self.compare()

    def preempted(self):
        super().preempted()
        self.half.request.num_computed_tokens = 0

    def reset(self):
        super().reset()
        self.half.reset()

    def finished(self, num_tokens, now_ns):
        if self.state is State.COMPUTING and self.half.filled_len() < num_tokens:
            self.half.compute_to(num_tokens, None, now_ns)
        store = super().finished(num_tokens, now_ns)
        self.half.now_ns = now_ns
        self.half.request.num_computed_tokens = num_tokens
        self.half.request.num_tokens = max(self.half.request.num_tokens, num_tokens + 1)
        self.half.scheduler.request_finished(self.half.request, self.half.block_ids())
        self.half.expect_plans(None, store)
        self.compare()
        return store

    def compare(self):
        """Closed together, with the same decisions and no block left pinned."""
        assert len(self.half.closed) == (self.closed and self.half.told), "a request nobody asked about is not tracked"
        if self.half.closed:
            (twin,) = self.half.closed
            mine, theirs = (replace(machine.decisions, late_answers=0) for machine in (self, twin))
            assert mine == theirs
            assert self.half.pins.held == []

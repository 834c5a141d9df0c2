"""A world small enough to be surely right: an engine whose blocks have tagged slots, a pool, and drivers of requests.

A token's KV is the tag (group, tokens up to it): it names the whole prefix, so that a wrong past is a wrong tag. A
block just allocated holds junk. Whatever is computed, cached, loaded or put is compared with the tag that belongs
there.
"""

from collections import deque
from dataclasses import dataclass, field

from kvcore.planner import Planner
from kvcore.plans import Lookup, Offer, Wait
from kvcore.request import KVRequest, State
from kvcore.runs import from_blocks
from tests.kvcore.attention_oracle import as_sets, oracle_of

JUNK = "junk"
ALL = 1_000
"""More tokens than any offer has."""
WAITING = {State.WAITING, State.ASKING, State.OFFERED}


def never(number):
    return False


@dataclass(eq=False)
class Block:
    """A physical block; `key` is what the prefix cache finds it under."""

    slots: list = field(default_factory=list)
    refs: int = 0
    key: tuple | None = None


@dataclass(eq=False)
class Live:
    """A request of the text `lineage[:final]`, of which `num_prompt` tokens are the prompt."""

    lineage: str
    num_prompt: int
    final: int
    machine: KVRequest
    table: list
    num_tokens: int = 0
    num_computed: int = 0
    tickets: set = field(default_factory=set)
    last_lookup: int = 0
    answers: dict = field(default_factory=dict)
    outcome: dict = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """A plan under way: `blocks` are (group, position, physical block)."""

    live: Live
    ticket: int
    blocks: list


class World:
    """The engine, the pool and the driver. Subclasses in the tests break one rule each."""

    machine = KVRequest

    def __init__(self, model, policy, num_blocks):
        self.planner = Planner(model)
        self.policy = policy
        self.oracle = oracle_of(model)
        self.sizes = [group.block_size for group in self.oracle.groups]
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = deque(self.blocks)
        self.cached = {}
        self.pool = {}
        self.ever_put = set()
        self.now_ns = 0
        self.live = []
        self.closing = []
        self.questions, self.loads, self.stores, self.ended = [], [], [], []

    # -- names and contents ---------------------------------------------------------------------------------------

    def key(self, lineage, group, position):
        return (group, lineage[: (position + 1) * self.sizes[group]])

    def right(self, key):
        group, text = key
        return [(group, text[: end + 1]) for end in range(len(text) - self.sizes[group], len(text))]

    # -- physical blocks --------------------------------------------------------------------------------------------

    def take(self, group):
        block = self.free.popleft()
        if block.key is not None:
            del self.cached[block.key]
        block.key, block.refs, block.slots = None, 1, [JUNK] * self.sizes[group]
        return block

    def hold(self, block):
        if block.refs == 0:
            self.free.remove(block)
        block.refs += 1
        return block

    def release(self, block):
        assert block.refs > 0, "a block is freed once for each holder"
        block.refs -= 1
        if block.refs == 0:
            self.free.append(block)

    def release_table(self, live):
        for positions in live.table:
            for block in positions.values():
                self.release(block)
            positions.clear()

    def cache(self, live):
        """The prefix cache learns the full blocks of what is computed."""
        for group, positions in enumerate(live.table):
            for position, block in positions.items():
                key = self.key(live.lineage, group, position)
                if (
                    block.key is None
                    and key not in self.cached
                    and (position + 1) * self.sizes[group] <= live.num_computed
                ):
                    block.key = key
                    self.cached[key] = block

    def put_by_others(self, lineage, length):
        """Another engine has stored this prefix."""
        for group, size in enumerate(self.sizes):
            for position in range(length // size):
                key = self.key(lineage, group, position)
                self.pool[key] = self.right(key)
                self.ever_put.add(key)

    def overwrite(self, num_blocks):
        """Somebody else takes free blocks, writes them and gives them back."""
        taken = [self.take(0) for _ in range(min(num_blocks, len(self.free)))]
        for block in taken:
            self.release(block)

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def arrive(self, lineage, num_prompt, final):
        machine = self.machine(self.planner, self.policy, num_prompt)
        table = [{} for _ in self.sizes]
        self.live.append(Live(lineage, num_prompt, final, machine, table, num_tokens=num_prompt))

    def advance(self, live, amount, grant):
        """What the scheduler does next with it: consider and admit it, or run steps of `amount` tokens in all."""
        if live.machine.state in WAITING:
            self.admit(live, grant)
            return
        while amount > 0 and live.machine.state is State.COMPUTING:
            before = live.num_computed
            self.step(live, amount)
            amount -= live.num_computed - before

    def local_hit(self, live):
        def resumable(length):
            return all(
                self.key(live.lineage, group, position) in self.cached
                for group, positions in enumerate(self.oracle.held(length))
                for position in positions
            )

        lengths = range(live.num_tokens - 1, -1, -1)
        return next(length for length in lengths if self.oracle.boundary(length) and resumable(length))

    def admit(self, live, grant):
        local = self.local_hit(live)
        answer = live.machine.consider(local, live.num_tokens, self.now_ns)
        if isinstance(answer, Lookup):
            self.new_ticket(live, answer.ticket)
            live.last_lookup = answer.ticket
            self.questions.append((live, answer))
        elif isinstance(answer, Wait):
            assert answer.until_ns > self.now_ns
        else:
            assert isinstance(answer, Offer)
            assert 0 <= answer.num_tokens
            assert local + answer.num_tokens < live.num_tokens, "a token is left to compute"
            self.grant(live, local, min(grant, answer.num_tokens))

    def grant(self, live, local, num_tokens):
        held, needed = self.oracle.held(local), self.oracle.held(local + num_tokens)
        if sum(map(len, needed)) > len(self.free):
            return
        for group, positions in enumerate(held):
            for position in positions:
                block = self.cached[self.key(live.lineage, group, position)]
                live.table[group][position] = self.hold(block)
        for group, positions in enumerate(needed):
            for position in positions - held[group]:
                live.table[group][position] = self.take(group)
        load = live.machine.granted(num_tokens, self.now_ns)
        live.num_computed = local + num_tokens
        if load is not None:
            self.start_load(live, load)

    def step(self, live, amount):
        self.slide(live)
        end = min(live.num_computed + amount, live.num_tokens)
        new = [
            (group, position)
            for group, size in enumerate(self.sizes)
            for position in range(live.num_computed // size, -(-end // size))
            if position not in live.table[group]
        ]
        if len(new) > len(self.free):
            self.preempt(live)
            return
        for group, position in new:
            live.table[group][position] = self.take(group)
        self.start_store(live, live.machine.computed(end, self.now_ns))
        for token in range(live.num_computed, end):
            self.compute(live, token)
        live.num_computed = end
        self.cache(live)
        if end == live.final:
            self.finish(live)
        elif end == live.num_tokens:
            live.num_tokens += 1

    def slide(self, live):
        """The engine gives back what no later token reads."""
        for group, positions in enumerate(live.table):
            own = {live.num_computed // self.sizes[group]}
            first = min(self.oracle.groups[group].needed(live.num_computed) | own)
            for position in [position for position in positions if position < first]:
                self.release(positions.pop(position))

    def compute(self, live, token):
        self.check_reads(live, token)
        for group, size in enumerate(self.sizes):
            block, tag = live.table[group][token // size], (group, live.lineage[: token + 1])
            assert block.key is None or block.slots[token % size] == tag, "a block that others can find is not changed"
            block.slots[token % size] = tag

    def preempt(self, live):
        live.machine.preempted()
        self.release_table(live)
        live.num_computed = 0

    def finish(self, live):
        """Completed, or aborted at any time."""
        computing = live.machine.state is State.COMPUTING
        self.start_store(live, live.machine.finished(live.num_computed if computing else 0, self.now_ns))
        self.release_table(live)
        self.live.remove(live)
        self.closing.append(live)

    # -- plans --------------------------------------------------------------------------------------------------------

    def new_ticket(self, live, ticket):
        assert ticket not in live.tickets, "each plan has its own ticket"
        live.tickets.add(ticket)

    def answer(self, index, unknown):
        """Honest as of now, but for the groups' `unknown` blocks. Answered before: once more."""
        live, lookup = self.questions[index]
        dialogue = lookup.dialogue
        while dialogue.open:
            dialogue.answered(tuple(from_blocks(found) for found in self.found(live, dialogue.question, unknown)))
        live.answers.setdefault(lookup.ticket, as_sets(dialogue.present))
        live.machine.lookup_answered(lookup.ticket, self.now_ns)

    def found(self, live, question, unknown):
        return [
            {position for position in asked if self.key(live.lineage, group, position) in self.pool} - set(unknown)
            for group, asked in enumerate(as_sets(question))
        ]

    def start_load(self, live, load):
        self.new_ticket(live, load.ticket)
        wanted = as_sets(load.blocks)
        for group, positions in enumerate(wanted):
            assert positions <= live.answers[live.last_lookup][group], "loaded ⊆ proven present"
            assert {self.key(live.lineage, group, position) for position in positions} <= self.ever_put
        job = Job(live, load.ticket, self.entries(live, wanted))
        self.loads.append(job)
        self.pin(job)

    def start_store(self, live, store):
        if store is None:
            return
        self.new_ticket(live, store.ticket)
        wanted = as_sets(store.blocks)
        for group, positions in enumerate(wanted):
            assert positions <= set(live.table[group]), "only blocks that the engine holds are stored"
            live.outcome.update({(group, position): "planned" for position in positions})
        job = Job(live, store.ticket, self.entries(live, wanted))
        self.stores.append(job)
        self.pin(job)

    def entries(self, live, wanted):
        return [
            (group, position, live.table[group][position]) for group, some in enumerate(wanted) for position in some
        ]

    def pinning(self):
        """The plans under way that keep their blocks from being reused."""
        return self.loads + self.stores

    def pin(self, job):
        for _, _, block in job.blocks:
            self.hold(block)

    def unpin(self, job):
        for _, _, block in job.blocks:
            self.release(block)

    def end_load(self, job, fails=never):
        """Blocks whose number in the plan `fails`, and those the pool has lost meanwhile, stay unwritten."""
        self.loads.remove(job)
        self.ended.append(job)
        failed = [set() for _ in self.sizes]
        for number, (group, position, block) in enumerate(job.blocks):
            content = self.pool.get(self.key(job.live.lineage, group, position))
            if content is None or fails(number):
                failed[group].add(position)
            else:
                block.slots[:] = content
        self.unpin(job)
        valid = job.live.machine.load_finished(job.ticket, tuple(map(from_blocks, failed)), self.now_ns)
        if job.live in self.live:
            self.resume(job.live, valid)

    def resume(self, live, valid):
        assert (live.machine.state is State.COMPUTING) == (valid > 0)
        live.num_computed = valid
        if valid:
            self.cache(live)
        else:
            self.release_table(live)

    def end_store(self, job, fails=never):
        """What the blocks hold now goes into the pool under the plan's keys, but for those whose number `fails`."""
        self.stores.remove(job)
        self.ended.append(job)
        rejected = [set() for _ in self.sizes]
        for number, (group, position, block) in enumerate(job.blocks):
            if fails(number):
                rejected[group].add(position)
            else:
                self.put(self.key(job.live.lineage, group, position), block)
            job.live.outcome[group, position] = "rejected" if fails(number) else "written"
        self.unpin(job)
        job.live.machine.store_finished(job.ticket, tuple(map(from_blocks, rejected)), self.now_ns)

    def put(self, key, block):
        assert block.slots == self.right(key), f"wrong content under {key}"
        self.pool.setdefault(key, list(block.slots))
        self.ever_put.add(key)

    def repeat(self, job, failed):
        """A plan that has ended is reported again, with another outcome: nothing changes."""
        before = job.live.machine.state, job.live.machine.decisions.stored, job.live.machine.decisions.loaded
        runs = tuple(from_blocks(failed) for _ in self.sizes)
        assert job.live.machine.load_finished(job.ticket, runs, self.now_ns) is None
        job.live.machine.store_finished(job.ticket, runs, self.now_ns)
        assert before == (job.live.machine.state, job.live.machine.decisions.stored, job.live.machine.decisions.loaded)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self):
        for key, block in self.cached.items():
            assert block.slots == self.right(key), f"cached under {key}: {block.slots}"
        holders = [block for live in self.live for positions in live.table for block in positions.values()]
        holders += [block for job in self.pinning() for _, _, block in job.blocks]
        for block in self.blocks:
            assert block.refs == holders.count(block), "every reference has a holder"
            assert (block.refs == 0) == (block in self.free)
        for live in self.live:
            if live.machine.state is State.COMPUTING:
                self.check_reads(live, live.num_computed)
        for live in self.live + self.closing:
            self.check_reported(live)

    def check_reads(self, live, token):
        """All that the token reads is there and is right."""
        for group, size in enumerate(self.sizes):
            for earlier in self.oracle.groups[group].attention.reads(token):
                block = live.table[group].get(earlier // size)
                found = block and block.slots[earlier % size]
                assert found == (group, live.lineage[: earlier + 1]), f"token {token} reads {found} as {earlier}"

    def check_reported(self, live):
        """Every block planned to be stored is on record, and those not written as rejected."""
        decisions = live.machine.decisions
        for group, (stored, rejected) in enumerate(
            zip(as_sets(decisions.stored), as_sets(decisions.rejected), strict=True)
        ):
            mine = {position: outcome for (g, position), outcome in live.outcome.items() if g == group}
            assert rejected == {position for position, outcome in mine.items() if outcome == "rejected"}
            assert stored == set(mine) - rejected

    def drain(self, rounds=150):
        """A fair world from here on, though a slow one: all must finish in a bounded number of rounds.

        Only requests with an odd prompt are answered, and each is considered less often than an offer lives.
        """
        for _ in range(rounds):
            for index, (live, lookup) in enumerate(self.questions):
                if lookup.ticket not in live.answers and live.num_prompt % 2:
                    self.answer(index, set())
            for job in list(self.loads):
                self.end_load(job)
            for job in list(self.stores):
                self.end_store(job)
            self.now_ns += self.policy.lookup_deadline_ns + self.policy.offer_ttl_ns + 1
            for live in list(self.live):
                self.advance(live, 4, ALL)
            if not (self.live or self.loads or self.stores):
                break
        assert not self.live, "a request waits for ever"
        assert all(live.machine.closed for live in self.closing), "a plan was never ended"
        assert all(block.refs == 0 for block in self.blocks), "a block leaks"
        assert len(self.free) == len(self.blocks)

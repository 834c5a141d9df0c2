"""Engines that share a pool, and the driver of their requests.

A plan is reported by every rank on its own; the last report ends it. Blocks are pinned until then.
"""

from dataclasses import dataclass, field

from kvcore.access import ALL_ACCESS, Switch
from kvcore.admission import AdmitAll
from kvcore.group_runs import common, plus
from kvcore.plans import Lookup, Offer, Wait
from kvcore.request import KVRequest, State
from kvcore.runs import from_blocks
from tests.kvcore.attention_oracle import as_sets
from tests.kvcore.engine_world import Engine, Live, right
from tests.kvcore.pool_objects import brute_hit, held_tokens, resumes
from tests.kvcore.shared_pool import SharedPool

ALL = 1_000
"""More tokens than any offer has."""
FAR = 60
"""Tokens of a sequence longer than any here."""
WAITING = {State.WAITING, State.ASKING, State.OFFERED}


def never(number):
    return False


@dataclass(eq=False)
class Question:
    """A dialogue under way: it goes on under the names, and with the memory, of when it began."""

    live: Live
    lookup: Lookup
    generation: int
    denied: frozenset


@dataclass(eq=False)
class Job:
    """A plan under way: `entries` are (index, position, physical block)."""

    live: Live
    ticket: int
    generation: int
    entries: list
    ranks_left: int
    failed: set = field(default_factory=set)


class Driver(SharedPool):
    """Whatever it is told to do is compared with what is right on the way."""

    machine = KVRequest

    def __init__(self, model, policy, num_blocks, num_ranks=1, num_engines=1, memory_ttl_ns=1_000_000):
        super().__init__(model, num_ranks)
        self.policy, self.access = policy, ALL_ACCESS
        self.stores_all = isinstance(policy.admission, AdmitAll) and policy.max_storing_blocks is None
        self.engines = [Engine(model, num_blocks, memory_ttl_ns) for _ in range(num_engines)]
        self.memory_ttl_ns = memory_ttl_ns
        self.storable = as_sets(self.written_by(FAR))
        self.now_ns = 0
        self.live, self.closing = [], []
        self.questions, self.loads, self.stores, self.ended = [], [], [], []

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def arrive(self, lineage, num_prompt, final, engine=0):
        engine = self.engines[engine % len(self.engines)]
        live = Live(engine, lineage, num_prompt, final, [{} for _ in engine.groups], num_tokens=num_prompt)
        live.machine = self.machine(self.planner, self.policy, num_prompt, engine.experience, live.names)
        self.allow(live)
        self.live.append(live)
        return live

    def switch(self, access):
        """From now on only this may be done with the pool; what is not stored meanwhile need not be stored ever."""
        self.access = access
        for live in self.live:
            self.allow(live)
        if access.writes is Switch.OFF:
            self.stores_all = False
            for live in self.live:
                live.due.clear()

    def allow(self, live):
        live.machine.policy = self.access.limit(self.policy)

    def advance(self, live, amount, grant=ALL):
        """What the scheduler does next with it: consider and admit it, or run steps of `amount` tokens in all."""
        if live.machine.state in WAITING:
            self.admit(live, grant)
            return
        while amount > 0 and live.machine.state is State.COMPUTING:
            before = live.num_computed
            self.step(live, amount)
            amount -= live.num_computed - before

    def admit(self, live, grant):
        local, num_late = live.engine.local_hit(live, self.model.limit(live.num_tokens)), live.num_late
        answer = live.machine.consider(local, live.num_tokens, self.now_ns)
        if live.num_late > num_late:
            (late,) = [q for q in self.questions if (q.live, q.lookup.ticket) == (live, live.last_lookup)]
            live.answers[live.last_lookup] = as_sets(late.lookup.dialogue.present)
        assert self.access.reads is Switch.ON or answer == Offer(0), "asks or loads while reads are off"
        if isinstance(answer, Lookup):
            self.ask(live, answer)
        elif isinstance(answer, Wait):
            assert self.now_ns < answer.until_ns == live.machine.reconsider_at_ns
        else:
            assert isinstance(answer, Offer)
            self.check_offer(live, local, answer.num_tokens)
            self.grant(live, local, min(grant, answer.num_tokens))

    def ask(self, live, lookup):
        self.new_ticket(live, lookup.ticket)
        live.last_lookup = lookup.ticket
        assert self.now_ns < lookup.deadline_ns == live.machine.reconsider_at_ns
        denied = frozenset(self.known(live.engine.denied))
        self.check_left_out(live, lookup.dialogue, denied)
        self.questions.append(Question(live, lookup, live.engine.generation, denied))

    def known(self, memory):
        return {name for name, noted_ns in memory.items() if self.now_ns - noted_ns < self.memory_ttl_ns}

    def check_offer(self, live, local, num_tokens):
        """A token is left to compute, and what was answered proves the hit: the longest, unless it is not wanted."""
        model, answer = self.model, live.answers.get(live.last_lookup)
        hit = local + num_tokens
        assert 0 <= num_tokens and hit < live.num_tokens, "a token is left to compute"
        limit = self.model.limit(live.num_tokens)
        if num_tokens:
            assert resumes(model, hit, local, held_tokens(model, limit, answer)), "a hit that is not proven"
            assert hit == brute_hit(model, local, limit, answer), "a longer hit was proven"

    def grant(self, live, local, num_tokens):
        engine, resume = live.engine, local + num_tokens
        if sum(map(len, engine.needed(resume))) > len(engine.free):
            return
        load = live.machine.granted(num_tokens, self.now_ns)
        live.planned.clear()
        live.due = self.missing_in_pool(live, local, resume)
        unwritten = engine.admit(live, local, resume)
        told = set()
        if load is not None:
            told = self.places(live, plus(load.blocks, load.unproven))
            self.start_load(live, load)
        assert unwritten <= told, "a block that nothing fills and nobody reports"

    def places(self, live, blocks):
        kinds = live.engine.kinds
        return {
            (kinds[index].group, kinds[index].block(position))
            for index, positions in enumerate(as_sets(blocks))
            for position in positions
        }

    def missing_in_pool(self, live, local, resume):
        """What the engine was refused, holds again and will still hold in the next step."""
        if not self.stores_all:
            return set()
        kept = self.planner.store(0, local, live.num_prompt)
        for length in (local, resume):
            kept = common(kept, self.planner.held(length))
        known = self.known(live.engine.unsaved)
        return {
            (index, position)
            for index, positions in enumerate(as_sets(kept))
            for position in positions
            if live.name(index, position) in known
        }

    def step(self, live, amount):
        engine = live.engine
        engine.slide(live)
        end = min(live.num_computed + amount, live.num_tokens)
        while engine.grow(live, end) is None:
            running = [
                other for other in self.live if other.engine is engine and other.machine.state is State.COMPUTING
            ]
            self.preempt(running[-1])
            if running[-1] is live:
                return
        owed = live.machine.next_store_len == 0
        store = live.machine.computed(end, self.now_ns)
        assert owed or store is None or live.num_computed < live.num_prompt or not self.model.prefix_closed
        self.start_store(live, store)
        assert not live.due, "what was refused is offered when it is touched next"
        engine.fill(live, end)
        for group in engine.groups:
            if engine.states[group] and end % self.model.hit_step == 0:
                self.save_state(live, group)
        if end == live.final:
            self.finish(live)
        elif end == live.num_tokens:
            live.num_tokens += 1

    def save_state(self, live, group):
        """The engine hands the state over, with the blocks that hold the tails."""
        length = live.num_computed
        store = live.machine.state_saved(group, length, self.now_ns)
        self.start_store(live, store, {group: live.engine.lend(live, group)})
        for index, positions in enumerate(as_sets(self.planner.store_state(group, length, live.num_prompt))):
            self.check_settled(live, index, positions)

    def preempt(self, live):
        live.keeps_back = live.weights == live.engine.generation
        live.machine.preempted()
        self.restart(live)

    def restart(self, live):
        live.engine.release_table(live)
        live.num_computed = 0
        live.due.clear()

    def finish(self, live):
        """Completed, or aborted at any time."""
        computing = live.machine.state is State.COMPUTING
        store = live.machine.finished(live.num_computed if computing else 0, self.now_ns)
        self.start_store(live, store)
        if computing:
            self.check_all_settled(live)
        live.engine.release_table(live)
        self.live.remove(live)
        self.closing.append(live)

    def reset(self, engine):
        """Other weights: the prefix cache is emptied and the pool's keys get another name."""
        engine.new_weights()
        for live in {*self.live, *self.closing}:
            if live.engine is engine:
                live.machine.reset()
                live.keeps_back = False
                live.due.clear()

    # -- questions ----------------------------------------------------------------------------------------------------

    def ask_round(self, question, unknown=()):
        """Honest as of now, but for the `unknown` positions."""
        live, dialogue = question.live, question.lookup.dialogue
        present = []
        for index, asked in enumerate(as_sets(dialogue.question)):
            assert asked <= self.storable[index], "asked for what nobody can have stored"
            keys = {position: self.key(live, question.generation, index, position) for position in asked}
            assert not any(key[1:] in question.denied for key in keys.values()), "asked for what was denied"
            present.append(from_blocks(p for p, key in keys.items() if self.present(key) and p not in unknown))
        dialogue.answered(tuple(present))

    def answer(self, question, unknown=()):
        """The rest of the dialogue, and its report. Reported before: once more."""
        while question.lookup.dialogue.open:
            self.ask_round(question, unknown)
        self.break_off(question)

    def break_off(self, question):
        lookup, live = question.lookup, question.live
        if live.machine.awaits(lookup.ticket):
            live.answers[lookup.ticket] = as_sets(lookup.dialogue.present)
        live.machine.lookup_answered(lookup.ticket, self.now_ns)

    # -- plans --------------------------------------------------------------------------------------------------------

    def new_ticket(self, live, ticket):
        assert ticket not in live.tickets, "each plan has its own ticket"
        live.tickets.add(ticket)

    def start_load(self, live, load):
        self.new_ticket(live, load.ticket)
        generation = live.engine.generation
        for index, positions in enumerate(as_sets(load.blocks)):
            assert positions <= live.answers[live.last_lookup][index], "loaded ⊆ proven present"
            assert {self.key(live, generation, index, position) for position in positions} <= self.ever_put
            live.settled |= {(generation, index, position) for position in positions}
        self.loads.append(self.start(live, load, {}))

    def start_store(self, live, store, lent=None):
        if store is None:
            return
        assert self.access.writes is Switch.ON, "stores while writes are off"
        self.new_ticket(live, store.ticket)
        for index, positions in enumerate(as_sets(store.blocks)):
            for position in positions:
                self.check_planned_once(live, index, position)
            live.outcome.update({(index, position): "planned" for position in positions})
            live.settled |= {(live.engine.generation, index, position) for position in positions}
            live.due -= {(index, position) for position in positions}
        self.stores.append(self.start(live, store, lent or {}))

    def check_planned_once(self, live, index, position):
        """Since the last admission; and at the end once more what was refused. What others computed, they store."""
        is_rejected = live.outcome.get((index, position)) == "rejected"
        retried = live.machine.state is State.FINISHED and is_rejected
        is_theirs = (index, position) in live.others - live.due and not is_rejected
        may_be_own = live.keeps_back and live.engine.kinds[index].end(position) > live.num_prompt
        assert not is_theirs or may_be_own or not self.stores_all, "others have stored it"
        assert live.planned[index, position] == 0 or retried, "planned again without having been touched"
        live.planned[index, position] += 1

    def start(self, live, plan, lent):
        """Pinned from now on."""
        engine, entries = live.engine, []
        for index, positions in enumerate(as_sets(plan.blocks)):
            kind = engine.kinds[index]
            for position in sorted(positions):
                is_store = not hasattr(plan, "resume_len")
                table = live.table[kind.group]
                assert not (kind.is_state and is_store) or index in lent, "a state is stored when it is lent"
                assert index in lent or kind.block(position) in table, "only blocks that the engine holds"
                entries.append((index, position, lent.get(index) or table[kind.block(position)]))
        job = Job(live, plan.ticket, engine.generation, entries, self.num_ranks)
        self.pin(job)
        return job

    def pinning(self):
        """The plans under way that keep their blocks from being reused."""
        return self.loads + self.stores

    def pin(self, job):
        for _, _, block in job.entries:
            job.live.engine.hold(block)

    def unpin(self, job):
        for _, _, block in job.entries:
            job.live.engine.release(block)

    def end_load(self, job, fails=never):
        """One rank is done; entries whose number `fails`, and those the pool has lost meanwhile, stay unwritten."""
        job.ranks_left -= 1
        for number, (index, position, _) in enumerate(job.entries):
            shards = self.pool.get(self.key(job.live, job.generation, index, position), {})
            if job.ranks_left not in shards or fails(number):
                job.failed.add(number)
        if job.ranks_left == 0:
            self.close_load(job)

    def close_load(self, job):
        self.loads.remove(job)
        self.ended.append(job)
        live = job.live
        engine = live.engine
        for number, entry in enumerate(job.entries):
            if number not in job.failed:
                self.write(job, *entry)
        self.unpin(job)
        misses = live.machine.decisions.late_misses
        valid = live.machine.load_finished(job.ticket, self.failed_blocks(job), self.now_ns)
        assert valid is not None, "a plan's first report counts"
        assert live.machine.decisions.late_misses == misses + len(job.failed), "also of a request that has ended"
        self.check_loaded(job)
        self.note(job, engine.denied)
        if live in self.live:
            self.resume(live, valid)

    def write(self, job, index, position, block):
        """What the pool has for it gets into the block."""
        content = right(self.kinds, index, job.live.name(index, position)[1], job.generation)
        block.slots[: len(content)] = content

    def failed_blocks(self, job):
        failed = [[] for _ in job.live.engine.kinds]
        for number in job.failed:
            index, position, _ = job.entries[number]
            failed[index].append(position)
        return tuple(map(from_blocks, failed))

    def note(self, job, memory):
        """What the engine learns: `memory` has what failed; of what was written nothing bad is known any more."""
        live = job.live
        if job.generation != live.engine.generation:
            return
        for number, (index, position, _) in enumerate(job.entries):
            name = live.name(index, position)
            if number in job.failed:
                memory[name] = self.now_ns
                if memory is live.engine.denied:
                    live.settled.discard((job.generation, index, position))
                    live.filled.clear()  # it starts over, and what the engine holds was given to the pool
            elif memory is live.engine.unsaved:
                live.engine.unsaved.pop(name, None)
                live.engine.denied.pop(name, None)

    def resume(self, live, valid):
        assert (live.machine.state is State.COMPUTING) == (valid > 0)
        live.num_computed = valid
        if valid:
            live.engine.cache(live)
        else:
            self.restart(live)

    def end_store(self, job, fails=never):
        """One rank puts what the blocks hold now under the plan's keys, but for those whose number `fails`."""
        job.ranks_left -= 1
        live, engine = job.live, job.live.engine
        for number, (index, position, block) in enumerate(job.entries):
            if fails(number):
                job.failed.add(number)
            else:
                key = self.key(live, job.generation, index, position)
                self.put(key, job.ranks_left, engine.read(index, position, block))
        if job.ranks_left == 0:
            self.close_store(job)

    def close_store(self, job):
        self.stores.remove(job)
        self.ended.append(job)
        for number, (index, position, _) in enumerate(job.entries):
            job.live.outcome[index, position] = "rejected" if number in job.failed else "written"
        self.unpin(job)
        job.live.machine.store_finished(job.ticket, self.failed_blocks(job), self.now_ns)
        self.note(job, job.live.engine.unsaved)

    def repeat(self, job, failed):
        """A plan that has ended is reported again, with another outcome: nothing changes."""
        machine = job.live.machine
        before = machine.state, machine.decisions.stored, machine.decisions.loaded, machine.closed
        runs = tuple(from_blocks(failed) for _ in job.live.engine.kinds)
        assert machine.load_finished(job.ticket, runs, self.now_ns) is None
        machine.store_finished(job.ticket, runs, self.now_ns)
        assert before == (machine.state, machine.decisions.stored, machine.decisions.loaded, machine.closed)

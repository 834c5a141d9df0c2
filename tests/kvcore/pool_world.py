"""The world of a request: engines, pool and driver, and what must hold in it at any time and in the end."""

from kvcore.request import State
from tests.kvcore.attention_oracle import as_sets
from tests.kvcore.driver_world import ALL, Driver
from tests.kvcore.engine_world import right


class World(Driver):
    """Subclasses in the tests break one rule each; `machine` makes the machines of the requests."""

    # -- at any time --------------------------------------------------------------------------------------------------

    def check(self):
        for engine in self.engines:
            self.check_engine(engine)
        for live in self.live + self.closing:
            self.check_reported(live)
            busy = any(job.live is live for job in self.loads + self.stores)
            assert live.machine.closed == (live.machine.state is State.FINISHED and not busy)
        for live in self.live:
            if live.machine.state is State.COMPUTING:
                live.engine.check_reads(live, live.num_computed)

    def check_engine(self, engine):
        for key, block in engine.cached.items():
            assert engine.is_right(*key, block), f"cached under {key}: {block.slots}"
        self.check_pressure(engine)
        mine = [live for live in self.live if live.engine is engine]
        holders = [block for live in mine for positions in live.table for block in positions.values()]
        holders += [block for job in self.pinning() for _, _, block in job.entries if job.live.engine is engine]
        for block in engine.blocks:
            assert block.refs == holders.count(block), "every reference has a holder"
            assert (block.refs == 0) == (block in engine.free)

    def check_pressure(self, engine):
        """Stores in flight are counted and bounded; one that is alone may be larger."""
        in_flight = [len(job.entries) for job in self.stores if job.live.engine is engine]
        assert engine.experience.num_storing == sum(in_flight)
        assert sum(in_flight) <= (self.policy.max_storing_blocks or ALL) or len(in_flight) == 1

    def check_reported(self, live):
        """Every object planned to be stored is on record, and those not written as rejected."""
        decisions = live.machine.decisions
        for index, (stored, rejected) in enumerate(
            zip(as_sets(decisions.stored), as_sets(decisions.rejected), strict=True)
        ):
            mine = {position: outcome for (i, position), outcome in live.outcome.items() if i == index}
            assert rejected == {position for position, outcome in mine.items() if outcome == "rejected"}
            assert stored == set(mine) - rejected

    def check_left_out(self, live, dialogue, denied):
        """A question leaves out what is denied, and no more: not what was stored since."""
        blocks = as_sets(self.planner.beyond(dialogue.local_hit_len, live.num_tokens))
        expected = [{p for p in some if live.name(index, p) in denied} for index, some in enumerate(blocks)]
        assert list(as_sets(dialogue.denied)) == expected

    def check_loaded(self, job):
        """What was not written is not on record as loaded."""
        decisions = job.live.machine.decisions
        assert not any(map(set.intersection, as_sets(decisions.loaded), as_sets(self.failed_blocks(job))))

    # -- what a request has computed, a later one finds ---------------------------------------------------------------

    def check_all_settled(self, live):
        """At its end the pool was given every full block of a group that keeps all, or had it."""
        engine = live.engine
        for group, spec in enumerate(engine.oracle.groups):
            if spec.reads_everything:
                self.check_settled(live, group, range(live.num_computed // spec.block_size))

    def check_settled(self, live, index, positions):
        """What was computed with these weights was planned to be stored under their name, or loaded."""
        engine, kind = live.engine, live.engine.kinds[index]
        if not self.stores_all or live.weights != engine.generation:
            return
        for position in positions:
            text = live.lineage[: kind.end(position)]
            content = engine.read(index, position, live.table[kind.group][kind.block(position)])
            if content == right(self.kinds, index, text, engine.generation):
                assert (engine.generation, index, position) in live.settled, f"{index, position} was never stored"

    # -- in the end ---------------------------------------------------------------------------------------------------

    def drain(self, rounds=150):
        """A fair world from here on, though a slow one: all must finish in a bounded number of rounds.

        Only requests with an odd prompt are answered; every other time each is considered later than an offer lives,
        else when it says that it must be.
        """
        for number in range(rounds):
            self.end_all()
            self.pass_time(number)
            for live in list(self.live):
                self.advance(live, 4)
            if not (self.live or self.loads or self.stores):
                break
        assert not self.live, "a request waits for ever"
        assert all(live.machine.closed for live in self.closing), "a plan was never ended"
        for engine in self.engines:
            assert len(engine.free) == len(engine.blocks), "a block leaks"

    def end_all(self):
        for question in self.questions:
            if question.lookup.ticket not in question.live.answers and question.live.num_prompt % 2:
                self.answer(question)
        for _ in range(self.num_ranks):
            for job in list(self.loads):
                self.end_load(job)
            for job in list(self.stores):
                self.end_store(job)

    def pass_time(self, number):
        if number % 2:
            self.now_ns += self.policy.lookup_deadline_ns + self.policy.offer_ttl_ns + 1
            return
        due_ns = [live.machine.reconsider_at_ns for live in self.live]
        self.now_ns = max(self.now_ns + 1, min((ns for ns in due_ns if ns is not None), default=0))

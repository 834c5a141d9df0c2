"""Any interleaving of requests, engines and the pool they share, with tagged block contents.

That the rules find mistakes: test_request_mistakes.py.
"""

import sys
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.admission import AdmitAll
from kvcore.group_runs import common
from kvcore.loading import LoadAlways
from kvcore.plans import PoolPolicy
from kvcore.request import State
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.attention_oracle import models
from tests.kvcore.driver_world import ALL
from tests.kvcore.pool_world import World

LINEAGES = ("abcdefghijklmnopqrst", "abcdefghijkl34567890", "abcdeXYZUVWRSTABCDEF", "0123456789abcdefghij")
"""Four texts; the first three share 5 or 12 tokens."""

MODELS = (
    ModelSpec((FullAttention(2),)),
    ModelSpec((FullAttention(2), SlidingWindow(2, window=5))),
    ModelSpec((FullAttention(4), SlidingWindow(2, window=4))),
    ModelSpec((SlidingWindow(2, window=6),)),
    ModelSpec((FullAttention(2), ChunkedLocal(2, chunk=5))),
    ModelSpec((FullAttention(2), Recurrent(4))),
    ModelSpec((FullAttention(2),), frozenset({0})),
    ModelSpec((FullAttention(4), SlidingWindow(2, window=4), SlidingWindow(2, window=4)), frozenset({1})),
    ModelSpec((FullAttention(4), Recurrent(4)), hash_unit=2, hit_unit=2),
    ModelSpec((FullAttention(4), Recurrent(4), SlidingWindow(2, window=4)), frozenset({0}), hash_unit=2, hit_unit=2),
    ModelSpec((FullAttention(4),), hash_unit=2, hit_unit=2),
)


@dataclass(frozen=True)
class AdmitSecondTouch:
    """Only what the engine has had before."""

    def admit(self, blocks, again, sequence_len):
        return common(blocks, again)


@dataclass(frozen=True)
class LoadLongHits:
    """At least 4 tokens."""

    def worth(self, local_hit_len, hit_len, blocks, waited_ns):
        return hit_len - local_hit_len >= 4


POLICIES = st.builds(
    PoolPolicy,
    st.sampled_from((1, 20)),
    st.sampled_from((1, 50)),
    st.sampled_from((1, 2, 3)),
    max_storing_blocks=st.sampled_from((None, None, None, 5)),
    admission=st.sampled_from((AdmitAll(), AdmitAll(), AdmitSecondTouch())),
    loading=st.sampled_from((LoadAlways(), LoadAlways(), LoadLongHits())),
)
PICK = st.integers(0, 11)
GRANT = st.sampled_from((ALL, ALL, ALL, 0, 1, 2, 3, 4, 6))
SOME = st.sampled_from((0, 0, 0b1, 0b10, 0b1000, 0b10100, 0b11111111))
"""Which entries of a plan fail: those whose number modulo 8 is a bit of it; all when it timed out."""


def pick(items, index):
    return items[index % len(items)]


def fails_by(bits):
    return lambda number: bool(bits >> number % 8 & 1)


def room_for(model, share):
    """Physical blocks: for one request and a bit, or for more."""
    one = sum(len(LINEAGES[0]) // group.block_size + 1 for group in model.groups)
    return int(one * share)


SEARCH = settings(suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


class Interleavings(RuleBasedStateMachine):
    """The rules: what the world may do next, in any order."""

    world_type = World
    models = MODELS

    @initialize(
        data=st.data(),
        policy=POLICIES,
        share=st.sampled_from((1.1, 2.0)),
        num_ranks=st.sampled_from((1, 2)),
        num_engines=st.sampled_from((1, 1, 2)),
        memory_ttl_ns=st.sampled_from((25, 1_000_000)),
    )
    def start(self, data, policy, share, num_ranks, num_engines, memory_ttl_ns):
        some = st.sampled_from(self.models)
        model = data.draw(some if self.models is not MODELS else st.one_of(some, some, models(max_groups=3)))
        self.world = self.world_type(model, policy, room_for(model, share), num_ranks, num_engines, memory_ttl_ns)
        self.world.put_by_others(LINEAGES[0], 16)

    @rule(lineage=st.sampled_from(LINEAGES), length=st.integers(4, 20), generation=st.sampled_from((0, 0, 1)))
    def put_by_others(self, lineage, length, generation):
        self.world.put_by_others(lineage, length, generation)

    @precondition(lambda self: len(self.world.live) < 4)
    @rule(lineage=st.sampled_from(LINEAGES), num_prompt=st.integers(1, 17), num_output=st.integers(0, 9), engine=PICK)
    def arrive(self, lineage, num_prompt, num_output, engine):
        self.world.arrive(lineage, num_prompt, min(num_prompt + num_output, 20), engine)

    @precondition(lambda self: self.world.live)
    @rule(index=PICK, amount=st.integers(1, 9), grant=GRANT)
    def advance(self, index, amount, grant):
        self.world.advance(pick(self.world.live, index), amount, grant)

    @precondition(lambda self: self.world.live)
    @rule(index=PICK, times=st.integers(1, 6))
    def advance_on(self, index, times):
        """Far enough to have something in the pool; answers come at once."""
        live, world = pick(self.world.live, index), self.world
        for _ in range(times):
            if live in world.live:
                world.advance(live, 9)
            for question in world.questions:
                if question.live is live:
                    world.answer(question)

    @precondition(lambda self: self.world.questions)
    @rule(
        index=PICK,
        how=st.sampled_from(("round", "answer", "answer", "broken off")),
        unknown=st.frozensets(st.integers(0, 9), max_size=2),
    )
    def answer(self, index, how, unknown):
        """One round of a dialogue, the rest of it, or no more of it; in time or late, once or again."""
        question = pick(self.world.questions[-4:], index)
        if how == "broken off":
            self.world.break_off(question)
        elif how == "answer":
            self.world.answer(question, unknown)
        elif question.lookup.ticket not in question.live.answers and question.lookup.dialogue.open:
            self.world.ask_round(question, unknown)

    @precondition(lambda self: self.world.loads)
    @rule(index=PICK, bits=SOME)
    def end_load(self, index, bits):
        self.world.end_load(pick(self.world.loads, index), fails_by(bits))

    @precondition(lambda self: self.world.stores)
    @rule(first=PICK, count=st.integers(1, 4), bits=SOME)
    def end_stores(self, first, count, bits):
        for job in self.world.stores[first % len(self.world.stores) :][:count]:
            self.world.end_store(job, fails_by(bits))

    @precondition(lambda self: self.world.ended)
    @rule(index=PICK, failed=st.frozensets(st.integers(0, 9), max_size=3))
    def repeat(self, index, failed):
        self.world.repeat(pick(self.world.ended, index), failed)

    @precondition(lambda self: self.world.live)
    @rule(index=PICK, abort=st.booleans())
    def interrupt(self, index, abort):
        live = pick(self.world.live, index)
        if abort:
            self.world.finish(live)
        elif live.machine.state is State.COMPUTING:
            self.world.preempt(live)

    @rule(kind=st.sampled_from(("engine", "pool", "time", "reset")), amount=st.integers(1, 40))
    def elsewhere(self, kind, amount):
        """Others take free blocks of an engine, the pool evicts shards, time passes, an engine gets other weights."""
        world = self.world
        if kind == "engine":
            pick(world.engines, amount).overwrite(amount)
        elif kind == "time":
            world.now_ns += amount
        elif kind == "pool":
            shards = sorted((key, rank) for key, ranks in world.pool.items() for rank in ranks)
            world.evict(shards[amount % 3 :: 1 + amount % 7])
        elif amount % 3 == 0:
            world.reset(pick(world.engines, amount))

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world") and sys.exc_info()[0] is None:  # else a rule has failed already
            self.world.drain()
            self.world.check()


class TestSomeInterleavings(Interleavings.TestCase):
    """The same ones each time."""

    settings = settings(SEARCH, max_examples=50, stateful_step_count=50, derandomize=True)


@pytest.mark.slow
class TestInterleavings(Interleavings.TestCase):
    """What a reset and two preemptions lead to takes so many to be found."""

    settings = settings(SEARCH, max_examples=2_000, stateful_step_count=60)

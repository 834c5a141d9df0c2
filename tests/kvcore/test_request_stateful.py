"""Any interleaving of requests, pool and engine, with tagged block contents; and that broken ones are told apart."""

import sys

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcore.planner import Planner
from kvcore.plans import PoolPolicy, Wait
from kvcore.request import KVRequest, State
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.pool_world import ALL, World, never

LINEAGES = ("abcdefghijklmnopqrst", "abcdefghijkl34567890", "abcdeXYZUVWRSTABCDEF", "0123456789abcdefghij")
"""Four texts; the first three share 5 or 12 tokens."""

MODELS = (
    ModelSpec((FullAttention(2),)),
    ModelSpec((FullAttention(2), SlidingWindow(2, window=5))),
    ModelSpec((FullAttention(4), SlidingWindow(2, window=4))),
    ModelSpec((SlidingWindow(2, window=6),)),
    ModelSpec((FullAttention(2), ChunkedLocal(2, chunk=6))),
    ModelSpec((FullAttention(2), Recurrent(4))),
)
POLICIES = st.builds(PoolPolicy, st.sampled_from((1, 20)), st.sampled_from((1, 50)), st.sampled_from((1, 2, 3)))
PICK = st.integers(0, 11)
GRANT = st.sampled_from((ALL, ALL, ALL, 0, 1, 2, 3, 4, 6))
SOME = st.sampled_from((0, 0, 0b1, 0b10, 0b1000, 0b10100, 0b11111111))
"""Which blocks of a plan fail: those whose number modulo 8 is a bit of it."""


def pick(items, index):
    return items[index % len(items)]


def fails_by(bits):
    return lambda number: bool(bits >> number % 8 & 1)


class Interleavings(RuleBasedStateMachine):
    """The rules: what the world may do next, in any order."""

    world_type = World
    models = MODELS

    @initialize(index=PICK, policy=POLICIES, blocks_per_group=st.sampled_from((11, 20)))
    def start(self, index, policy, blocks_per_group):
        model = pick(self.models, index)
        self.world = self.world_type(model, policy, blocks_per_group * len(model.groups))
        self.world.put_by_others(LINEAGES[0], 16)

    @rule(lineage=st.sampled_from(LINEAGES), length=st.integers(4, 20))
    def put_by_others(self, lineage, length):
        self.world.put_by_others(lineage, length)

    @precondition(lambda self: len(self.world.live) < 4)
    @rule(lineage=st.sampled_from(LINEAGES), num_prompt=st.integers(1, 17), num_output=st.integers(0, 9))
    def arrive(self, lineage, num_prompt, num_output):
        self.world.arrive(lineage, num_prompt, min(num_prompt + num_output, 20))

    @precondition(lambda self: self.world.live)
    @rule(index=PICK, amount=st.integers(1, 9), grant=GRANT)
    def advance(self, index, amount, grant):
        self.world.advance(pick(self.world.live, index), amount, grant)

    @precondition(lambda self: self.world.live)
    @rule(index=PICK, times=st.integers(1, 6))
    def advance_on(self, index, times):
        """Far enough to have something in the pool; answers and loads come at once."""
        live, world = pick(self.world.live, index), self.world
        for _ in range(times):
            if live in world.live:
                world.advance(live, 9, ALL)
            for number, (asker, _) in enumerate(world.questions):
                if asker is live:
                    world.answer(number, frozenset())

    @precondition(lambda self: self.world.questions)
    @rule(index=PICK, unknown=st.frozensets(st.integers(0, 9), max_size=2))
    def answer(self, index, unknown):
        recent = min(4, len(self.world.questions))
        self.world.answer(len(self.world.questions) - 1 - index % recent, unknown)

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

    @rule(kind=st.sampled_from(("engine", "pool", "time")), amount=st.integers(1, 40))
    def elsewhere(self, kind, amount):
        """Others take free blocks of the engine, the pool evicts, time passes."""
        if kind == "engine":
            self.world.overwrite(amount)
        elif kind == "time":
            self.world.now_ns += amount
        else:
            for key in sorted(self.world.pool)[amount % 3 :: 1 + amount % 7]:
                del self.world.pool[key]

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world") and sys.exc_info()[0] is None:  # else a rule has failed already
            self.world.drain()
            self.world.check()


class TestInterleavings(Interleavings.TestCase):
    settings = settings(stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])


# -- controls: each is one mistake, and the same rules find it --------------------------------------------------------


class IgnoresFailedLoads(KVRequest):
    def load_finished(self, ticket, failed, now_ns):
        return super().load_finished(ticket, self.planner.nothing, now_ns)


class KeepsPrefixOfWindow(Planner):
    """Takes all before the first failed block as valid, whatever a window reads."""

    def valid_len(self, resume_len, failed):
        return (
            min(resume_len, failed[0][0][0] * 2)
            if len(failed) == 1 and any(failed)
            else super().valid_len(resume_len, failed)
        )


class BelievesWhatItAsked(KVRequest):
    def lookup_answered(self, ticket, now_ns):
        super().lookup_answered(ticket, now_ns)
        if self._answer:
            self._answer.present = self._answer.dialogue.asked


class WaitsForEver(KVRequest):
    def _wait(self, answer, now_ns):
        return Wait(now_ns + 1)


class ForgetsOldAnswers(KVRequest):
    """An answer that has aged is not offered but asked for again."""

    def _is_stale(self, answer, local_hit_len, now_ns):
        self.state = State.OFFERED
        return super()._is_stale(answer, local_hit_len, now_ns)


class HidesRejections(KVRequest):
    def store_finished(self, ticket, rejected, now_ns):
        super().store_finished(ticket, self.planner.nothing, now_ns)


class CountsReportsTwice(KVRequest):
    def store_finished(self, ticket, rejected, now_ns):
        self._stores.setdefault(ticket, self.decisions.stored)
        super().store_finished(ticket, rejected, now_ns)


class StoresAllAtTheEnd(KVRequest):
    """Generated blocks wait for the end, also where a window gives them back before."""

    def computed(self, num_tokens, now_ns):
        self._expect("computed")
        return self._plan_store(min(num_tokens, self.num_prompt_tokens), now_ns)

    def finished(self, num_tokens, now_ns):
        store = self._plan_store(num_tokens, now_ns) if self.state is State.COMPUTING else None
        super().finished(0, now_ns)
        return store


class StoresUnpinned(World):
    """A store reads its blocks whatever became of them."""

    def start_store(self, live, store):
        super().start_store(live, store)
        if store is not None:
            self.unpin(self.stores[-1])

    def pinning(self):
        return self.loads

    def end_store(self, job, fails=never):
        self.pin(job)
        super().end_store(job, fails)


class LoadsUnpinned(World):
    """A load writes its blocks although the request that held them is gone."""

    def start_load(self, live, load):
        super().start_load(live, load)
        self.unpin(self.loads[-1])

    def pinning(self):
        return self.stores

    def end_load(self, job, fails=never):
        self.pin(job)
        super().end_load(job, fails)


def world_of(machine=KVRequest, base=World, planner=Planner):
    def init(self, model, policy, num_blocks):
        base.__init__(self, model, policy, num_blocks)
        self.planner = planner(model)

    return type("Broken", (base,), {"machine": machine, "__init__": init})


ANY, ONE_FULL, ONE_WINDOW, WINDOWS = MODELS, MODELS[:1], MODELS[3:4], MODELS[1:4]
CONTROLS = {
    IgnoresFailedLoads: (world_of(IgnoresFailedLoads), ONE_FULL),
    KeepsPrefixOfWindow: (world_of(planner=KeepsPrefixOfWindow), ONE_WINDOW),
    BelievesWhatItAsked: (world_of(BelievesWhatItAsked), ANY),
    WaitsForEver: (world_of(WaitsForEver), ANY),
    ForgetsOldAnswers: (world_of(ForgetsOldAnswers), ANY),
    HidesRejections: (world_of(HidesRejections), ANY),
    CountsReportsTwice: (world_of(CountsReportsTwice), ANY),
    StoresAllAtTheEnd: (world_of(StoresAllAtTheEnd), WINDOWS),
    StoresUnpinned: (StoresUnpinned, ANY),
    LoadsUnpinned: (LoadsUnpinned, ONE_FULL),
}

SEARCH = settings(
    max_examples=1_000,
    stateful_step_count=50,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_a_mistake_is_found(control):
    world, models = CONTROLS[control]
    broken = type(control.__name__, (Interleavings,), {"world_type": world, "models": models})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(broken, settings=SEARCH)

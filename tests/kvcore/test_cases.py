"""Failures from public trackers that the decisions alone must not repeat: the [P] parts of the list of cases.

S05 and S15 to S19 are in the files of their nouns.
"""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.frontier import Frontier
from kvcore.group_runs import common, count_blocks, minus
from kvcore.planner import Planner
from kvcore.request import State
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.attention_oracle import as_runs, as_sets, models
from tests.kvcore.one_request import FULL, POLICY, B, answer, blocks, machine
from tests.kvcore.pool_objects import brute_hit, objects_of
from tests.kvcore.pool_world import World
from tests.kvcore.shared_pool import SharedPool
from tests.kvcore.test_request_stateful import LINEAGES

TEXT = LINEAGES[0]
SMALL = ModelSpec((FullAttention(2),))


def settle(world, fails=lambda number: False):
    """Every plan is reported by every rank."""
    for _ in range(world.num_ranks):
        for job in list(world.stores):
            world.end_store(job, fails)
        for job in list(world.loads):
            world.end_load(job, fails)
    world.check()


def serve(world, lineage, num_prompt, final=None):
    """One request from its arrival to its end; what it stores is under way."""
    live = world.arrive(lineage, num_prompt, final or num_prompt)
    while live in world.live:
        world.advance(live, 100)
        for question in world.questions:
            if question.live is live and live.machine.state is State.ASKING:
                world.answer(question)
        for job in [job for job in world.loads if job.live is live]:
            world.end_load(job)
    world.check()
    return live


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_s01_a_store_reads_its_blocks_until_the_last_rank_has_reported(num_ranks):
    """S01: the request is gone, its blocks are wanted by others, the store is slow; interleaved anyhow elsewhere."""
    world = World(SMALL, POLICY, num_blocks=10, num_ranks=num_ranks)
    serve(world, TEXT, 12)
    (job,) = world.stores
    for _ in range(num_ranks):
        world.engines[0].overwrite(100)
        assert len(world.engines[0].free) == 4, "six are pinned"
        world.end_store(job)  # compares what it reads with what its key names
    assert len(world.engines[0].free) == 10


def test_s02_errors_pin_nothing_and_storing_works_again():
    """S02: the first 20 stores fail in all of their blocks, then the pool is well."""
    world = World(SMALL, POLICY, num_blocks=12)
    for number in range(40):
        serve(world, LINEAGES[number % 2 + 2], 12)
        settle(world, fails=lambda _, is_ill=number < 20: is_ill)
        assert len(world.engines[0].free) == 12
        rejected = [count_blocks(live.machine.decisions.rejected) for live in world.closing]
        assert sum(rejected) > 0, "failures are counted"
        world.engines[0].overwrite(12)
    assert world.pool, "what was refused was stored later"
    assert count_blocks(world.closing[-1].machine.decisions.rejected) == 0


@given(models(), st.integers(1, 8), st.integers(-3, 3))
def test_s04_of_a_prompt_that_is_wholly_in_the_pool_a_token_is_computed(model, num_units, off):
    """S04: all lengths around multiples of block, alignment and hash unit."""
    for unit in {model.alignment, model.hashed_step, *(group.block_size for group in model.groups)}:
        num_tokens = max(1, num_units * unit + off)
        frontier = Planner(model).frontier(0, num_tokens)
        while frontier.open:
            frontier.answered(frontier.question)
        assert frontier.hit_len == model.limit(num_tokens) < num_tokens
        assert frontier.hit_len % model.hit_step == 0, "aligned to what can be loaded"


DEEPSEEK_V4 = ModelSpec(
    (
        FullAttention(256),
        SlidingWindow(64, 128),
        SlidingWindow(64, 128),
        SlidingWindow(64, 128),
        SlidingWindow(64, 128),
    ),
    eagle_groups=frozenset({4}),
)
"""Like FACTS 3: one latent group, four windows; one is of the draft head, and the four specs are one."""


@pytest.mark.parametrize(
    ("num_tokens", "hit_len"), [(1_024, 768), (4_096, 3_840), (4_097, 3_840), (5_000, 4_864), (131_072, 130_816)]
)
def test_s06_what_is_stored_with_a_draft_head_is_found(num_tokens, hit_len):
    """S06: prefill, store, lose all of the engine, look up again; what is asked is what was stored.

    The hit is at most one alignment unit short of the prompt, and of what the proof takes.
    """
    planner = Planner(DEEPSEEK_V4)
    request = machine(DEEPSEEK_V4, num_prompt=num_tokens)
    question = request.consider(0, num_tokens, 0)
    answer(request, question, planner.nothing)
    request.consider(0, num_tokens, 0)
    request.granted(0, 0)
    stored = request.computed(num_tokens, 0).blocks
    assert all(map(bool, stored)), "every group stores"
    frontier = planner.frontier(0, num_tokens)
    while frontier.open:
        assert minus(frontier.question, stored) == planner.nothing, "asked ⊆ stored"
        frontier.answered(common(frontier.question, stored))
    assert frontier.hit_len == hit_len > num_tokens - DEEPSEEK_V4.alignment - max(DEEPSEEK_V4.margins)
    assert minus(planner.lookup(0, num_tokens), stored) == planner.nothing, "nor does the whole lookup ask for more"


def test_s06_a_writer_that_forgets_the_proof_is_found_out():
    """S06, control: without the piece after a hit nothing is hit at the last boundary."""
    planner, num_tokens = Planner(DEEPSEEK_V4), 4_097
    without = Planner(ModelSpec(DEEPSEEK_V4.groups)).store(0, num_tokens, num_tokens)
    limit = planner.limit(num_tokens)
    assert planner.hit(0, num_tokens, planner.store(0, num_tokens, num_tokens)) == limit
    assert planner.hit(0, num_tokens, without) < limit


def test_s10_plans_name_the_blocks_of_the_last_admission():
    """S10: preempted twice, once before it computed anything; each plan reads the table of its own admission."""
    world = World(SMALL, POLICY, num_blocks=24)
    live = world.arrive(TEXT, 12, 14)
    for num_tokens in (6, 0, 14):
        while live.machine.state is not State.COMPUTING:
            world.advance(live, 1)
            for question in world.questions:
                if live.machine.state is State.ASKING:
                    world.answer(question, unknown=range(10))
        if num_tokens:
            world.advance(live, num_tokens - live.num_computed)
        if live in world.live:
            world.check()
            world.preempt(live)
            world.engines[0].overwrite(24)
    settle(world)
    assert as_sets(live.machine.decisions.stored)[0] == set(range(7)), "whatever happened in between"


def test_s21_what_the_pool_refused_is_offered_at_each_touch_until_it_fits():
    """S21: a pool of 6 of 10 blocks; the same prompt three times, found in the engine, then with room in the pool."""
    experience = machine().experience
    fits = blocks((0, 6))
    first = machine(FULL, num_prompt=10 * B, experience=experience)
    store = storing(first)
    first.store_finished(store.ticket, minus(store.blocks, fits), 1)
    second = machine(FULL, num_prompt=10 * B + 1, experience=experience)
    again = storing(second, local=10 * B)
    assert again.blocks == blocks((6, 10)), "what was refused, and only that"
    second.store_finished(again.ticket, blocks((8, 10)), 2)
    third = machine(FULL, num_prompt=10 * B + 1, experience=experience)
    last = storing(third, local=10 * B)
    assert last.blocks == blocks((8, 10))
    third.store_finished(last.ticket, blocks(), 3)
    fourth = machine(FULL, num_prompt=10 * B + 1, experience=experience)
    assert storing(fourth, local=10 * B) is None, "no hole is left"


def storing(request, local=0):
    request.consider(local, request.num_prompt_tokens, 0)
    request.granted(0, 0)
    return request.computed(request.num_prompt_tokens, 0)


# -- S24 --------------------------------------------------------------------------------------------------------------


def windows(*block_sizes, window=128, full=256):
    return ModelSpec((FullAttention(full), *(SlidingWindow(size, window) for size in block_sizes)))


FACTS_3 = windows(64, 64, 64, 64)
MILLION = windows(4, 16, 32, 64)


def asked_for(model, num_tokens, present):
    """(hit, keys, rounds, seconds of this thread) of a dialogue about a cold prompt, the pool holding `present`."""
    planner = Planner(model)
    start = time.thread_time()
    frontier = planner.frontier(0, num_tokens)
    while frontier.open:
        frontier.answered(common(frontier.question, present))
    return frontier.hit_len, count_blocks(frontier.asked), frontier.rounds, time.thread_time() - start


def all_of(model, num_tokens):
    return Planner(model).store(0, num_tokens, num_tokens)


def test_s24_a_million_tokens_are_few_keys():
    """S24: one full group of 256-token blocks and windows of 4 to 64; the whole lookup asks for 380,000 and more."""
    num_tokens = 1_000_000
    whole = count_blocks(Planner(MILLION).lookup(0, num_tokens))
    everything = all_of(MILLION, num_tokens)
    hit, keys, rounds, seconds = asked_for(MILLION, num_tokens, everything)
    full_blocks = num_tokens // 256
    assert hit == Planner(MILLION).limit(num_tokens)
    assert keys < full_blocks + 60 < whole / 40, (keys, whole)
    assert rounds <= 3
    assert seconds < 0.05, "a few ms of this thread, however busy the machine is"


@pytest.mark.parametrize(
    ("held", "hit_len", "max_keys"),
    [(1.0, 130_816, 519), (0.5, 65_536, 527), (0.0, 0, 64)],
    ids=["whole", "gap at 50 %", "miss"],
)
def test_s24_keys_of_the_layout_that_was_measured(held, hit_len, max_keys):
    """A prompt of 131,072 tokens; the whole lookup asks for 511 latent blocks and 8 blocks of windows at each."""
    num_tokens = 131_072
    hit, keys, _, _ = asked_for(FACTS_3, num_tokens, all_of(FACTS_3, int(num_tokens * held)))
    assert hit == hit_len
    assert keys <= max_keys, keys
    assert count_blocks(Planner(FACTS_3).lookup(0, num_tokens)) == 511 * 9


def test_s24_the_hit_is_that_of_brute_force_on_random_patterns():
    """S24, at a size that brute force can do; also where the whole lookup finds it."""
    model, rng = windows(1, 2, 4, 4, window=6, full=8), random.Random(24)
    limit = model.limit(161)
    everything = objects_of(model, 160)
    hits = set()
    for _ in range(120):
        share = rng.choice((0.5, 0.9, 0.97, 1.0))
        pool = tuple({block for block in some if rng.random() < share} for some in everything)
        frontier = Frontier(model, 0, limit, Planner(model).nothing)
        while frontier.open:
            frontier.answered(common(frontier.question, as_runs(pool)))
        hits.add(frontier.hit_len)
        assert frontier.hit_len == brute_hit(model, 0, limit, pool)
        assert frontier.hit_len == Planner(model).hit(0, 161, common(Planner(model).lookup(0, 161), as_runs(pool)))
    assert len(hits) > 5


# -- laws -------------------------------------------------------------------------------------------------------------


ENDLESS = 240
"""Tokens of a writer that no reader here gets near the end of."""


def asked_in_vain(model, local_hit_len, num_tokens, rng, make=Frontier):
    """What a reader asks for that no writer of these settings stores, however long it goes on.

    The pool has a random part of what is asked; what is loaded then is proven to be there.
    """
    planner = Planner(model)
    frontier = make(model, local_hit_len, planner.limit(num_tokens), planner.nothing)
    while frontier.open:
        frontier.answered(
            as_runs({block for block in some if rng.random() < 0.9} for some in as_sets(frontier.question))
        )
    loaded = planner.load(local_hit_len, frontier.hit_len, frontier.present)
    assert minus(loaded, frontier.present) == planner.nothing, "loaded ⊆ proven"
    assert frontier.hit_len < num_tokens
    return minus(frontier.asked, SharedPool(model, 1).written_by(ENDLESS))


@given(models(max_groups=3), st.integers(0, 9), st.integers(1, 90), st.randoms(use_true_random=False))
def test_loaded_is_proven_and_all_that_is_asked_can_have_been_stored(model, num_local, num_tokens, rng):
    """Across any writer and any reader of one settings: a subset at each step, and a token is computed."""
    local_hit_len = min(num_local * model.hit_step, model.limit(num_tokens))
    assert asked_in_vain(model, local_hit_len, num_tokens, rng) == Planner(model).nothing


class AsksForEveryBlock(Frontier):
    """Also for those of a window that no hit needs."""

    def _next(self):
        return as_runs(objects_of(self.model, 0 if self.rounds else self.limit))


class AsksBesideTheState(Frontier):
    """Also for states where no hit ends."""

    def _unknown(self, group, length):
        start, end = self._proof(group, length)
        return ((max(0, start - 1), end),) if end else ()


@pytest.mark.parametrize(
    ("wrong", "model"),
    [
        (AsksForEveryBlock, windows(2, window=3, full=8)),
        (AsksBesideTheState, ModelSpec((FullAttention(8), Recurrent(2)))),
    ],
)
def test_a_reader_that_asks_for_what_nobody_stores_is_found_out(wrong, model):
    nothing = Planner(model).nothing
    assert asked_in_vain(model, 0, 90, random.Random(6)) == nothing
    assert asked_in_vain(model, 0, 90, random.Random(6), wrong) != nothing

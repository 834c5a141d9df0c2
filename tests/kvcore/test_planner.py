"""What to ask, load and store, end to end for one sequence: a writer, a pool that loses blocks, a reader."""

from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcore.group_runs import common, count_blocks, minus, plus
from kvcore.planner import Planner
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.attention_oracle import WRONG, as_runs, as_sets, models, oracle_of, presences

HORIZON = 260


@st.composite
def readers(draw):
    """(planner, length of the sequence, local hit, what the pool holds)."""
    model = draw(models())
    num_tokens = draw(st.integers(1, 96))
    pool = draw(presences(model, num_tokens))
    local = draw(st.integers(0, num_tokens // model.alignment)) * model.alignment
    return Planner(model), num_tokens, local, pool


def brute_hit(oracle, num_tokens, local, pool):
    """Longest boundary above the local hit, with a token left to compute, that pool and engine hold together."""
    together = tuple(blocks | held for blocks, held in zip(pool, oracle.held(local), strict=True))
    lengths = [p for p in hit_lens(oracle, num_tokens, local) if oracle.resumable(p, together)]
    return max(lengths, default=local)


def hit_lens(oracle, num_tokens, local):
    """Lengths that a hit beyond the local one may have."""
    return [p for p in range(local + 1, oracle.limit(num_tokens) + 1) if oracle.boundary(p)]


def answer(planner, num_tokens, local, pool):
    """What the pool says when it is asked what the planner asks."""
    return common(planner.lookup(local, num_tokens), as_runs(pool))


@given(readers())
def test_asking_what_the_planner_asks_finds_the_longest_hit(reader):
    planner, num_tokens, local, pool = reader
    expected = brute_hit(oracle_of(planner.model), num_tokens, local, pool)
    assert planner.hit(local, num_tokens, answer(*reader)) == expected
    assert planner.hit(local, num_tokens, as_runs(pool)) == expected


@given(readers())
def test_no_block_is_asked_for_in_vain(reader):
    """Without any one of them some hit is not found."""
    planner, num_tokens, local, _ = reader
    oracle = oracle_of(planner.model)
    lengths = hit_lens(oracle, num_tokens, local)
    held = oracle.held(local)
    for asked, engine, group in zip(as_sets(planner.lookup(local, num_tokens)), held, oracle.groups, strict=True):
        assert asked == set().union(*(group.proof(p) for p in lengths)) - engine


@given(readers())
def test_load_and_engine_are_what_the_hit_needs(reader):
    planner, num_tokens, local, _ = reader
    found = answer(*reader)
    hit = planner.hit(local, num_tokens, found)
    load = planner.load(local, hit, found)
    oracle = oracle_of(planner.model)
    loads = tuple(needed - held for needed, held in zip(oracle.held(hit), oracle.held(local), strict=True))
    assert as_sets(load) == loads
    assert hit == local or minus(load, found) == tuple(() for _ in load), "loaded ⊆ proven present"


@given(readers())
def test_a_token_is_always_computed_and_hits_are_aligned(reader):
    planner, num_tokens, local, _ = reader
    everything = tuple(((0, 100),) for _ in planner.model.groups)
    limit = planner.limit(num_tokens)
    assert limit == oracle_of(planner.model).limit(num_tokens) < num_tokens
    assert planner.hit(local, num_tokens, everything) == max(local, limit)


@given(readers(), st.integers(1, 40))
def test_a_longer_prompt_never_shortens_the_hit_of_its_prefix(reader, more):
    planner, num_tokens, local, pool = reader
    longer = answer(planner, num_tokens + more, local, pool)
    assert planner.hit(local, num_tokens + more, longer) >= planner.hit(local, num_tokens, answer(*reader))


@given(readers(), st.data())
def test_losing_a_block_never_lengthens_a_hit(reader, data):
    planner, num_tokens, local, pool = reader
    less = tuple(blocks - data.draw(st.sets(st.sampled_from(sorted(blocks or {0})))) for blocks in pool)
    after = planner.hit(local, num_tokens, answer(planner, num_tokens, local, less))
    assert after <= planner.hit(local, num_tokens, answer(*reader))


@given(readers(), st.integers(0, 96))
def test_a_local_hit_that_grew_keeps_the_answer_usable(reader, grown):
    """The answer to a question asked above a shorter local hit finds what a new question would find."""
    planner, num_tokens, local, pool = reader
    grown = local + grown - grown % planner.model.alignment
    assume(grown <= num_tokens)
    assume(not any(planner.model.margins))  # a proof that ends inside what the engine holds was not asked for
    expected = brute_hit(oracle_of(planner.model), num_tokens, grown, pool)
    assert planner.hit(grown, num_tokens, answer(*reader)) == expected


# -- writer and reader ------------------------------------------------------------------------------------------------


@st.composite
def turns(draw):
    """(model, retention, prompt length, final length, lengths at which the writer plans)."""
    model = draw(models())
    num_prompt = draw(st.integers(1, 80))
    final = draw(st.integers(num_prompt, 96))
    lengths = sorted({0, final, *draw(st.lists(st.integers(0, final), max_size=3))})
    retention = draw(st.sampled_from((None, 0, model.alignment, 3 * model.alignment)))
    return model, retention, num_prompt, final, lengths


@given(turns())
def test_store_equals_brute_force_in_any_chunks(turn):
    model, retention, num_prompt, final, lengths = turn
    planner = Planner(model, retention)
    stored = tuple(() for _ in model.groups)
    for start, end in pairwise(lengths):
        new = planner.store(start, end, num_prompt)
        assert common(stored, new) == tuple(() for _ in model.groups), "a block is stored once"
        stored = plus(stored, new)
    ranges = tuple((0, final // group.block_size) for group in model.groups)
    horizon = HORIZON + 2 * (retention or 0)
    assert as_sets(stored) == oracle_of(model).store(ranges, retention, num_prompt, horizon)


@given(turns())
def test_the_next_turn_resumes_where_the_writer_kept(turn):
    model, retention, num_prompt, final, _ = turn
    assume(all(group.positional for group in model.groups))
    pool = as_sets(Planner(model, retention).store(0, final, num_prompt))
    reader = Planner(model)
    hit = reader.hit(0, final + 1, answer(reader, final + 1, 0, pool))
    oracle = oracle_of(model)
    kept = [length for length in range(1, oracle.limit(final) + 1) if oracle.kept(length, retention, num_prompt)]
    assert hit >= max(kept, default=0)
    if retention is None:
        assert hit == (oracle.limit(final) if oracle.margin else oracle.last_boundary(final))


# -- failed loads -----------------------------------------------------------------------------------------------------


@given(readers(), st.data())
def test_what_is_valid_after_a_failed_load_can_be_resumed_at(reader, data):
    planner, num_tokens, local, _ = reader
    oracle = oracle_of(planner.model)
    resume = data.draw(st.integers(local, num_tokens))
    load = planner.load(local, resume, planner.nothing)
    failed = tuple(data.draw(st.sets(st.sampled_from(sorted(b or {0})), max_size=2)) & b for b in as_sets(load))
    valid = planner.valid_len(resume, as_runs(failed))
    left = tuple(held - lost for held, lost in zip(oracle.held(resume), failed, strict=True))
    assert all(group.needed(valid) <= blocks for group, blocks in zip(oracle.groups, left, strict=True))
    assert valid <= resume
    if not any(failed):
        assert valid == resume
    elif len(left) > 1 or not planner.model.groups[0].prefix_closed:
        assert valid == 0
    else:
        assert valid == max(n for n in range(resume + 1) if oracle.boundary(n) and oracle.held(n)[0] <= left[0])


@pytest.mark.parametrize(
    ("spec", "failed", "valid_len"),
    [
        (FullAttention(16), ((3, 4),), 48),
        (FullAttention(16), ((0, 1), (3, 4)), 0),
        (SlidingWindow(16, 33), ((4, 5),), 0),
        (SlidingWindow(16, 33), ((3, 4),), 0),
        (ChunkedLocal(16, 64), ((4, 5),), 0),
        (Recurrent(16), ((4, 5),), 0),
    ],
)
def test_one_prefix_closed_group_keeps_the_tokens_before_the_first_failed_block(spec, failed, valid_len):
    """Any other starts over: the engine would resume at that block, whatever a window or a state reads before it."""
    assert Planner(ModelSpec((spec,))).valid_len(80, (failed,)) == valid_len


@pytest.mark.parametrize(
    ("failed", "valid_len"), [((((1, 2),), ()), 16), (((), ((6, 7),)), 48), ((((2, 3),), ((6, 7),)), 32)]
)
def test_a_tail_that_failed_costs_its_block(failed, valid_len):
    """Blocks of 16 tokens, split at every 8: tail 6 holds tokens 48 to 55."""
    model = ModelSpec((FullAttention(16),), hash_unit=8, hit_unit=8)
    assert Planner(model).valid_len(56, failed) == valid_len


@pytest.mark.parametrize(("resume_len", "states"), [(48, ((0, 9),)), (50, ()), (56, ())])
def test_a_state_serves_only_where_it_ends(resume_len, states):
    planner = Planner(ModelSpec((FullAttention(16), Recurrent(16))))
    assert planner.usable((((0, 9),), ((0, 9),)), resume_len) == (((0, 9),), states)


# -- controls and helpers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_rejected(name):
    """Pools that hold exactly what one boundary needs tell each wrong spec from the right one."""
    planner = Planner(ModelSpec((FullAttention(16), WRONG[name]())))
    oracle = oracle_of(planner.model)
    pools = [({0, 1, 2, 3, 4}, oracle.groups[1].needed(length)) for length in range(4, 80, 4)]
    less = [(full, group - {max(group)}) for full, group in pools if group]
    more = [(full, set(range(20)) - group) for full, group in pools]
    hits = [
        planner.hit(0, 81, answer(planner, 81, 0, pool)) == brute_hit(oracle, 81, 0, pool)
        for pool in pools + less + more
    ]
    loads = [as_sets(planner.load(0, length, planner.nothing)) == oracle.held(length) for length in range(0, 81, 16)]
    assert not all(hits + loads)


def test_group_algebra():
    left, right = (((0, 4),), ()), (((2, 6),), ((1, 2),))
    assert plus(left, right) == (((0, 6),), ((1, 2),))
    assert minus(left, right) == (((0, 2),), ())
    assert common(left, right) == (((2, 4),), ())
    assert count_blocks(right) == 5


@given(turns())
def test_what_is_kept_of_what_is_held(turn):
    model, retention, num_prompt, _, lengths = turn
    planner = Planner(model, retention)
    for length in lengths:
        expected = common(planner.store(0, length, num_prompt), planner.held(length))
        assert planner.kept(length, num_prompt) == expected


class CountedWindow(SlidingWindow):
    """Counts how often it is asked what it needs."""

    asked: ClassVar[int] = 0

    def needed_blocks(self, prefix_len):
        CountedWindow.asked += 1
        return super().needed_blocks(prefix_len)


def test_what_a_window_needs_is_not_asked_for_each_boundary():
    """Storing a whole prompt at once: all windows follow from one."""
    planner = Planner(ModelSpec((FullAttention(256), CountedWindow(64, 128))))
    asked = []
    for num_tokens in (1 << 15, 1 << 20):
        CountedWindow.asked = 0
        _, tails = planner.store(0, num_tokens, num_tokens)
        assert len(tails) == num_tokens // 256
        asked.append(CountedWindow.asked)
    assert asked[0] == asked[1] <= 4


def test_the_full_group_is_never_walked_block_by_block():
    """A prompt of 2 ** 50 tokens: only a plan that counts in runs ends."""
    planner = Planner(ModelSpec((FullAttention(16),)))
    num_tokens = 1 << 50
    asked = planner.lookup(0, num_tokens)
    assert asked == (((0, num_tokens // 16 - 1),),)
    hit = planner.hit(0, num_tokens, asked)
    assert planner.load(0, hit, asked) == asked
    assert planner.store(hit, num_tokens, num_tokens) == (((num_tokens // 16 - 1, num_tokens // 16),),)

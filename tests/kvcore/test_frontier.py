"""The dialogue with the pool against trying every length on every object."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore.frontier
from kvcore.frontier import Frontier
from kvcore.group_runs import count_blocks
from kvcore.masks import lookup_runs
from kvcore.planner import Planner
from kvcore.runs import from_blocks
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.attention_oracle import as_sets, specs
from tests.kvcore.pool_objects import brute_hit, objects_of

NUM_TOKENS = 96


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that short sequences take several."""
    monkeypatch.setattr(kvcore.frontier, "FIRST_BATCH_HITS", 2)


@st.composite
def models(draw):
    """Any mix of groups, some with draft layers; in a third of the cases one that splits blocks."""
    if draw(st.integers(0, 2)) == 0:
        return draw(split_models())
    groups = tuple(draw(st.lists(specs(), min_size=1, max_size=5)))
    return ModelSpec(groups, draw(st.sets(st.sampled_from(range(len(groups))), max_size=2).map(frozenset)))


@st.composite
def split_models(draw):
    unit = draw(st.sampled_from((1, 2, 4)))
    sizes = st.sampled_from((unit, 2 * unit, 3 * unit, 4 * unit))
    full = st.builds(FullAttention, sizes)
    recurrent = st.builds(Recurrent, sizes)
    window = st.builds(SlidingWindow, st.just(unit), st.integers(1, 20))
    groups = (draw(full), draw(recurrent), *draw(st.lists(st.one_of(full, recurrent, window), max_size=2)))
    drafts = draw(st.sets(st.sampled_from(range(len(groups))), max_size=1).map(frozenset))
    unit = math.gcd(*(group.block_size for group in groups))
    if any(isinstance(group, SlidingWindow) and group.block_size != unit for group in groups):
        unit = min(group.block_size for group in groups if isinstance(group, SlidingWindow))
    return ModelSpec(groups, drafts, hash_unit=unit, hit_unit=unit)


@st.composite
def pools(draw, model):
    """Per kind of object, a set: all, none, a prefix, a few, all but a few."""
    return tuple(draw(_some(objects)) for objects in objects_of(model, NUM_TOKENS))


@st.composite
def _some(draw, everything):
    few = st.sets(st.sampled_from(sorted(everything)), max_size=4) if everything else st.just(set())
    kind = draw(st.sampled_from(("all", "all", "but", "but", "prefix", "few", "none")))
    if kind == "prefix":
        end = draw(st.integers(0, NUM_TOKENS))
        return {position for position in everything if position < end}
    return {"all": everything, "but": everything - draw(few), "few": draw(few), "none": set()}[kind]


def dialogue(model, local, limit):
    return Frontier(model, local, limit, Planner(model).nothing)


def ask(frontier, pool):
    """Carry the dialogue through; the questions that were put."""
    questions = []
    while frontier.open:
        questions.append(frontier.question)
        frontier.answered(tuple(from_blocks(found) for found in _found(frontier.question, pool)))
    return questions


def _found(question, pool):
    return [blocks & held for blocks, held in zip(as_sets(question), pool, strict=True)]


@st.composite
def cases(draw):
    model = draw(models())
    num_tokens = draw(st.integers(0, NUM_TOKENS))
    limit = model.limit(num_tokens)
    local = draw(st.integers(0, limit // model.hit_step)) * model.hit_step if draw(st.booleans()) else 0
    return model, local, limit, draw(pools(model))


@given(cases())
def test_it_finds_the_longest_hit(case):
    model, local, limit, pool = case
    frontier = dialogue(model, local, limit)
    ask(frontier, pool)
    assert frontier.hit_len == brute_hit(model, local, limit, pool)


@given(cases())
def test_no_key_is_asked_for_twice_or_in_vain(case):
    model, local, limit, pool = case
    frontier = dialogue(model, local, limit)
    questions = ask(frontier, pool)
    asked = [
        (index, block) for question in questions for index, blocks in enumerate(as_sets(question)) for block in blocks
    ]
    assert len(asked) == len(set(asked)) == count_blocks(frontier.asked)
    if not model.splits_blocks:
        full = as_sets(lookup_runs(model, local, limit))
        assert all(block in full[index] for index, block in asked)


@given(cases())
def test_rounds_are_few(case):
    model, local, limit, pool = case
    frontier = dialogue(model, local, limit)
    ask(frontier, pool)
    boundaries = max(1, (limit - local) // model.hit_step)
    assert frontier.rounds <= 5 + math.log2(boundaries)


@given(cases())
def test_a_whole_hit_takes_three_rounds(case):
    model, local, limit, _ = case
    frontier = dialogue(model, local, limit)
    ask(frontier, objects_of(model, NUM_TOKENS + 64))
    assert frontier.hit_len == limit and frontier.rounds <= 3


@given(cases(), st.data())
def test_losing_a_block_never_lengthens_a_hit(case, data):
    model, local, limit, pool = case
    whole, less = dialogue(model, local, limit), dialogue(model, local, limit)
    ask(whole, pool)
    lost = tuple(data.draw(st.sets(st.sampled_from(sorted(held)), max_size=3)) if held else set() for held in pool)
    ask(less, tuple(held - gone for held, gone in zip(pool, lost, strict=True)))
    assert less.hit_len <= whole.hit_len

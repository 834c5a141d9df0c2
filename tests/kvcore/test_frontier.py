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
from tests.kvcore.attention_oracle import Full, State, as_sets, attention_of, specs

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


def spaces(model, num_tokens):
    """How many objects of each kind a sequence has: blocks or states of each group, then tails."""
    unit = model.hit_step
    sizes = [
        unit if model.splits_blocks and isinstance(group, Recurrent) else group.block_size for group in model.groups
    ]
    return [num_tokens // size for size in (*sizes, *(unit for _ in model.tail_groups))]


@st.composite
def pools(draw, model):
    """Per kind of object, a set: all, none, a prefix, a few, all but a few."""
    return real_objects(model, [draw(_objects(count)) for count in spaces(model, NUM_TOKENS)])


def real_objects(model, pool):
    """A tail that ends where its block does is that block, under the block's name."""
    tails = zip(model.tail_groups, pool[len(model.groups) :], strict=True)
    sizes_and_units = [(model.groups[group].block_size // model.hit_step, units) for group, units in tails]
    ends_inside = [{unit for unit in units if (unit + 1) % size} for size, units in sizes_and_units]
    return (*pool[: len(model.groups)], *ends_inside)


@st.composite
def _objects(draw, count):
    everything = set(range(count))
    some = st.sets(st.sampled_from(range(count)), max_size=4) if count else st.just(set())
    kind = draw(st.sampled_from(("all", "all", "but", "but", "prefix", "few", "none")))
    if kind == "prefix":
        return set(range(draw(st.integers(0, count))))
    return {"all": everything, "but": everything - draw(some), "few": draw(some), "none": set()}[kind]


def brute_hit(model, local, limit, pool):
    """The longest length at which every token or state that the next one reads is held, and each draft's proof.

    By objects that end inside the sequence: where the limit is inside a block, its whole block is none.
    """
    pool = within(model, limit, pool)
    for length in range(limit, local, -1):
        if length % model.hit_step == 0 and all(_resumes(model, g, length, local, pool) for g in range(len(pool))):
            return length
    return local


def within(model, limit, pool):
    sizes = [group.block_size for group in model.groups]
    margins = [*model.margins, *(model.margins[group] for group in model.tail_groups)]
    if model.splits_blocks:
        sizes = [model.hit_step if isinstance(group, Recurrent) else group.block_size for group in model.groups]
    sizes += [model.hit_step for _ in model.tail_groups]
    return tuple(
        {block for block in held if (block + 1) * size <= limit + margin}
        for held, size, margin in zip(pool, sizes, margins, strict=True)
    )


def _resumes(model, group, length, local, pool):
    if group >= len(model.groups):
        return True
    spec = model.groups[group]
    attention = attention_of(spec)
    proof_len = length + model.margins[group]
    if isinstance(attention, State):
        return _has_state(model, group, length, pool) and all(
            map(_proven(model, group, pool), range(length, proof_len))
        )
    read = set(attention.reads(length)) | set(range(length, proof_len))
    if not model.splits_blocks and length % spec.block_size:
        read |= set(range(length // spec.block_size * spec.block_size, length))
    local_reads = set(attention.reads(local))
    blocks_held = {token // spec.block_size for token in local_reads if token < local}
    has = _proven(model, group, pool)
    in_engine = (
        (lambda t: t < local)
        if isinstance(attention, Full)
        else (lambda t: t < local and t // spec.block_size in blocks_held)
    )
    return all(has(token) or in_engine(token) for token in read)


def _has_state(model, group, length, pool):
    size = model.hit_step if model.splits_blocks else model.groups[group].block_size
    return length // size - 1 in pool[group]


def _proven(model, group, pool):
    size = model.groups[group].block_size

    def has(token):
        if token // size in pool[group]:
            return True
        if group not in model.tail_groups:
            return False
        tails = pool[len(model.groups) + model.tail_groups.index(group)]
        unit = model.hit_step
        return any(u * unit // size == token // size and (u + 1) * unit > token for u in tails)

    return has


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
    ask(frontier, real_objects(model, [set(range(count)) for count in spaces(model, NUM_TOKENS + 64)]))
    assert frontier.hit_len == limit and frontier.rounds <= 3


@given(cases(), st.data())
def test_losing_a_block_never_lengthens_a_hit(case, data):
    model, local, limit, pool = case
    whole, less = dialogue(model, local, limit), dialogue(model, local, limit)
    ask(whole, pool)
    lost = tuple(data.draw(st.sets(st.sampled_from(sorted(held)), max_size=3)) if held else set() for held in pool)
    ask(less, tuple(held - gone for held, gone in zip(pool, lost, strict=True)))
    assert less.hit_len <= whole.hit_len

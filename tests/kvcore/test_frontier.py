"""The dialogue with the pool against trying every length on every object.

A case is (model, local hit, limit, what is denied, what the pool holds). What the dialogue promises is checked in one
place, `broken_promises`, which the controls at the end must not get past.
"""

import math

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import kvcore.frontier
from kvcore.frontier import Frontier
from kvcore.group_runs import common, count_blocks, minus
from kvcore.masks import lookup_runs
from kvcore.runs import from_blocks
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.attention_oracle import as_runs, as_sets, specs
from tests.kvcore.pool_objects import brute_hit, held_tokens, kinds_of, needed_tokens, objects_of, resumes

NUM_TOKENS = 96


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that short sequences take several."""
    monkeypatch.setattr(kvcore.frontier, "FIRST_BATCH_HITS", 2)
    monkeypatch.setattr(kvcore.frontier, "LONG_BATCH_HITS", 8)


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


@st.composite
def cases(draw):
    model = draw(models())
    num_tokens = draw(st.integers(0, NUM_TOKENS))
    limit = model.limit(num_tokens)
    local = draw(st.integers(0, limit // model.hit_step)) * model.hit_step if draw(st.booleans()) else 0
    pool = draw(pools(model))
    return model, local, limit, draw(st.one_of(st.just(nothing_of(pool)), _few_of(objects_of(model, NUM_TOKENS)))), pool


def nothing_of(pool):
    return tuple(set() for _ in pool)


def _few_of(objects):
    return st.tuples(
        *(st.sets(st.sampled_from(sorted(some)), max_size=2) if some else st.just(set()) for some in objects)
    )


def ask(frontier, pool):
    """Carry the dialogue through; the questions that were put, as sets."""
    questions = []
    while frontier.open and len(questions) < NUM_TOKENS:
        questions.append(as_sets(frontier.question))
        frontier.answered(as_runs(tuple(asked & held for asked, held in zip(questions[-1], pool, strict=True))))
    return questions


def broken_promises(case, make=Frontier):
    """What the dialogue of the case does that it must not."""
    model, local, limit, denied, pool = case
    frontier = make(model, local, limit, as_runs(denied))
    questions = ask(frontier, pool)
    asked = [(index, block) for question in questions for index, some in enumerate(question) for block in some]
    held = tuple(some - gone for some, gone in zip(pool, denied, strict=True))
    promises = {
        "the longest hit": frontier.hit_len == brute_hit(model, local, limit, held),
        "once": len(asked) == len(set(asked)) == count_blocks(frontier.asked),
        "what is needed": set(asked) <= needed_by_some_hit(model, local, limit, denied),
        "nothing denied": not any(block in denied[index] for index, block in asked),
        "few rounds": frontier.rounds == len(questions) <= 5 + math.log2(max(1, (limit - local) // model.hit_step)),
    }
    return {promise for promise, kept in promises.items() if not kept}


def needed_by_some_hit(model, local, limit, denied):
    """Objects that some hit beyond the local one needs and the engine lacks, where no other one is denied for it.

    A denied tail rules no hit out: until the answers are there, a longer one or the whole block may serve.
    """
    gone = (*denied[: len(model.groups)], *(set() for _ in model.tail_groups))
    everything = tuple(some - lost for some, lost in zip(objects_of(model, NUM_TOKENS + 64), gone, strict=True))
    held = held_tokens(model, limit, everything)
    lengths = [n for n in range(local + 1, limit + 1) if n % model.hit_step == 0 and resumes(model, n, local, held)]
    useful = set()
    for length in lengths:
        needed = needed_tokens(model, length, local)
        useful |= {
            (index, position)
            for index, kind in enumerate(kinds_of(model))
            for position in everything[index]
            if needed[kind.group] & set(kind.tokens(position))
            and kind.end(position) <= limit + model.margins[kind.group]
        }
    return useful


SPLIT = ModelSpec(
    (FullAttention(3), Recurrent(1), FullAttention(1)), eagle_groups=frozenset({0}), hash_unit=1, hit_unit=1
)
WHOLE_BLOCKS_ONLY = (*objects_of(SPLIT, NUM_TOKENS)[:3], set())


@given(cases())
@example((SPLIT, 0, 2, (set(), set(), {1}, set()), WHOLE_BLOCKS_ONLY))
def test_it_finds_the_longest_hit_and_asks_for_little(case):
    """The example: what is denied leaves less of a block than proves it, and the pool has no tail but the whole."""
    assert broken_promises(case) == set()


@given(cases())
def test_a_whole_hit_takes_three_rounds(case):
    model, local, limit, _, pool = case
    frontier = Frontier(model, local, limit, as_runs(nothing_of(pool)))
    ask(frontier, objects_of(model, NUM_TOKENS + 64))
    assert frontier.hit_len == limit and frontier.rounds <= 3


@given(cases())
def test_it_asks_no_more_than_the_full_lookup(case):
    model, local, limit, denied, pool = case
    assume(not model.splits_blocks)
    frontier = Frontier(model, local, limit, as_runs(denied))
    ask(frontier, pool)
    assert minus(frontier.asked, lookup_runs(model, local, limit)) == as_runs(nothing_of(pool))


@given(cases(), st.data())
def test_losing_a_block_never_lengthens_a_hit(case, data):
    model, local, limit, denied, pool = case
    whole, less = (Frontier(model, local, limit, as_runs(denied)) for _ in range(2))
    ask(whole, pool)
    lost = tuple(data.draw(st.sets(st.sampled_from(sorted(held)), max_size=3)) if held else set() for held in pool)
    ask(less, tuple(held - gone for held, gone in zip(pool, lost, strict=True)))
    assert less.hit_len <= whole.hit_len


@given(cases(), st.integers(0, 40))
def test_a_longer_prompt_never_shortens_the_hit_of_its_prefix(case, more):
    model, local, limit, denied, pool = case
    hits = []
    for length in (limit, limit + more - more % model.hit_step):
        frontier = Frontier(model, local, length, as_runs(denied))
        ask(frontier, pool)
        hits.append(frontier.hit_len)
    assert hits[0] <= hits[1]


@given(cases(), st.integers(0, 3))
def test_a_dialogue_that_is_broken_off_proves_what_was_answered(case, num_rounds):
    model, local, limit, denied, pool = case
    frontier = Frontier(model, local, limit, as_runs(denied))
    while frontier.open and frontier.rounds < num_rounds:
        frontier.answered(as_runs(tuple(a & h for a, h in zip(as_sets(frontier.question), pool, strict=True))))
    assert frontier.hit_len == brute_hit(model, local, limit, as_sets(frontier.present))


# -- controls ---------------------------------------------------------------------------------------------------------


class StopsEarly(Frontier):
    def answered(self, present):
        super().answered(present)
        if self.rounds == 2:
            self.question = as_runs(nothing_of(present))


class IgnoresMargins(Frontier):
    def __post_init__(self):
        self.model = ModelSpec(self.model.groups, hash_unit=self.model.hash_unit, hit_unit=self.model.hit_unit)
        super().__post_init__()


class AsksTwice(Frontier):
    """Once more for what a hit needs, although it was answered."""

    def _unknown(self, group, length):
        return as_runs((set(range(*self._proof(group, length))) - as_sets(self._held)[group],))[0]


class AsksForDenied(Frontier):
    def __post_init__(self):
        self.denied = as_runs(nothing_of(self.denied))
        super().__post_init__()


class AsksForAllAtOnce(Frontier):
    """Also for windows that no hit of the rest needs, and beyond a gap."""

    def _next(self):
        if self.rounds:
            return as_runs(nothing_of(self.asked))
        return as_runs(objects_of(self.model, self.limit))


class GoesStepByStep(Frontier):
    """One boundary a round."""

    def _tops(self):
        self._num_tops = 1
        return super()._tops()


class AsksForTwoMore(Frontier):
    """The next 1, 3, 5, ... hits: rounds as the root of the boundaries."""

    def _tops(self):
        question = super()._tops()
        self._num_tops = self._num_tops // 2 + 2
        return question


FULL, WINDOW = FullAttention(2), SlidingWindow(2, 5)
HOLES = {block for block in range(48) if block % 3}
EXAMPLES = [
    (ModelSpec((FULL, WINDOW)), 0, 94, (set(), set()), (set(range(48)), HOLES)),
    (ModelSpec((FULL, WINDOW)), 0, 94, (set(), {46}), (set(range(30)), set(range(48)))),
    (ModelSpec((FULL,), frozenset({0})), 0, 90, (set(),), (set(range(20)),)),
    (ModelSpec((FULL, WINDOW)), 4, 94, (set(), set()), (set(range(48)), {3, 4})),
]


def test_the_examples_are_kept():
    assert [broken_promises(example) for example in EXAMPLES] == [set()] * len(EXAMPLES)


@pytest.mark.parametrize(
    ("wrong", "promise"),
    [
        (StopsEarly, "the longest hit"),
        (IgnoresMargins, "the longest hit"),
        (AsksTwice, "once"),
        (AsksForDenied, "nothing denied"),
        (AsksForAllAtOnce, "what is needed"),
        (GoesStepByStep, "few rounds"),
    ],
)
def test_another_dialogue_is_rejected(wrong, promise):
    assert any(promise in broken_promises(example, wrong) for example in EXAMPLES)


def most_rounds(make, num_boundaries):
    """Of a pool that holds every second tail block, so that no hit is known to be lost before it is asked for."""
    model, end = ModelSpec((FULL, WINDOW)), num_boundaries + 5
    rounds = []
    for whole in (0, num_boundaries // 100, num_boundaries // 3):
        dialogue = make(model, 0, 2 * num_boundaries, ((), ()))
        tails = from_blocks({*range(0, end, 2), whole, whole + 1})
        while dialogue.open:
            dialogue.answered(common(dialogue.question, (((0, end),), tails)))
        rounds.append(dialogue.rounds)
    return max(rounds)


def test_rounds_grow_as_the_logarithm_of_the_boundaries():
    assert most_rounds(Frontier, 4_096) <= math.log2(4_096) + 5 < most_rounds(AsksForTwoMore, 4_096)


def test_what_the_engine_holds_is_not_lost_when_the_pool_denied_it():
    model = ModelSpec((SlidingWindow(2, 13, 5),))
    frontier = Frontier(model, 2, 20, denied=(((0, 1),),))
    ask(frontier, (set(range(10)),))
    assert frontier.hit_len == 20

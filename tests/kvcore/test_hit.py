"""Hit length on runs against trying every boundary of the attention mask, on any presence pattern."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.hit import hit_len
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, SlidingWindow
from tests.kvcore.attention_oracle import WRONG, as_runs, models, oracle_of, presences


@st.composite
def cases(draw):
    model = draw(models())
    num_tokens = draw(st.integers(0, 96))
    return model, draw(presences(model, num_tokens)), draw(st.integers(0, num_tokens + 30))


@given(cases())
@example((ModelSpec((ChunkedLocal(2, 4), FullAttention(2))), (set(), {0, 1, 2}), 7))
@example((ModelSpec((SlidingWindow(1, 2), SlidingWindow(1, 2))), ({0, 2, 4}, {1, 3}), 6))
def test_hit_equals_brute_force(case):
    model, present, limit = case
    assert hit_len(model, as_runs(present), limit) == oracle_of(model).hit_len(present, limit)


@given(cases(), st.integers(0, 3), st.integers(0, 96))
def test_losing_a_block_never_lengthens_a_hit(case, group, block):
    model, present, limit = case
    group %= len(present)
    less = tuple(blocks - {block} if index == group else blocks for index, blocks in enumerate(present))
    assert hit_len(model, as_runs(less), limit) <= hit_len(model, as_runs(present), limit)


@given(cases(), st.integers(0, 30))
def test_a_longer_prompt_never_shortens_the_hit_of_its_prefix(case, more):
    model, present, limit = case
    assert hit_len(model, as_runs(present), limit) <= hit_len(model, as_runs(present), limit + more)


@given(models(), st.integers(0, 96))
def test_everything_present_hits_the_last_boundary(model, limit):
    present = tuple(set(range(100)) for _ in model.groups)
    assert hit_len(model, as_runs(present), limit) == oracle_of(model).last_boundary(limit)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_rejected(name):
    """Some presence pattern tells each wrong spec from the right one."""
    model = ModelSpec((WRONG[name](),))
    patterns = [set(range(first, last)) for first in range(10) for last in range(first, 10)]
    oracle = oracle_of(model)
    assert any(hit_len(model, as_runs((blocks,)), 40) != oracle.hit_len((blocks,), 40) for blocks in patterns)


class CountedRuns(tuple):
    """Runs that count how many of them are looked at."""

    looked_at = 0

    def __getitem__(self, index):
        CountedRuns.looked_at += 1
        return super().__getitem__(index)

    def __iter__(self):
        for run in super().__iter__():
            CountedRuns.looked_at += 1
            yield run


@pytest.mark.parametrize("num_blocks", [1_000, 1_000_000])
def test_cost_is_in_runs_not_in_blocks(num_blocks):
    model = ModelSpec((FullAttention(16), SlidingWindow(16, 1024)))
    CountedRuns.looked_at = 0
    full, window = CountedRuns([(0, num_blocks - 3)]), CountedRuns([(0, 5), (70, num_blocks)])
    assert hit_len(model, (full, window), num_blocks * 16) == (num_blocks - 3) * 16
    assert CountedRuns.looked_at < 40


def test_groups_that_disagree_at_every_boundary_cost_one_pass():
    """Two windows that never agree: each run is looked at a few times, not once for every other one."""
    model = ModelSpec((SlidingWindow(16, 16), SlidingWindow(16, 16)))
    blocks = 4_000
    CountedRuns.looked_at = 0
    even = CountedRuns((block, block + 1) for block in range(0, blocks, 2))
    odd = CountedRuns((block, block + 1) for block in range(1, blocks, 2))
    assert hit_len(model, (even, odd), blocks * 16) == 0
    assert CountedRuns.looked_at < 20 * blocks


def test_hits_of_one_writer_are_its_boundaries():
    """A window of 8 tokens over blocks of 4, beside blocks of 8: only every second block is a tail of a hit."""
    model = ModelSpec((FullAttention(8), SlidingWindow(4, 4)))
    tails = {1, 3, 5}
    lengths = [hit_len(model, as_runs(({0, 1, 2}, tails)), limit) for limit in range(30)]
    assert sorted(set(lengths)) == [0, 8, 16, 24]
    assert all(low <= high for low, high in pairwise(lengths))

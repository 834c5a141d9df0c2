"""The pool on runs against the plain pool of blocks: equal in everything visible, after every step of any program."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.pool import BlockPool
from tests.kvcore.block_reference import KINDS, BlockReference, Program, random_program


class RunPool(BlockPool):
    """The pool under test, with its free queue spelled out block by block."""

    def free_queue(self):
        num_anonymous, runs = self.eviction_order()
        blocks = [(stream, index) for stream, start, end in runs for index in reversed(range(start, end))]
        return [None] * num_anonymous + blocks


class HeadFirst(BlockReference):
    """Wrong: evicts a sequence from its head, which makes its tail useless."""

    def release_order(self, blocks):
        return blocks


class NewestCopy(BlockReference):
    """Wrong: of several copies it matches the last one."""

    def pick(self, copies):
        return copies[-1]


class AnonymousLast(BlockReference):
    """Wrong: blocks without identity wait behind cached ones, which are evicted for nothing."""

    def requeue(self, anonymous, cached):
        return self.queue + anonymous + cached


class CachedFirst(BlockReference):
    """Wrong: most recently used goes first."""

    def requeue(self, anonymous, cached):
        return anonymous + cached + self.queue


@st.composite
def sequences(draw):
    bounds = [0, *sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=4)))]
    streams = [draw(st.integers(0, 2)) for _ in bounds[1:]]
    return tuple(zip(streams, bounds, bounds[1:], strict=False))


NUMBERS = st.integers(0, 63)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=40)


@given(st.integers(1, 40), st.lists(sequences(), min_size=1, max_size=4), STEPS)
def test_equals_the_pool_of_blocks(num_blocks, known_sequences, steps):
    Program([RunPool(num_blocks), BlockReference(num_blocks)], known_sequences).run(steps)


def test_equals_the_pool_of_blocks_on_long_programs():
    programs = [random_program(seed, lambda n: [RunPool(n), BlockReference(n)], 300) for seed in range(20)]
    assert sum(program.num_hits for program in programs) > 1000


@pytest.mark.parametrize("wrong", [HeadFirst, NewestCopy, AnonymousLast, CachedFirst])
def test_the_comparison_rejects_a_wrong_pool(wrong):
    with pytest.raises(AssertionError, match="step"):
        for seed in range(20):
            random_program(seed, lambda n: [wrong(n), BlockReference(n)], 100)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(InvalidArgument, match="num_blocks = 0"):
        BlockPool(0)

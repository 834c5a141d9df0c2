"""The pool on runs against the plain pool of blocks: equal in everything visible, after every step of any program."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.lane import Piece
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


def serve(pool, segments, num_partial=0):
    """Hold what is cached, compute the rest, leave num_partial blocks at the end without identity."""
    end = segments[-1][2]
    holding = pool.hold(pool.match(segments, end - 1))
    pool.allocate(holding, end - holding.num_blocks)
    pool.cache(holding, segments, end - num_partial)
    return holding


def test_a_freed_sequence_is_evicted_from_its_tail_after_blocks_without_identity():
    pool = BlockPool(10)
    pool.free(serve(pool, ((1, 0, 4), (2, 4, 7)), num_partial=1))
    assert pool.eviction_order() == (4, [(2, 4, 6), (1, 0, 4)])
    other = pool.hold(pool.match(((3, 0, 5),), 5))
    pool.allocate(other, 5)
    assert pool.eviction_order() == (0, [(2, 4, 5), (1, 0, 4)])
    assert (pool.num_free, pool.num_cached, pool.num_evicted) == (5, 5, 1)


def test_a_match_says_how_much_of_it_is_free_and_changes_nothing():
    pool = BlockPool(10)
    pool.free(serve(pool, ((1, 0, 6),)))
    held = pool.hold(pool.match(((1, 0, 6),), 2))
    match = pool.match(((1, 0, 6), (2, 6, 9)), 8)
    assert (match.num_blocks, match.num_free, pool.num_free) == (6, 4, 8)
    pool.audit([held])


def test_a_pinned_block_is_free_when_its_last_holder_is_gone():
    pool = BlockPool(10)
    request = serve(pool, ((1, 0, 6),))
    reader = pool.pin(request, (2, 4))
    pool.free(request)
    assert pool.eviction_order() == (4, [(1, 4, 6), (1, 0, 2)])
    pool.free(reader)
    assert pool.eviction_order() == (4, [(1, 4, 6), (1, 0, 2), (1, 2, 4)])


def test_a_match_older_than_an_eviction_cannot_be_held():
    pool = BlockPool(4)
    pool.free(serve(pool, ((1, 0, 4),)))
    match = pool.match(((1, 0, 4),), 4)
    serve(pool, ((2, 0, 1),))
    with pytest.raises(AssertionError, match="older than the last eviction"):
        pool.hold(match)


def test_the_audit_misses_neither_a_holding_nor_a_block():
    pool = BlockPool(8)
    holdings = [serve(pool, ((1, 0, 4),), num_partial=1), serve(pool, ((1, 0, 2), (2, 2, 3)))]
    pool.audit(holdings)
    with pytest.raises(AssertionError, match="references"):
        pool.audit(holdings[:1])
    with pytest.raises(AssertionError, match="references"):
        pool.audit([*holdings, holdings[1]])
    holdings[0].end -= 1
    with pytest.raises(AssertionError, match="lost or invented"):
        pool.audit(holdings)


# --- cost: of the runs touched, whatever their length and however long the history ---


def test_a_session_stays_one_run():
    pool = BlockPool(10_000)
    for turn in range(1, 50):
        pool.free(serve(pool, ((1, 0, 100 * turn),)))
        assert pool.eviction_order()[1] == [(1, 0, 100 * turn)]


def test_two_copies_made_chunk_by_chunk_stay_two_runs():
    pool, segments = BlockPool(1_000), ((1, 0, 300),)
    twins = [pool.hold(pool.match(segments, 0)) for _ in range(2)]
    for chunk in range(1, 31):
        for holding in twins:
            pool.allocate(holding, 10)
            pool.cache(holding, segments, 10 * chunk)
    for holding in twins:
        pool.free(holding)
    assert pool.eviction_order() == (400, [(1, 0, 300), (1, 0, 300)])


def test_operations_take_as_long_on_a_billion_times_as_many_blocks():
    def order(scale):
        pool = BlockPool(100 * scale)
        for stream, length in ((1, 40), (2, 30), (1, 20), (3, 35), (2, 25)):
            segments = ((1, 0, 10 * scale), (stream, 10 * scale, length * scale))
            holding = pool.hold(pool.match(segments, length * scale))
            pool.allocate(holding, length * scale - holding.num_blocks)
            pool.cache(holding, segments, length * scale)
            reader = pool.pin(holding, (5 * scale, 15 * scale))
            pool.free(holding)
            pool.free(reader)
        return pool.eviction_order()

    num_anonymous, runs = order(1)
    scale = 10**9
    assert order(scale) == (num_anonymous * scale, [(stream, a * scale, b * scale) for stream, a, b in runs])


def test_nothing_outlives_its_blocks():
    pool = BlockPool(200)
    forever = serve(pool, ((0, 0, 10),))
    for stream in range(1, 2_000):
        pool.free(serve(pool, ((0, 0, 1 + stream % 10), (stream, 1 + stream % 10, 40)), num_partial=stream % 3))
    pool.audit([forever])
    gc.collect()
    alive = [piece for piece in gc.get_objects() if isinstance(piece, Piece)]
    assert len([piece for piece in alive if piece.end > piece.start]) <= 1 + len(pool.eviction_order()[1])


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(InvalidArgument, match="num_blocks = 0"):
        BlockPool(0)

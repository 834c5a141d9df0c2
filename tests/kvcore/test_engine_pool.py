"""The simulated GPU cache answers as mode `engine`: one full-attention group on random contents."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.cached import CachedSequence
from kvcore.engine.hit import hit_len
from kvcore.engine.model import EngineModel
from kvcore.engine.writer import Beginning, Step, Writer
from kvcore.pool import hit_limit
from kvcore.runs import from_blocks, num_blocks, single
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import align_down
from tests.kvcore.block_reference import KINDS, BlockReference, Program, identities, random_program
from tests.kvcore.test_pool import NUMBERS, RunPool, sequences

STEPS = st.lists(st.tuples(st.sampled_from(KINDS), NUMBERS, NUMBERS, NUMBERS), max_size=40)


def engine_of(block_size):
    return EngineModel(ModelSpec((FullAttention(block_size),)))


def engine_hit_len(segments, reference, num_tokens, block_size):
    """The hit of mode `engine` when the cache holds the blocks that the plain pool has copies of."""
    present = from_blocks(
        block for block, identity in enumerate(identities(segments)) if reference.copies.get(identity)
    )
    limit = num_tokens - 1
    return hit_len(engine_of(block_size), (present,), limit, align_down(num_tokens, block_size))


def num_matched(pool, segments, limit_blocks):
    return pool.match(segments, limit_blocks).num_blocks


def hits(program, block_size):
    """(the pool's, the engine's) hit in tokens of every known sequence and of its beginnings."""
    pool, reference = program.pools
    for segments in program.sequences:
        for num_tokens in range(1, len(identities(segments)) * block_size + 1):
            num_blocks = num_matched(pool, segments, hit_limit(num_tokens, block_size))
            yield num_blocks * block_size, engine_hit_len(segments, reference, num_tokens, block_size)


@given(st.integers(1, 40), st.lists(sequences(), min_size=1, max_size=4), STEPS, st.sampled_from((1, 3, 16)))
def test_a_match_is_the_engine_s_hit(num_blocks, known_sequences, steps, block_size):
    program = Program([RunPool(num_blocks), BlockReference(num_blocks)], known_sequences).run(steps)
    for ours, engines in hits(program, block_size):
        assert ours == engines


def long_programs():
    return [random_program(seed, lambda n: [RunPool(n), BlockReference(n)], 120) for seed in range(20)]


def test_a_match_is_the_engine_s_hit_after_long_programs():
    found = [pair for program in long_programs() for pair in hits(program, 4)]
    assert all(ours == engines for ours, engines in found)
    assert sum(engines > 0 for _, engines in found) > 1_000


WRONG = {
    "all tokens may be a hit": lambda num_tokens, block_size: num_tokens // block_size,
    "a block is always left to compute": lambda num_tokens, block_size: max(0, num_tokens // block_size - 1),
    "as long as the sequence": lambda num_tokens, block_size: num_tokens,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_match_with_another_limit_is_not(wrong, monkeypatch):
    monkeypatch.setitem(globals(), "hit_limit", WRONG[wrong])
    assert any(ours != engines for program in long_programs() for ours, engines in hits(program, 4))


def hit_with_gaps(pool, segments, limit_blocks):
    """Wrong: every block counts that is there."""
    return num_blocks(pool.present(segments, limit_blocks))


def test_control_a_match_across_gaps_is_not(monkeypatch):
    monkeypatch.setitem(globals(), "num_matched", hit_with_gaps)
    assert any(ours != engines for program in long_programs() for ours, engines in hits(program, 4))


@given(st.integers(1, 500), st.integers(1, 64))
def test_the_limit_is_that_of_the_model(num_tokens, block_size):
    assert hit_limit(num_tokens, block_size) * block_size == engine_of(block_size).model.limit(num_tokens)


def test_what_is_cached_is_each_full_block_at_once():
    rng = random.Random(7)
    for _ in range(300):
        size, num_tokens = rng.choice((1, 4, 16)), rng.randint(1, 200)
        first = rng.randint(0, (num_tokens - 1) // size) * size
        ends = sorted({num_tokens, *(rng.randint(first, num_tokens) for _ in range(3))})
        sequence = CachedSequence(Writer(engine_of(size)), Beginning(num_tokens, first))
        for start, end in pairwise([first, *ends]):
            sequence.compute(Step(start, end, num_tokens))
            assert sequence.entries[0].blocks == single((first // size, end // size))

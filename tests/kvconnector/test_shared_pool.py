"""In a shared pool each connector stores what the other one's lookup needs (mode `engine` is vLLM's, bug for bug)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector.keys import require_in_tree

from kvcore.engine.hit import pool_hit_len
from kvcore.engine.masks import store_runs
from kvcore.engine.model import EngineModel, Side
from kvcore.errors import InvalidArgument
from kvcore.planner import Planner
from kvcore.runs import intersect
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, SlidingWindow
from kvcore.units import align_down

SIZES = st.sampled_from([2, 4, 8])
FULL = st.builds(FullAttention, SIZES)
WINDOW = st.builds(SlidingWindow, SIZES, st.integers(1, 20))


@st.composite
def models(draw):
    """Those that `require_in_tree` lets through and that are saved by position."""
    groups = tuple(draw(st.lists(st.one_of(FULL, WINDOW), min_size=1, max_size=3)))
    drafts = range(len(groups)) if all(isinstance(group, FullAttention) for group in groups) else ()
    model = ModelSpec(groups, frozenset(draw(st.sets(st.sampled_from(drafts)))) if drafts else frozenset())
    require_in_tree(model)
    return model


def ours(model, num_tokens):
    return Planner(model).store(0, num_tokens, num_tokens)


def theirs(model, num_tokens):
    """It stores whole units of all groups only."""
    aligned_len = align_down(num_tokens, model.alignment)
    blocks = tuple((0, aligned_len // group.block_size) for group in model.groups)
    kept = store_runs(EngineModel(model, Side.POOL), blocks, None, num_tokens)
    return tuple(((run,) if run[1] else ()) if runs is None else runs for runs, run in zip(kept, blocks, strict=True))


def shared(model, blocks, shared_len):
    """Those of the blocks that a request with the same first `shared_len` tokens can hit."""
    ends = [shared_len // group.block_size for group in model.groups]
    return tuple(intersect(runs, ((0, end),) if end else ()) for runs, end in zip(blocks, ends, strict=True))


def hits(model, pool, num_tokens):
    """(ours, theirs) of a request of `num_tokens`."""
    hashed_len = align_down(num_tokens, model.hashed_step)
    engine = EngineModel(model, Side.POOL)
    return Planner(model).hit(0, num_tokens, pool), pool_hit_len(engine, pool, num_tokens, hashed_len)


LENGTHS = st.integers(0, 70)


@given(models(), LENGTHS, LENGTHS, LENGTHS)
def test_a_hit_does_not_depend_on_who_stored(model, stored_len, shared_len, num_tokens):
    shared_len = min(stored_len, shared_len, num_tokens)
    by_us, by_them = (shared(model, store(model, stored_len), shared_len) for store in (ours, theirs))
    assert hits(model, by_us, num_tokens)[0] >= hits(model, by_them, num_tokens)[0]
    assert hits(model, by_us, num_tokens)[1] >= hits(model, by_them, num_tokens)[1]
    assert hits(model, by_them, num_tokens)[0] >= hits(model, by_them, num_tokens)[1]


def ends_with_a_block_of_each(model, pool, hit_len):
    """What vLLM's lookup asserts of a hit, in the thread that answers lookups."""
    last = [hit_len // group.block_size - 1 for group in model.groups]
    return all(intersect(runs, ((block, block + 1),)) for runs, block in zip(pool, last, strict=True))


@given(models(), LENGTHS, LENGTHS)
def test_their_lookup_finds_the_last_block_of_each_hit(model, stored_len, num_tokens):
    pool = shared(model, ours(model, stored_len), min(stored_len, num_tokens))
    _, hit_len = hits(model, pool, num_tokens)
    assert not hit_len or ends_with_a_block_of_each(model, pool, hit_len)


def test_control_of_a_chunk_it_does_not():
    model = ModelSpec((ChunkedLocal(4, 8),))
    with pytest.raises(InvalidArgument):
        require_in_tree(model)
    pool = ours(model, 17)
    _, hit_len = hits(model, pool, 17)
    assert hit_len == 16
    assert not ends_with_a_block_of_each(model, pool, hit_len)


def test_control_a_pool_that_lacks_a_window_s_block_gives_shorter_hits():
    model = ModelSpec((FullAttention(4), SlidingWindow(4, 8)))
    full, window = ours(model, 33)
    assert hits(model, (full, window), 33) == (32, 32)
    assert hits(model, (full, window[:-1]), 33) < (32, 32)


def test_control_retained_tokens_are_not_stored_by_them():
    model = ModelSpec((FullAttention(16), SlidingWindow(4, 5, 4)))
    with pytest.raises(InvalidArgument):
        require_in_tree(model)
    assert hits(model, ours(model, 17), 17)[0] == 16 != hits(model, theirs(model, 17), 17)[0]

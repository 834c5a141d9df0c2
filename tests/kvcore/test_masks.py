"""What is worth asking for and worth keeping, against trying every boundary of the attention mask."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.boundaries import Boundaries, hit_boundaries, replay_boundaries, store_boundaries
from kvcore.errors import InvalidArgument
from kvcore.hit import hit_len
from kvcore.masks import lookup_mask, lookup_runs, store_mask, store_runs
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvcore.attention_oracle import WRONG, as_sets, models, oracle_of

HORIZON = 260
"""No window, chunk or alignment of the random models reaches from here back to the lengths under test (<= 96)."""


@st.composite
def retentions(draw, model):
    return draw(st.sampled_from((None, 0, model.alignment, 2 * model.alignment, 5 * model.alignment)))


@st.composite
def writers(draw):
    """(model, retention, prompt length, lengths at which it plans a store, in ascending order)."""
    model = draw(models())
    num_prompt = draw(st.integers(1, 96))
    lengths = sorted(draw(st.lists(st.integers(0, 96), min_size=2, max_size=4)))
    return model, draw(retentions(model)), num_prompt, lengths


def block_ranges(model, start_len, end_len):
    return tuple((start_len // group.block_size, end_len // group.block_size) for group in model.groups)


def far(retention):
    return HORIZON + 2 * (retention or 0)


# -- boundaries -------------------------------------------------------------------------------------------------------


@given(writers(), st.integers(0, 96), st.integers(0, 96))
def test_boundaries_are_those_the_writer_keeps(writer, low, high):
    model, retention, num_prompt, _ = writer
    boundaries = store_boundaries(model, retention, num_prompt)
    oracle = oracle_of(model)
    kept = [length for length in range(low + 1, high + 1) if oracle.kept(length, retention, num_prompt)]
    assert sorted([*boundaries.regular(low, high), *boundaries.odd(low, high)]) == kept
    assert boundaries.last(low, high) == max(kept, default=0)


@pytest.mark.parametrize("retention", [-16, 8, 24])
def test_a_retention_between_boundaries_is_refused(retention):
    with pytest.raises(InvalidArgument, match="retention_interval"):
        store_boundaries(ModelSpec((FullAttention(16),)), retention, 100)


def test_the_replay_of_a_prompt_computes_a_token():
    model = ModelSpec((FullAttention(16),))
    resumed = [replay_boundaries(model, length) for length in (0, 1, 16, 17, 32, 33)]
    assert resumed == [(0,), (0,), (0,), (16,), (16,), (32,)]
    assert hit_boundaries(model) == Boundaries(16)


def test_a_draft_head_gives_up_one_unit_of_the_same_and_of_a_longer_prompt():
    model = ModelSpec((FullAttention(16),), frozenset({0}))
    resumed = [replay_boundaries(model, length) for length in (0, 16, 17, 32, 33, 48, 49)]
    assert resumed == [(0,), (0,), (0,), (0, 16), (16,), (16, 32), (32,)]


# -- lookup -----------------------------------------------------------------------------------------------------------


@given(models(), st.integers(0, 96), st.integers(0, 96))
def test_lookup_asks_what_some_hit_needs(model, low, high):
    assert as_sets(lookup_runs(model, low, high)) == oracle_of(model).lookup(low, high)


@given(models(), st.integers(0, 96))
def test_lookup_mask_is_the_runs_spelled_out(model, high):
    aligned_len = high - high % model.alignment
    asked = oracle_of(model).lookup(0, aligned_len)
    for group, mask, blocks in zip(model.groups, lookup_mask(model, aligned_len), asked, strict=True):
        num_blocks = aligned_len // group.block_size
        assert spelled_out(mask, num_blocks) == blocks & set(range(num_blocks))


def spelled_out(mask, num_blocks):
    if mask is None:
        return set(range(num_blocks))
    assert len(mask) == num_blocks
    assert not all(mask)
    return {index for index, wanted in enumerate(mask) if wanted}


# -- store ------------------------------------------------------------------------------------------------------------


@given(writers())
def test_store_keeps_what_a_kept_boundary_needs(writer):
    model, retention, num_prompt, (start_len, end_len, *_) = writer
    ranges = block_ranges(model, start_len, end_len)
    kept = store_runs(model, ranges, retention, num_prompt)
    assert as_sets(kept) == oracle_of(model).store(ranges, retention, num_prompt, far(retention))


@given(writers())
def test_storing_in_chunks_keeps_the_same(writer):
    model, retention, num_prompt, lengths = writer
    whole = store_runs(model, block_ranges(model, lengths[0], lengths[-1]), retention, num_prompt)
    parts = [
        as_sets(store_runs(model, block_ranges(model, start, end), retention, num_prompt))
        for start, end in pairwise(lengths)
    ]
    assert [set().union(*groups) for groups in zip(*parts, strict=True)] == list(as_sets(whole))


@given(writers())
def test_a_kept_boundary_can_be_hit(writer):
    """The writer computes to the end; every boundary it keeps is then a hit, if all groups are saved by position."""
    model, retention, num_prompt, (*_, end_len) = writer
    kept = store_runs(model, block_ranges(model, 0, end_len), retention, num_prompt)
    oracle = oracle_of(model)
    for length in range(end_len + 1 - oracle.margin):
        if all(group.by_position for group in oracle.groups) and oracle.kept(length, retention, num_prompt):
            assert hit_len(model, kept, length) == length


@given(writers())
def test_lookup_asks_for_all_that_a_writer_keeps_for_a_hit(writer):
    """S06: nothing is asked for that no writer writes, if all groups are saved by position."""
    model, _, num_prompt, (*_, end_len) = writer
    asked = lookup_runs(model, 0, end_len - max(model.margins))
    kept = as_sets(store_runs(model, block_ranges(model, 0, end_len), None, num_prompt))
    for group, blocks, written in zip(model.groups, as_sets(asked), kept, strict=True):
        assert blocks <= written or not group.positional


@given(writers())
def test_store_mask_is_the_runs_spelled_out(writer):
    model, retention, num_prompt, (start_len, end_len, *_) = writer
    aligned_len = end_len - end_len % model.alignment
    masks = store_mask(model, aligned_len, start_len, retention, num_prompt)
    ranges = tuple(
        (min(-(-start_len // b), aligned_len // b), aligned_len // b) for b in (g.block_size for g in model.groups)
    )
    kept = oracle_of(model).store(ranges, retention, num_prompt, far(retention))
    for mask, (start, end), blocks in zip(masks, ranges, kept, strict=True):
        assert {start + index for index in spelled_out(mask, end - start)} == blocks


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_rejected(name):
    """Block size 4, beside a full group of 16: boundaries leave room between the ranges."""
    model = ModelSpec((FullAttention(16), WRONG[name]()))
    assert as_sets(lookup_runs(model, 0, 64)) != oracle_of(model).lookup(0, 64)
    if model.groups[1].positional:
        ranges = block_ranges(model, 0, 64)
        assert as_sets(store_runs(model, ranges, None, 64)) != oracle_of(model).store(ranges, None, 64, HORIZON)


# -- the engine's published behaviour (vLLM PR 45444) -----------------------------------------------------------------

WINDOW_EXAMPLE = ModelSpec((FullAttention(32), SlidingWindow(8, window=8)))
"""Assumed layout of the pull request's example; its text gives 3 of 12 chunks, six keys in all and a hit of 32.

Blocks of 32 tokens for the full group, of 8 and a window of 8 for the other, a prompt of 96 tokens.
"""


def test_full_attention_is_never_spelled_out():
    assert store_mask(ModelSpec((FullAttention(16),)), 64) == (None,)
    assert store_mask(ModelSpec((FullAttention(16),)), 1 << 40) == (None,)
    assert lookup_mask(ModelSpec((FullAttention(16),)), 1 << 40) == (None,)


def test_nothing_to_store_is_the_sentinel_too():
    assert store_mask(WINDOW_EXAMPLE, 0) == (None, None)
    assert store_mask(WINDOW_EXAMPLE, 64, start_len=64) == (None, None)


def test_a_window_asks_for_the_tail_of_each_boundary():
    full, window = lookup_mask(WINDOW_EXAMPLE, 96)
    assert full is None
    assert window == [index in (3, 7, 11) for index in range(12)]
    assert 96 // 32 + sum(window) == 6


def test_a_sparse_writer_is_found_at_its_own_boundary():
    """It stored 64 tokens with retention 0 and wrote only its replay boundary's tail; the reader asks for all three."""
    written = store_runs(WINDOW_EXAMPLE, block_ranges(WINDOW_EXAMPLE, 0, 64), 0, 64)
    assert written == (((0, 2),), ((3, 4),))
    assert hit_len(WINDOW_EXAMPLE, written, 96) == 32


def test_retention_thins_the_tails_and_keeps_the_replay_boundary():
    def tails(retention, num_prompt):
        full, window = store_mask(WINDOW_EXAMPLE, 128, 0, retention, num_prompt)
        assert full is None
        return [index for index, kept in enumerate(window) if kept]

    assert tails(None, None) == [3, 7, 11, 15]
    assert tails(64, None) == [7, 15]
    assert tails(0, None) == []
    assert tails(0, 100) == [11]
    assert tails(64, 100) == [7, 11, 15]


def test_a_window_as_wide_as_the_alignment_is_all_true():
    model = ModelSpec((FullAttention(256), SlidingWindow(64, 512), SlidingWindow(64, 128)))
    assert store_mask(model, 512) == (None, None, [False, False, True, True] * 2)


def test_a_recurrent_state_is_never_stored_by_position():
    model = ModelSpec((FullAttention(16), Recurrent(16)))
    assert store_mask(model, 64) == (None, [False] * 4)
    assert lookup_mask(model, 64) == (None, None)


def test_a_chunk_is_kept_up_to_its_last_boundary():
    """At its end the next chunk begins, and nothing of this one is needed."""
    model = ModelSpec((ChunkedLocal(8, chunk=32),))
    assert store_mask(model, 64) == ([True, True, True, False] * 2,)

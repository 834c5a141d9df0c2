"""Mode `engine` without an engine: its shape, its errors and its cost. What it answers is in tests/differential."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.hit import hit_len
from kvcore.engine.masks import cached_len, load_mask, store_mask
from kvcore.engine.model import VLLM_0_33, EngineModel, Side, flagged_or_all, hits_end_inside_blocks
from kvcore.errors import InvalidArgument
from kvcore.spec import FullAttention, GroupSpec, ModelSpec, Recurrent, Scratch, SlidingWindow
from tests.kvcore.attention_oracle import as_runs, models, presences

HYBRID = ModelSpec((SlidingWindow(4, 9), FullAttention(8), SlidingWindow(4, 9), Scratch(2)), frozenset({2}))


def test_groups_of_one_spec_are_one_full_attention_first_scratch_nowhere():
    merged = EngineModel(HYBRID).merged
    assert [(group.groups, group.drafts) for group in merged] == [((1,), False), ((0, 2), True)]
    assert EngineModel(HYBRID).eagle_groups == {0, 2}


def test_windows_that_cover_the_same_are_one_in_the_pool_since_0_33():
    model = ModelSpec((SlidingWindow(4, 9), SlidingWindow(4, 5, 4)))
    assert [group.groups for group in EngineModel(model, Side.POOL, VLLM_0_33).merged] == [(0, 1)]
    assert len(EngineModel(model, Side.POOL).merged) == len(EngineModel(model, Side.GPU, VLLM_0_33).merged) == 2


def test_all_groups_are_marked_when_none_is_flagged():
    assert flagged_or_all(frozenset(), 3) == {0, 1, 2}
    assert flagged_or_all(frozenset({1}), 3) == {1}


@pytest.mark.parametrize(
    ("groups", "ranks", "inside"),
    [
        ((FullAttention(8), Recurrent(8)), 1, True),
        ((FullAttention(8), Recurrent(4)), 1, False),
        ((FullAttention(8), Recurrent(4)), 2, True),
        ((FullAttention(8), SlidingWindow(8, 9), Recurrent(8)), 1, False),
        ((FullAttention(8), SlidingWindow(4, 9), Recurrent(8)), 1, True),
        ((FullAttention(8), Scratch(6), Recurrent(8)), 1, True),
        ((FullAttention(8),), 1, False),
    ],
)
def test_hits_end_inside_blocks_of_states_longer_than_a_unit_of_4(groups, ranks, inside):
    assert hits_end_inside_blocks(groups, 4, ranks) is inside


@given(models(), st.integers(0, 96), st.data())
def test_a_hit_is_a_boundary_within_the_limit(model, num_tokens, data):
    present = as_runs(data.draw(presences(model, num_tokens)))
    try:
        engine = EngineModel(model)
    except InvalidArgument as refused:
        assert "vLLM refuses" in str(refused)
        return
    limit = max(0, num_tokens - 1)
    length = hit_len(engine, present, limit, num_tokens)
    assert 0 <= length <= limit
    assert length % model.alignment == 0
    assert [len(mask) for mask in load_mask(engine, length)] == [length // group.block_size for group in model.groups]


def test_several_groups_enter_whole_units_and_a_draft_group_its_next_block():
    engine = EngineModel(HYBRID)
    assert [cached_len(engine, group, 23) for group in range(4)] == [20, 16, 20, 16]
    assert [cached_len(engine, group, 18) for group in range(4)] == [18, 16, 18, 16]
    assert cached_len(EngineModel(ModelSpec((FullAttention(8),))), 0, 23) == 23


@dataclass(frozen=True, slots=True)
class Striped(GroupSpec):
    def needed_blocks(self, prefix_len):
        return (0, 0)


def test_an_attention_type_that_vllm_does_not_know_is_refused():
    with pytest.raises(InvalidArgument, match="no manager"):
        EngineModel(ModelSpec((Striped(4),)))


def test_a_limit_beyond_the_last_hash_a_length_inside_a_block_and_a_retention_off_the_grid_are_refused():
    engine = EngineModel(ModelSpec((FullAttention(4),)))
    with pytest.raises(InvalidArgument, match="no hash beyond"):
        hit_len(engine, ((),), 8, 4)
    with pytest.raises(InvalidArgument, match="hit_len"):
        load_mask(engine, 6)
    for retention in (-4, 6):
        with pytest.raises(InvalidArgument, match="retention"):
            store_mask(engine, 8, 0, retention)


class CountedRuns(tuple):
    """Runs that count how many of them are looked at."""

    looks = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        CountedRuns.looks += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("num_blocks", [1_000, 1_000_000])
def test_the_work_is_in_runs_not_in_blocks(num_blocks):
    engine = EngineModel(ModelSpec((FullAttention(16), SlidingWindow(16, 1_024), Recurrent(16)), frozenset({1})))
    CountedRuns.looks = 0
    present = tuple(CountedRuns(((0, num_blocks),)) for _ in range(3))
    assert hit_len(engine, present, num_blocks * 16 - 1, num_blocks * 16) == (num_blocks - 1) * 16
    assert 0 < CountedRuns.looks < 40

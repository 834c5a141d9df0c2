"""What a sequence enters into the engine's cache, by example. Against vLLM: tests/differential/test_cached_vllm.py."""

import pytest

from kvcore.engine.cached import CachedSequence
from kvcore.engine.hit import Found, find
from kvcore.engine.model import EngineModel, Side
from kvcore.engine.writer import Beginning, Entries, Step, Writer
from kvcore.errors import InvalidArgument
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow

Full, Window, State = FullAttention, SlidingWindow, Recurrent


def entered(model, num_prompt_tokens, ends, junction=None, hit_len=0, loaded_len=0, **settings):
    """Per group, what chunks that end there enter: first known tokens, then one known token a step."""
    sequence = CachedSequence(
        Writer(EngineModel(model), **settings), Beginning(num_prompt_tokens, hit_len, loaded_len, junction)
    )
    start = hit_len + loaded_len
    for end in ends:
        sequence.compute(Step(start, end, max(num_prompt_tokens, end)))
        start = end
    return sequence.entries


def test_one_group_enters_each_full_block_several_wait_for_a_whole_unit():
    assert entered(ModelSpec((Full(4),)), 30, [11]) == (Entries(((0, 2),)),)
    assert entered(ModelSpec((Full(4), Full(8))), 30, [14])[0] == Entries(((0, 2),))
    assert entered(ModelSpec((Full(4), Full(8))), 30, [14, 16])[0] == Entries(((0, 4),))


def test_a_draft_group_enters_the_next_block_too_less_what_is_computed_again():
    model = ModelSpec((Full(4), Full(16)), frozenset({0}))
    assert entered(model, 40, [21])[0] == Entries(((0, 5),))
    assert entered(model, 40, [21], num_reprefilled=2)[0] == Entries(((0, 4),))


def test_a_window_keeps_what_a_hit_at_a_boundary_reads():
    model = ModelSpec((Full(16), Window(4, 5)))
    assert entered(model, 48, [48])[1] == Entries(((3, 4), (7, 8), (11, 12)))
    assert entered(model, 48, [48], retention=32)[1] == Entries(((7, 8),))
    assert entered(model, 41, [41], retention=0)[1] == Entries(((7, 8),))
    assert entered(model, 49, [49], retention=0, junction=16)[1] == Entries(((3, 4), (11, 12)))


def test_what_a_window_gave_up_before_its_unit_was_whole_is_not_entered():
    """A window of 12 in a draft group has no mask here. At token 15 it reads nothing of block 0."""
    model = ModelSpec((Full(16), Window(4, 12)), frozenset({1}))
    assert entered(model, 40, [20])[1] == Entries(((0, 5),))
    assert entered(model, 40, [15, 20])[1] == Entries(((1, 5),))
    retaining = ModelSpec((Full(16), Window(4, 12, extra_retained_tokens=4)), frozenset({1}))
    assert entered(retaining, 40, [15, 20])[1] == Entries(((0, 5),))


def test_what_is_in_flight_is_not_given_up():
    model = ModelSpec((Full(16), Window(4, 12)), frozenset({1}))
    sequence = CachedSequence(Writer(EngineModel(model)), Beginning(40))
    for step in (Step(0, 15, 40), Step(15, 20, 40, num_in_flight=15)):
        sequence.compute(step)
    assert sequence.entries[1] == Entries(((0, 5),))


def test_drafts_are_entered_when_they_are_known():
    sequence = CachedSequence(Writer(EngineModel(ModelSpec((Full(4),)))), Beginning(7))
    sequence.compute(Step(0, 7, 7))
    sequence.compute(Step(7, 11, 8))
    assert sequence.entries == (Entries(((0, 2),)),)


def test_a_chunked_group_enters_all_it_holds():
    assert entered(ModelSpec((Full(4), ChunkedLocal(4, 8))), 20, [7, 19])[1] == Entries(((0, 4),))


def test_a_loaded_prefix_is_entered_a_hit_is_there_already():
    assert entered(ModelSpec((Full(4),)), 20, [18], hit_len=8, loaded_len=4) == (Entries(((2, 4),)),)


SPLIT = ModelSpec((Full(8), State(8)), hash_unit=2, hit_unit=2)


def test_the_prompt_s_last_hash_is_a_tail_of_full_attention_and_a_state():
    """A prompt of 13 tokens: a resend can find 12. The state stays in a copy when the sequence goes on."""
    assert entered(SPLIT, 13, [8, 12]) == (Entries(((0, 1),), (12,)), Entries(((0, 1),), (12,)))
    assert entered(SPLIT, 13, [8, 12, 13, 16]) == (Entries(((0, 2),), (12,)), Entries(((0, 2),), (12,)))


def test_with_a_draft_head_its_state_lies_one_hash_lower():
    model = ModelSpec((Full(8), State(8)), frozenset({0}), hash_unit=2, hit_unit=2)
    assert entered(model, 14, [8, 12, 14]) == (Entries(((0, 1),), (14,)), Entries(((0, 1),), (12,)))


def test_a_state_is_entered_where_a_chunk_ends_only():
    assert entered(SPLIT, 21, [8, 16])[1] == Entries(((0, 2),))
    assert entered(SPLIT, 21, [16])[1] == Entries(((1, 2),))


def test_a_checkpoint_takes_the_key_of_the_block_it_lies_in():
    """The last chunk of 13 tokens saves the state after 12 in block 0, whose own state was not made."""
    assert entered(SPLIT, 13, [13], checkpoint_step=4)[1] == Entries((), (12,))
    assert entered(SPLIT, 13, [13], checkpoint_step=8)[1] == Entries()


def test_a_checkpoint_that_no_resend_looks_for_has_no_key():
    """Chunks may save states inside them under dense retention; that one of 14 tokens is neither here nor there."""
    assert entered(SPLIT, 31, [15], checkpoint_step=2)[1] == Entries()
    assert entered(SPLIT, 31, [17], checkpoint_step=2)[1] == Entries(((1, 2),))
    assert entered(SPLIT, 31, [15], checkpoint_step=2, junction=14)[1] == Entries((), (14,))


def test_a_state_at_a_junction_inside_a_block_is_entered_where_the_engine_stops_there():
    model = ModelSpec((Full(8), State(8)), frozenset({0}), hash_unit=2, hit_unit=2)
    assert entered(model, 31, [8, 12], junction=12)[1] == Entries(((0, 1),))
    assert entered(model, 31, [8, 12], junction=12, stops_at_junctions=True)[1] == Entries(((0, 1),), (12,))


def test_the_next_sequence_finds_it():
    full, state = entered(SPLIT, 13, [8, 12, 13, 16])
    present, tails = (full.blocks, state.blocks), (full.tails, state.tails)
    assert find(EngineModel(SPLIT), present, 12, 12, tails) == Found(12, None)
    assert find(EngineModel(SPLIT), present, 19, 18, tails) == Found(16, None)
    assert find(EngineModel(SPLIT), (full.blocks, ()), 19, 18, (full.tails, ())) == Found(0, 16)


def test_a_million_tokens_are_a_few_runs():
    model = ModelSpec((Full(16), Window(16, 1_024), State(16)))
    assert entered(model, 1_000_001, [1_000_000, 1_000_001])[0] == Entries(((0, 62_500),))


def test_the_pool_s_side_and_settings_that_vllm_gets_wrong_are_refused():
    with pytest.raises(InvalidArgument, match="own cache"):
        Writer(EngineModel(SPLIT, Side.POOL))
    with pytest.raises(InvalidArgument, match="retention"):
        Writer(EngineModel(SPLIT), retention=3)
    with pytest.raises(InvalidArgument, match="checkpoint_step"):
        Writer(EngineModel(SPLIT), checkpoint_step=0)
    drafting = ModelSpec((Full(8), State(8)), frozenset({0, 1}), hash_unit=2, hit_unit=2)
    with pytest.raises(InvalidArgument, match="another one's length"):
        Writer(EngineModel(drafting), num_reprefilled=1)

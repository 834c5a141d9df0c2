"""`needed_blocks` of every attention type against the attention mask, at every length."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.runs import normalize
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, Scratch, SlidingWindow, sharded
from tests.kvcore.attention_oracle import FAR, WRONG, FullWithoutTail, Group, attention_of, specs

LENGTHS = range(80)


def group_of(spec):
    return Group(attention_of(spec), spec.block_size)


def broken_promises(spec):
    """What a spec says of itself and does not keep: the contract suite of an attention type."""
    group = group_of(spec)
    ranges = [spec.needed_blocks(length) for length in LENGTHS]
    found = [f"blocks at {length}" for length in LENGTHS if set(range(*ranges[length])) != group.needed(length)]
    if any(low > high for shorter, longer in pairwise(ranges) for low, high in zip(shorter, longer, strict=True)):
        found.append("monotone")
    if spec.prefix_closed and not group.reads_everything:
        found.append("prefix_closed")
    free = {length for length in LENGTHS if length % spec.block_size == 0 and not group.needed(length)}
    if free != set(range(0, len(LENGTHS), spec.free_step or FAR)):
        found.append("free_step")
    return found


@given(specs())
def test_every_spec_needs_what_its_mask_reads(spec):
    assert broken_promises(spec) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_rejected(name):
    assert any("blocks at" in promise for promise in broken_promises(WRONG[name]()))
    assert broken_promises(FullWithoutTail(4))


@given(specs(), st.integers(0, 60), st.integers(0, 40))
def test_no_later_token_reads_more_of_the_past(spec, prefix_len, distance):
    """Why one token decides: the mask of the next token covers that of all after it."""
    group = group_of(spec)
    past = {token for token in group.attention.reads(prefix_len + distance) if token < prefix_len}
    assert past <= set(group.attention.reads(prefix_len))


@pytest.mark.parametrize(
    ("spec", "prefix_len", "needed"),
    [
        (FullAttention(16), 48, (0, 3)),
        (FullAttention(16), 49, (0, 4)),
        (SlidingWindow(16, 17), 48, (2, 3)),
        (SlidingWindow(16, 18), 48, (1, 3)),
        (SlidingWindow(16, 1), 48, (3, 3)),
        (SlidingWindow(16, 17, extra_retained_tokens=1), 48, (1, 3)),
        (ChunkedLocal(16, 64), 48, (0, 3)),
        (ChunkedLocal(16, 64), 64, (4, 4)),
        (ChunkedLocal(16, 64), 65, (4, 5)),
        (Recurrent(16), 48, (2, 3)),
        (Recurrent(16), 0, (0, 0)),
    ],
)
def test_examples(spec, prefix_len, needed):
    assert spec.needed_blocks(prefix_len) == needed


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: FullAttention(0), "block_size"),
        (lambda: Recurrent(-1), "block_size"),
        (lambda: SlidingWindow(16, 0), "window"),
        (lambda: SlidingWindow(16, 4, extra_retained_tokens=-1), "extra_retained_tokens"),
        (lambda: ChunkedLocal(16, 0), "chunk"),
        (lambda: ModelSpec(()), "groups"),
        (lambda: ModelSpec((Scratch(16),)), "groups"),
        (lambda: ModelSpec((FullAttention(16),), eagle_groups=frozenset({1})), "eagle_groups"),
        (lambda: ModelSpec((FullAttention(16), FullAttention(24)), hash_unit=16), "hash_unit"),
        (lambda: ModelSpec((FullAttention(16), FullAttention(32)), hash_unit=0), "hash_unit"),
        (lambda: ModelSpec((FullAttention(16), Recurrent(64)), hit_unit=32), "hit_unit"),
        (lambda: ModelSpec((SlidingWindow(64, 9), Recurrent(64)), hash_unit=16, hit_unit=16), "hit_unit"),
        (lambda: sharded(FullAttention(16), 0), "num_context_ranks"),
    ],
)
def test_impossible_values_are_named(make, argument):
    with pytest.raises(InvalidArgument, match=argument):
        make()


def test_context_parallelism_deals_a_block_out_over_the_ranks():
    assert sharded(FullAttention(16), 4) == FullAttention(64)


def test_one_draft_group_marks_all_of_its_spec_and_no_recurrent_one():
    groups = (FullAttention(256), SlidingWindow(64, 128), SlidingWindow(64, 128), SlidingWindow(64, 8), Recurrent(64))
    model = ModelSpec(groups, eagle_groups=frozenset({2, 4}))
    assert model.margins == (0, 64, 64, 0, 0)
    assert [model.proof_blocks(group, 512) for group in range(5)] == [(0, 2), (6, 9), (6, 9), (7, 8), (7, 8)]


def test_a_draft_group_marks_no_group_of_another_layout():
    groups = (FullAttention(16), FullAttention(16, layout="latent"), FullAttention(16, layout="latent"))
    assert ModelSpec(groups, eagle_groups=frozenset({1})).margins == (0, 16, 16)


@given(st.data())
def test_what_many_lengths_need_of_a_window_is_what_each_of_them_needs(data):
    """In one run, in many, or from the formula for whole blocks."""
    size, step = data.draw(st.sampled_from([1, 2, 4, 16])), data.draw(st.sampled_from([1, 3, 4, 16, 64]))
    spec = SlidingWindow(size, data.draw(st.integers(1, 70)), data.draw(st.sampled_from([0, 0, 1, 5])))
    first = step * data.draw(st.integers(1, 5))
    lengths = range(first, first + step * data.draw(st.integers(0, 8)), step)
    margin = data.draw(st.sampled_from([0, size, 1]))
    ends = [-(-(length + margin) // size) for length in lengths]
    expected = normalize((spec.needed_blocks(length)[0], end) for length, end in zip(lengths, ends, strict=True))
    assert spec.needed_runs(lengths, margin) == expected


def test_scratch_is_needed_nowhere():
    assert Scratch(4).needed_runs(range(4, 40, 4), 0) == ()


def test_a_hit_leaves_a_token_to_compute_and_room_for_its_proof():
    plain, draft = (ModelSpec((FullAttention(4),), eagle_groups=frozenset(marked)) for marked in ((), (0,)))
    assert [plain.limit(length) for length in (0, 1, 4, 5, 8, 12, 13)] == [0, 0, 0, 4, 4, 8, 12]
    assert [draft.limit(length) for length in (0, 1, 4, 5, 8, 12, 13)] == [0, 0, 0, 0, 4, 8, 8]


def test_hits_are_aligned_to_every_group():
    assert ModelSpec((FullAttention(4), SlidingWindow(6, 9))).alignment == 12

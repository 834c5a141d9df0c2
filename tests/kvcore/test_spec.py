"""`needed_blocks` of every attention type against the attention mask, at every length."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
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
        (lambda: ChunkedLocal(16, 24), "chunk"),
        (lambda: ModelSpec(()), "groups"),
    ],
)
def test_impossible_values_are_named(make, argument):
    with pytest.raises(InvalidArgument, match=argument):
        make()


def test_hits_are_aligned_to_every_group():
    assert ModelSpec((FullAttention(4), SlidingWindow(6, 9))).alignment == 12

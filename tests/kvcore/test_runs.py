"""Runs against plain sets of block indices."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import runs
from tests.kvcore.attention_oracle import as_blocks

BLOCKS = st.sets(st.integers(0, 40))
ANY_RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)
OPERATIONS = {"union": set.union, "intersect": set.intersection, "subtract": set.difference}


def is_canonical(value):
    """Sorted, disjoint, non-empty and non-adjacent."""
    return all(a < b for a, b in value) and all(end < start for (_, end), (start, _) in pairwise(value))


@given(ANY_RUNS)
def test_normalize_keeps_the_blocks(some):
    value = runs.normalize(some)
    assert is_canonical(value)
    assert as_blocks(value) == {block for start, end in some for block in range(start, end)}
    assert runs.normalize(reversed(value)) == value


@given(BLOCKS)
def test_runs_hold_exactly_their_blocks(blocks):
    value = runs.from_blocks(blocks)
    assert is_canonical(value)
    assert as_blocks(value) == blocks
    assert runs.num_blocks(value) == len(blocks)


@pytest.mark.parametrize("name", OPERATIONS)
@given(left=BLOCKS, right=BLOCKS)
def test_algebra_equals_that_of_sets(name, left, right):
    value = getattr(runs, name)(runs.from_blocks(left), runs.from_blocks(right))
    assert is_canonical(value)
    assert as_blocks(value) == OPERATIONS[name](left, right)


def test_touching_runs_become_one():
    assert runs.normalize([(4, 6), (0, 2), (2, 4), (9, 9), (8, 7)]) == ((0, 6),)
    assert not is_canonical(((0, 2), (2, 4)))
    assert not is_canonical(((3, 3),))


@given(st.sets(st.integers(0, 40), max_size=12), st.integers(0, 40), st.integers(1, 10))
def test_overlap_finds_the_parts_that_hold_a_block_of_a_range(cuts, start, size):
    """Parts that touch or leave gaps, with something behind their range."""
    parts = [(left, right, "what") for left, right in pairwise(sorted(cuts)) if left % 3]
    first, last = runs.overlap(parts, start, start + size)
    assert parts[first:last] == [part for part in parts if part[0] < start + size and start < part[1]]
    assert runs.overlap([], start, start + size) == (0, 0)

"""Places of runs on rings of segments, against one place for each block."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.runs import normalize
from kvcore.types import GroupId, StreamId
from kvsim.pool.places import Place, Places, phase
from kvsim.pool.sources import View, read_from

LINEAGE = GroupId(0), StreamId(7)


@st.composite
def a_place(draw):
    ring = tuple(draw(st.permutations(range(draw(st.integers(1, 6))))))
    start = draw(st.integers(0, 20))
    end = start + draw(st.integers(1, 20))
    return Place(start, end, ring, draw(st.integers(1, len(ring))))


def holders(place, block, at):
    """The definition: the segments of the block's copies."""
    return [place.ring[(block + at + j) % len(place.ring)] for j in range(place.copies)]


@given(a_place(), st.integers(0, 1 << 64))
def test_counts_are_those_of_single_blocks(place, at):
    first = Counter(holders(place, block, at)[0] for block in range(place.start, place.end))
    assert dict(zip(place.ring, place.counts(at), strict=True)) == {segment: first[segment] for segment in place.ring}


@given(a_place(), st.integers(0, 1 << 64), st.sets(st.integers(0, 5)))
@example(Place(3, 10, (0, 1, 2), 2), 1, {1, 2})
def test_what_is_lost_are_the_blocks_without_a_copy_elsewhere(place, at, gone):
    lost = [block for block in range(place.start, place.end) if gone.issuperset(holders(place, block, at))]
    assert place.without(gone, at) == normalize((block, block + 1) for block in lost)


@given(a_place(), st.integers(0, 1 << 64), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_a_read_takes_the_readers_own_copy_or_the_first_that_is_there(place, at, own, gone):
    expected = Counter()
    for block in range(place.start, place.end):
        there = [segment for segment in holders(place, block, at) if segment not in gone]
        near = [segment for segment in there if segment in own]
        if there:
            expected[(near or there)[0]] += 1
    assert read_from(place, at, View(own, gone)) == expected


@given(st.lists(st.tuples(a_place(), st.booleans()), max_size=12))
def test_places_are_a_map_of_blocks(changes):
    places, expected = Places(), {}
    for place, is_added in changes:
        places.cut(LINEAGE, place.start, place.end)
        for block in range(place.start, place.end):
            expected.pop(block, None)
            if is_added:
                expected[block] = place[2:]
        if is_added:
            places.add(LINEAGE, place)
        places.audit()
        found = {
            block: held[2:] for held in places.overlapping(LINEAGE, 0, 50) for block in range(held.start, held.end)
        }
        assert found == expected


def test_lineages_begin_anywhere_on_a_ring():
    counts = Counter(phase((GroupId(group), StreamId(stream))) % 7 for group in range(2) for stream in range(7_000))
    expected = 14_000 / 7
    chi2 = sum((counts[i] - expected) ** 2 / expected for i in range(7))
    assert chi2 < 22.5, "the 99.9th percentile with 6 degrees of freedom"
    steps = Counter((phase((GroupId(0), StreamId(s + 1))) - phase((GroupId(0), StreamId(s)))) % 7 for s in range(7_000))
    assert sum((steps[i] - 1_000) ** 2 / 1_000 for i in range(7)) < 22.5, "one lineage does not tell the next"


def test_the_check_of_beginnings_rejects_streams_in_turn():
    counts = Counter((stream + 1 - stream) % 7 for stream in range(7_000))
    with pytest.raises(AssertionError):
        assert sum((counts[i] - 1_000) ** 2 / 1_000 for i in range(7)) < 22.5

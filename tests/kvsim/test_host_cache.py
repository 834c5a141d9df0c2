"""The private cache against one that keeps single blocks in an ordered dictionary."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import runs as runs_of
from kvcore.types import GroupId
from kvsim.pool.extents import pieces
from kvsim.pool.host_cache import HostCache
from tests.kvsim.test_store import SEQUENCES

SIZE = 3


class BlockCache:
    """Least recently used, block for block; of one use the deepest block is the oldest, unless it is `shallow`."""

    def __init__(self, capacity_blocks, shallow=False):
        self.capacity_blocks, self.shallow = capacity_blocks, shallow
        self.blocks = OrderedDict()  # oldest first

    def use(self, names):
        held = [name for name in names if name in self.blocks]
        for name in held if self.shallow else reversed(held):
            self.blocks.move_to_end(name)
        return held

    def put(self, names):
        used = set(self.use(names))
        for name in names:
            victim = next(iter(self.blocks), None)
            if name not in self.blocks and len(self.blocks) == self.capacity_blocks and victim not in used:
                del self.blocks[victim]
            if name in self.blocks or len(self.blocks) < self.capacity_blocks:
                self.blocks[name] = None
                used.add(name)
        self.use(names)


def names(segments, runs):
    """What each block of the runs holds."""
    parts = pieces(GroupId(0), segments, runs)
    return [(lineage[1], block) for lineage, start, end in parts for block in range(start, end)]


def contents(cache):
    return {(lineage[1], block) for lineage, extent in cache._extents for block in range(*extent[:2])}


@st.composite
def calls(draw):
    segments = draw(st.sampled_from(SEQUENCES))
    blocks = draw(st.sets(st.integers(0, segments[-1][2] - 1)))
    runs = draw(st.sampled_from([((0, segments[-1][2]),), runs_of.from_blocks(blocks)]))
    return draw(st.sampled_from(["exists", "get", "put", "put"])), segments, runs


def first_difference(script, capacity_blocks, **wrong):
    """Index of the call after which the two hold different blocks, or None."""
    ours, theirs = HostCache(capacity_blocks * SIZE, (SIZE,)), BlockCache(capacity_blocks, **wrong)
    for index, (name, segments, runs) in enumerate(script):
        if name == "put":
            ours.put((segments,), (runs,))
            theirs.put(names(segments, runs))
        else:
            (found,) = getattr(ours, name)((segments,), (runs,))
            assert set(names(segments, found)) == set(theirs.use(names(segments, runs)))
        ours.audit()
        if contents(ours) != set(theirs.blocks):
            return index
    return None


SCRIPTS = st.lists(calls(), max_size=25)


@given(SCRIPTS, st.integers(1, 20))
def test_it_keeps_the_blocks_that_single_blocks_would_be_kept(script, capacity_blocks):
    assert first_difference(script, capacity_blocks) is None


KEEPS_THE_HEAD = [("put", SEQUENCES[0], ((0, 8),)), ("put", SEQUENCES[3], ((0, 6),))]


def test_the_oracle_rejects_a_cache_that_keeps_the_tail():
    assert first_difference(KEEPS_THE_HEAD, 10) is None
    assert first_difference(KEEPS_THE_HEAD, 10, shallow=True) == 1


@given(st.lists(st.tuples(calls(), calls()), max_size=20), st.integers(0, 60))
def test_groups_share_the_bytes(script, capacity_bytes):
    cache = HostCache(capacity_bytes, (3, 2))
    for (name, segments, runs), (_, _, others) in script:
        blocks = (runs, runs_of.intersect(others, ((0, segments[-1][2]),)))
        names = (segments, segments)
        held = cache.holds(names, blocks)
        found = getattr(cache, name)(names, blocks)
        assert found in (None, held)
        cache.audit()


def test_looking_is_no_use():
    cache = HostCache(4, (1,))
    first, second = SEQUENCES[3], SEQUENCES[4]
    cache.put((first,), (((0, 2),),))
    cache.put((second,), (((0, 2),),))
    assert cache.holds((first,), (((0, 2),),)) == (((0, 2),),)
    cache.put((second,), (((2, 4),),))
    assert cache.holds((first,), (((0, 2),),)) == ((),), "it was the older one all the same"


def test_audit_notices_a_lost_block():
    cache = HostCache(4, (1,))
    cache.put((SEQUENCES[0],), (((0, 3),),))
    cache.counters.put -= 1
    with pytest.raises(AssertionError):
        cache.audit()

"""The pool on runs equals the pool on single blocks, and keeps Mooncake's promises."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore import runs as runs_of
from kvcore.types import GroupId, StreamId
from kvsim.pool.store import MooncakePool

G = GroupId(0)
SECOND = 1_000_000_000


def pool(capacity_blocks=100, ttl_ns=10 * SECOND, watermark=0.9, ratio=0.05):
    return MooncakePool(capacity_blocks, (1,), ttl_ns, watermark, ratio)


def sequence(*cuts):
    """Segments of a sequence from (stream, end) pairs."""
    start, segments = 0, []
    for stream, end in cuts:
        segments.append((StreamId(stream), start, end))
        start = end
    return tuple(segments)


# --- what Mooncake promises ---


def test_put_is_visible_and_shared_by_name():
    store = pool()
    assert store.put(G, sequence((1, 10)), ((0, 10),), 0) == ()
    # The second sequence shares blocks 0..5 and leaves the first one's content there.
    assert store.exists(G, sequence((1, 6), (2, 12)), ((0, 12),), 1) == ((0, 6),)
    assert store.exists(GroupId(1), sequence((1, 10)), ((0, 10),), 1) == ()
    assert (store.num_objects, store.used_bytes, store.counters.found) == (10, 10, 6)


def test_lease_protects_until_it_expires():
    store = pool(capacity_blocks=10, ttl_ns=10, watermark=1.0)
    store.put(G, sequence((1, 10)), ((0, 10),), 0)
    assert store.exists(G, sequence((1, 10)), ((0, 10),), 5) == ((0, 10),)
    assert store.put(G, sequence((2, 4)), ((0, 4),), 14) == ((0, 4),), "leased until 15"
    assert store.put(G, sequence((2, 4)), ((0, 4),), 15) == ()
    assert store.get(G, sequence((1, 10)), ((0, 10),), 16) == ((0, 6),), "tail evicted first"
    assert (store.counters.rejected, store.counters.late, store.counters.evicted) == (4, 4, 4)
    store.audit()


def test_eviction_starts_above_the_watermark_only():
    store = pool(capacity_blocks=100, watermark=0.9, ratio=0.05)
    store.put(G, sequence((1, 90)), ((0, 90),), 0)
    assert store.counters.evictions == 0
    store.put(G, sequence((2, 1)), ((0, 1),), 1)
    # 91 objects, used 0.91: max(0.05, 0.91 - 0.9 + 0.05) of 91 = 5.46, six of them, the oldest lease first.
    assert store.counters.evicted == 6
    assert store.exists(G, sequence((1, 90)), ((0, 90),), 2) == ((0, 84),)
    assert store.exists(G, sequence((2, 1)), ((0, 1),), 2) == ((0, 1),)


def test_eviction_follows_the_lease_not_the_last_use():
    store = pool(capacity_blocks=20, ttl_ns=100, watermark=1.0, ratio=0.05)
    store.put(G, sequence((1, 10)), ((0, 10),), 0)
    store.exists(G, sequence((1, 10)), ((0, 10),), 10)  # leased until 110
    store.put(G, sequence((2, 10)), ((0, 10),), 50)  # used later, its lease ended at 50
    store.put(G, sequence((3, 5)), ((0, 5),), 200)
    assert store.exists(G, sequence((1, 10)), ((0, 10),), 201) == ((0, 10),)
    assert store.exists(G, sequence((2, 10)), ((0, 10),), 201) == ((0, 5),)


def test_rests_at_its_watermark_even_when_the_rest_is_leased():
    store = pool(capacity_blocks=10, ttl_ns=100, watermark=0.9, ratio=0.1)
    store.put(G, sequence((1, 9)), ((0, 9),), 0)
    store.exists(G, sequence((1, 9)), ((0, 9),), 1)
    assert store.put(G, sequence((2, 1)), ((0, 1),), 2) == (), "there was space"
    assert store.exists(G, sequence((2, 1)), ((0, 1),), 3) == (), "but only the new object could go"
    assert store.num_objects == 9


def test_evicts_again_until_the_watermark_is_reached():
    store = pool(capacity_blocks=1000, watermark=0.5, ratio=0.01)
    store.put(G, sequence((1, 900)), ((0, 900),), 0)
    # One pass takes 0.41 of 900 objects and leaves 531.
    assert store.counters.evictions > 1 and store.num_objects <= 500


def test_remove_takes_leased_blocks():
    store = pool()
    store.put(G, sequence((1, 10)), ((0, 10),), 0)
    store.exists(G, sequence((1, 10)), ((0, 10),), 1)
    assert store.remove(G, sequence((1, 10)), ((2, 4), (9, 10)), 2) == ((2, 4), (9, 10))
    assert store.exists(G, sequence((1, 10)), ((0, 10),), 3) == ((0, 2), (4, 9))
    store.audit()


def test_blocks_of_two_groups_have_their_own_size():
    store = MooncakePool(100, (10, 1), 0, 1.0, 0.05)
    assert store.put(GroupId(0), sequence((1, 9)), ((0, 9),), 0) == ()
    assert store.put(GroupId(1), sequence((1, 9)), ((0, 9),), 0) == ()
    assert store.used_bytes == 99


def test_work_is_in_runs_not_in_blocks():
    store = pool(capacity_blocks=10**12)
    million = 10**9
    for turn in range(1, 200):
        segments = sequence((1, million * turn))
        found = store.exists(G, segments, ((0, million * turn),), turn)
        store.put(G, segments, runs_of.subtract(((0, million * turn),), found), turn)
    assert store.num_objects == 199 * million
    store.audit()


def test_time_never_runs_backwards():
    store = pool()
    store.exists(G, (), (), 5)
    with pytest.raises(AssertionError):
        store.exists(G, (), (), 4)


def test_audit_notices_a_lost_byte():
    store = pool()
    store.put(G, sequence((1, 10)), ((0, 10),), 0)
    store._memory.used_bytes -= 1
    with pytest.raises(AssertionError):
        store.audit()


def contents(store):
    """Names of all blocks, as `BlockPool` has them."""
    return {(*lineage, block) for lineage, extent in store._extents for block in range(extent.start, extent.end)}


# --- the oracle: one object per block ---


class BlockPool:
    """The same rules, an object at a time. `order` sorts the victims; the right one is `by_lease`."""

    def __init__(self, capacity, ttl, watermark, ratio, order):
        self.capacity, self.ttl, self.order = capacity, ttl, order
        self.watermark, self.ratio = Fraction(str(watermark)), Fraction(str(ratio))
        self.objects = {}  # (group, stream, block) -> (lease, grant, last use)
        self.grant = 0

    def names(self, group, segments, runs):
        owner = {block: stream for stream, start, end in segments for block in range(start, end)}
        return [(group, owner[block], block) for start, end in runs for block in range(start, end)]

    def tick(self, now):
        self.now = now
        self.grant += 1

    def exists(self, group, segments, runs, now):
        self.tick(now)
        found = [name for name in self.names(group, segments, runs) if name in self.objects]
        for name in found:
            self.objects[name] = (now + self.ttl, self.grant, now)
        return runs_of.from_blocks(block for _, _, block in found)

    get = exists

    def put(self, group, segments, runs, now):
        self.tick(now)
        absent = [name for name in self.names(group, segments, runs) if name not in self.objects]
        while self.capacity - len(self.objects) < len(absent) and self.evict():
            pass
        free = self.capacity - len(self.objects)
        for name in absent[:free]:
            self.objects[name] = (now, self.grant, now)
        self.entered(group, segments, absent[:free])
        while len(self.objects) > self.capacity * self.watermark and self.evict():
            pass
        return runs_of.from_blocks(block for _, _, block in absent[free:])

    def entered(self, group, segments, names):
        """For pools that have more to remember."""

    def remove(self, group, segments, runs, now):
        self.tick(now)
        gone = [name for name in self.names(group, segments, runs) if self.objects.pop(name, None)]
        return runs_of.from_blocks(block for _, _, block in gone)

    def evict(self):
        used_ratio = Fraction(len(self.objects), self.capacity)
        share = max(self.ratio, used_ratio - self.watermark + self.ratio)
        expired = [name for name, (lease, _, _) in self.objects.items() if lease <= self.now]
        expired.sort(key=lambda name: self.order(name, *self.objects[name]))
        victims = expired[: ceil(len(self.objects) * share)]
        for name in victims:
            del self.objects[name]
        return len(victims)


def by_lease(name, lease, grant, used):
    return lease, grant, -name[2]


def head_first(name, lease, grant, used):
    return lease, grant, name[2]


def by_last_use(name, lease, grant, used):
    return used, grant, -name[2]


SEQUENCES = (
    sequence((1, 8)),
    sequence((1, 3), (2, 9)),
    sequence((1, 3), (2, 5), (3, 7)),
    sequence((4, 6)),
    sequence((5, 12)),
    sequence((1, 8), (6, 14)),
)


@st.composite
def calls(draw):
    segments = draw(st.sampled_from(SEQUENCES))
    blocks = draw(st.sets(st.integers(0, segments[-1][2] - 1)))
    whole = ((0, segments[-1][2]),)
    method = draw(st.sampled_from(["exists", "put", "put", "get", "remove"]))
    runs = draw(st.sampled_from([whole, whole, runs_of.from_blocks(blocks)]))
    return method, draw(st.sampled_from([G, GroupId(1)])), segments, runs, draw(st.sampled_from([0, 0, 1, 3, 10]))


def disagreement(script, capacity, ttl, watermark, ratio, order):
    """Index of the first call that the pool and the block-by-block one answer differently, or None."""
    subject = MooncakePool(capacity, (1, 1), ttl, watermark, ratio)
    oracle = BlockPool(capacity, ttl, watermark, ratio, order)
    now = 0
    for index, (method, group, segments, runs, pause) in enumerate(script):
        now += pause
        answer = getattr(subject, method)(group, segments, runs, now)
        subject.audit()
        if answer != getattr(oracle, method)(group, segments, runs, now) or subject.num_objects != len(oracle.objects):
            return index
    return None


WHOLE = [
    ("put", G, SEQUENCES[0], ((0, 8),), 0),
    ("put", G, SEQUENCES[4], ((0, 12),), 1),
    ("exists", G, SEQUENCES[0], ((0, 8),), 1),
]
LEASED = [
    ("put", G, SEQUENCES[0], ((0, 8),), 0),
    ("exists", G, SEQUENCES[0], ((0, 8),), 0),
    ("put", G, SEQUENCES[3], ((0, 6),), 1),
    ("put", G, SEQUENCES[4], ((0, 5),), 10),
    ("exists", G, SEQUENCES[0], ((0, 8),), 1),
]


@given(
    st.lists(calls(), max_size=40),
    st.integers(1, 30),
    st.sampled_from([0, 2, 5]),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.05, 0.3, 1.0]),
)
@example(WHOLE, 14, 0, 1.0, 0.05)
@example(LEASED, 16, 5, 1.0, 0.05)
def test_equals_the_pool_of_single_blocks(script, capacity, ttl, watermark, ratio):
    assert disagreement(script, capacity, ttl, watermark, ratio, by_lease) is None


def test_the_oracle_rejects_other_eviction_orders():
    assert disagreement(WHOLE, 14, 0, 1.0, 0.05, head_first) == 2
    assert disagreement(LEASED, 16, 5, 1.0, 0.05, by_last_use) == 4

"""Segments: what goes where, that none overflows, and what a pool of them answers."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.runs import num_blocks, subtract
from kvcore.types import GroupId, StreamId
from kvsim.pool.memory import Memory, Preferred, SegmentedMemory, Strategy
from kvsim.pool.places import phase
from kvsim.pool.sources import ReplicaType, Source
from kvsim.pool.store import MooncakePool

G, BLOCK = GroupId(0), 10


def lineage(stream):
    return G, StreamId(stream)


def segmented(num_clients, segment_blocks, strategy=Strategy.RANDOM, copies=1, preferred=Preferred.NONE, each=1):
    return SegmentedMemory(segment_blocks * BLOCK, num_clients, (BLOCK,), strategy, copies, preferred, each)


def used_blocks(memory, num_segments):
    return [memory.used(segment) // BLOCK for segment in range(num_segments)]


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(Strategy),
    st.integers(1, 3),
    st.sampled_from(Preferred),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.booleans()), max_size=25),
)
def test_no_segment_overflows_and_what_is_given_back_is_free(clients, blocks, strategy, copies, preferred, changes):
    memory = segmented(clients, blocks, strategy, copies, preferred)
    held = []
    for index, (size, writer, frees) in enumerate(changes):
        if frees and held:
            memory.free(*held.pop())
        elif size:
            room = memory.room(G, size)
            filled = num_blocks(memory.fill(lineage(index), 0, size, writer % clients))
            assert filled >= room if copies == 1 else filled >= min(room, 1)
            if filled < size:
                assert sum(used_blocks(memory, clients)) == clients * blocks, "it ends when all are full"
            if filled:
                held.append((lineage(index), 0, filled))
        memory.audit()
    for piece in held:
        memory.free(*piece)
    memory.audit()
    assert memory.used_bytes == 0


def test_the_audit_rejects_a_segment_that_holds_what_no_place_says():
    memory = segmented(2, 4)
    memory.fill(lineage(1), 0, 3, None)
    memory._used[0] += BLOCK
    with pytest.raises(AssertionError):
        memory.audit()


@pytest.mark.parametrize("size", [1, 5])
def test_random_objects_are_anywhere_with_the_same_chance(size):
    memory = segmented(4, 100_000)
    for stream in range(4_000 // size):
        memory.fill(lineage(stream), 0, size, None)
    counts = used_blocks(memory, 4)
    assert sum((count - 1_000) ** 2 / 1_000 for count in counts) < 16.3, "the 99.9th percentile, 3 degrees of freedom"


def test_copies_are_in_neighbouring_segments_of_which_none_has_two():
    memory = segmented(4, 1_000, copies=2)
    pairs = Counter()
    for stream in range(400):
        memory.fill(lineage(stream), 0, 1, None)
        (place,) = memory.places(lineage(stream), 0, 1)
        index = place.counts(phase(lineage(stream))).index(1)
        pairs[place.holders(index)] += 1
    assert set(pairs) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert memory.used_bytes == 2 * 400 * BLOCK


def test_there_are_fewer_copies_where_there_is_room_for_fewer():
    memory = segmented(2, 4, copies=3)
    assert memory.fill(lineage(1), 0, 9, None) == ((0, 4),)
    assert used_blocks(memory, 2) == [4, 4]
    assert memory.places(lineage(1), 0, 4)[0].copies == 2


@pytest.mark.parametrize("copies", [1, 2])
def test_free_ratio_first_keeps_segments_alike(copies):
    memory = segmented(4, 100, Strategy.FREE_RATIO_FIRST, copies)
    memory.fill(lineage(0), 0, 7, None)
    memory.free(lineage(0), 0, 5)
    for stream in range(1, 40):
        memory.fill(lineage(stream), 0, 1 + stream % 5, None)
        counts = used_blocks(memory, 4)
        assert max(counts) - min(counts) <= 3 * copies, counts


def test_random_does_not_keep_segments_alike():
    memory = segmented(4, 1_000)
    for stream in range(400):
        memory.fill(lineage(stream), 0, 1, None)
    counts = used_blocks(memory, 4)
    assert max(counts) - min(counts) > 3


@pytest.mark.parametrize("rules", [{"strategy": Strategy.LOCAL_FIRST}, {"preferred": Preferred.OWN}])
def test_the_writers_own_segments_come_first_as_long_as_there_is_room(rules):
    memory = segmented(3, 4, each=2, **rules)
    memory.fill(lineage(1), 0, 9, 1)
    assert used_blocks(memory, 6)[2:4] == [4, 4]
    assert memory.used_bytes == 9 * BLOCK


def test_local_first_is_random_for_more_than_one_copy():
    memory = segmented(3, 100, Strategy.LOCAL_FIRST, 2)
    memory.fill(lineage(1), 0, 30, 1)
    assert used_blocks(memory, 3) == [20, 20, 20]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "exists", "get", "remove")),
        st.integers(0, 3),
        st.integers(0, 12),
        st.integers(1, 12),
        st.integers(0, 3),
    ),
    max_size=60,
)


def answers(store, operations):
    now_ns, told = 0, []
    for name, stream, start, size, wait in operations:
        now_ns += wait
        segments, runs = ((StreamId(stream), 0, start + size),), ((start, start + size),)
        told.append(getattr(store, name)(G, segments, runs, now_ns))
        store.audit()
    return told, store.counters


@settings(max_examples=60)
@given(OPERATIONS, st.integers(1, 4), st.sampled_from(Strategy), st.sampled_from(Preferred))
def test_where_blocks_are_changes_no_answer_as_long_as_there_is_one_copy(operations, clients, strategy, preferred):
    """So that the pool may count one capacity where nobody asks for more."""
    shape = (BLOCK,), 3, 0.9, 0.1
    one = MooncakePool(Memory(clients * 6 * BLOCK, (BLOCK,), clients), *shape)
    many = MooncakePool(segmented(clients, 6, strategy, preferred=preferred), *shape)
    assert answers(one, operations) == answers(many, operations)


def test_copies_do_change_answers():
    fill = [("put", 0, 0, 12, 0), ("exists", 0, 0, 12, 0)]
    shape = (BLOCK,), 3, 0.9, 0.1
    one = MooncakePool(Memory(12 * BLOCK, (BLOCK,), 2), *shape)
    assert answers(one, fill) != answers(MooncakePool(segmented(2, 6, copies=2), *shape), fill)


@pytest.mark.parametrize("memory", [Memory(400 * BLOCK, (BLOCK,), 4), segmented(4, 100)])
def test_sources_tell_whom_every_byte_is_read_from(memory):
    store = MooncakePool(memory, (BLOCK,), 0, 0.9, 0.1)
    segments, runs = ((StreamId(1), 0, 4), (StreamId(2), 4, 40)), ((0, 3), (5, 38))
    store.put(G, segments, ((0, 40),), 0)
    sources = store.sources(G, segments, runs)
    assert sources.total() == 36 * BLOCK
    assert {source.replica_type for source in sources} == {ReplicaType.MEMORY}
    assert {source.client for source in sources} == {0, 1, 2, 3}
    assert all(abs(size_bytes - 9 * BLOCK) <= 3 * BLOCK for size_bytes in sources.values()), sources


def test_a_reader_takes_its_own_copy():
    store = MooncakePool(segmented(4, 100, copies=2), (BLOCK,), 0, 0.9, 0.1)
    segments = ((StreamId(1), 0, 40),)
    store.put(G, segments, ((0, 40),), 0)
    assert store.sources(G, segments, ((0, 40),), reader=2)[Source(2, ReplicaType.MEMORY)] == 20 * BLOCK
    assert store.sources(G, segments, ((0, 40),))[Source(2, ReplicaType.MEMORY)] == 10 * BLOCK


# --- loss -------------------------------------------------------------------------------------------------------------

TTL = 10
SEGMENTS, ALL = ((StreamId(1), 0, 40),), ((0, 40),)


def losing(copies=1):
    store = MooncakePool(segmented(4, 100, copies=copies), (BLOCK,), 0, 0.9, 0.1, client_ttl_ns=TTL)
    assert store.put(G, SEGMENTS, ALL, 0) == ()
    store.lose_client(2, 5)
    return store


def test_what_a_dead_client_held_exists_until_the_master_notices_and_cannot_be_read():
    store = losing()
    assert store.exists(G, SEGMENTS, ALL, 6) == ALL
    readable = store.get(G, SEGMENTS, ALL, 6)
    assert num_blocks(readable) == 30
    assert (store.counters.unreadable, store.counters.late) == (10, 10)
    assert store.sources(G, SEGMENTS, readable).total() == 30 * BLOCK
    assert store.exists(G, SEGMENTS, ALL, 5 + TTL - 1) == ALL
    assert store.exists(G, SEGMENTS, ALL, 5 + TTL) == readable
    assert store.counters.lost == 10
    store.audit()


def test_what_a_client_lends_that_is_back_before_its_death_is_noticed_stays():
    store = losing()
    store.mount(2, 6)
    later = ((StreamId(2), 0, 40),)
    refused = store.put(G, later, ALL, 7)
    assert num_blocks(refused) == 8, "the dead segment is one of five"
    assert num_blocks(store.exists(G, SEGMENTS, ALL, 5 + TTL)) == 30
    assert store.exists(G, later, ALL, 5 + TTL) == subtract(ALL, refused)
    assert store.counters.lost == 10
    store.audit()


def test_what_has_a_copy_elsewhere_survives():
    store = losing(copies=2)
    assert num_blocks(store.get(G, SEGMENTS, ALL, 6)) == 30, "a dead first copy is not replaced by the second"
    assert num_blocks(store.get(G, SEGMENTS, ALL, 7, reader=3)) == 40, "unless the second is the reader's own"
    assert store.exists(G, SEGMENTS, ALL, 5 + TTL) == ALL
    assert store.counters.lost == 0
    assert Source(2, ReplicaType.MEMORY) not in store.sources(G, SEGMENTS, ALL)
    store.audit()
    assert store.remove(G, SEGMENTS, ALL, 20) == ALL
    assert store.used_bytes == 0


@pytest.mark.parametrize(("copies", "failed"), [(1, 10), (2, 20), (4, 40)])
def test_puts_of_which_a_copy_goes_to_a_dead_client_fail_until_it_is_noticed(copies, failed):
    store = losing(copies)
    other = ((StreamId(2), 0, 40),)
    refused = store.put(G, other, ALL, 6)
    assert num_blocks(refused) == failed == store.counters.rejected
    assert store.holds(G, other, ALL) == subtract(ALL, refused)
    store.audit()
    assert store.put(G, other, ALL, 5 + TTL) == ()
    assert {source.client for source in store.sources(G, other, ALL)} <= {0, 1, 3}
    store.audit()


def test_a_client_that_returns_is_given_objects_again():
    store = losing()
    store.mount(2, 40)
    third = ((StreamId(3), 0, 40),)
    store.put(G, third, ALL, 41)
    assert store.sources(G, third, ALL)[Source(2, ReplicaType.MEMORY)] == 10 * BLOCK
    store.audit()


def test_the_watermark_is_that_of_what_is_left():
    store = MooncakePool(segmented(2, 20), (BLOCK,), 0, 0.5, 0.1, client_ttl_ns=TTL)
    store.put(G, SEGMENTS, ((0, 20),), 0)
    assert store.num_objects == 20
    store.lose_client(0, 1)
    store.put(G, ((StreamId(2), 0, 10),), ((0, 10),), 1 + TTL)
    assert store.num_objects <= 10
    store.audit()


@settings(max_examples=40)
@given(OPERATIONS, st.integers(1, 3), st.integers(0, 40), st.booleans())
def test_a_loss_takes_what_it_must_and_nothing_else(operations, copies, when, returns):
    store = MooncakePool(segmented(3, 8, copies=copies), (BLOCK,), 1, 0.9, 0.1, client_ttl_ns=3)
    now_ns = 0
    for index, (name, stream, start, size, wait) in enumerate(operations):
        now_ns += wait
        if index == when:
            store.lose_client(1, now_ns)
        if returns and index == when + 10:
            store.mount(1, now_ns)
        segments, runs = ((StreamId(stream), 0, start + size),), ((start, start + size),)
        held = store.holds(G, segments, runs)
        answer = getattr(store, name)(G, segments, runs, now_ns)
        if name == "get":
            assert not subtract(answer, held)
        store.audit()
    if copies > 1:
        assert store.counters.lost <= store.counters.put

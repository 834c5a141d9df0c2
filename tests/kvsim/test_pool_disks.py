"""Disks below the pool's memory: what is there, what is read from it, what comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.runs import num_blocks, union
from kvcore.types import GroupId, StreamId
from kvsim.pool.disks import DiskEviction, Disks, Offload, Promotion, Unwritten
from kvsim.pool.memory import Memory, SegmentedMemory
from kvsim.pool.sources import ReplicaType
from kvsim.pool.store import MooncakePool

G, BLOCK = GroupId(0), 10
AMPLE = 1 << 40


def tiered(memory_blocks=10, disk_blocks=100, lease_ns=0, clients=2, buffer=AMPLE, memory=None, **rules):
    disks = Disks(disk_blocks * BLOCK // clients, clients, (BLOCK,), buffer, **rules)
    memory = memory or Memory(memory_blocks * BLOCK, (BLOCK,), clients)
    return MooncakePool(memory, (BLOCK,), lease_ns, 1.0, 0.1, disks=disks, client_ttl_ns=10)


def sequence(stream, size=200):
    return ((StreamId(stream), 0, size),)


def put(store, stream, size, now_ns):
    return store.put(G, sequence(stream), ((0, size),), now_ns)


def test_what_memory_evicts_is_on_disk():
    store = tiered()
    put(store, 1, 8, 0)
    put(store, 2, 8, 1)
    assert store.replicas(G, sequence(1), ((0, 8),))[ReplicaType.DISK] == ((2, 8),)
    assert store.exists(G, sequence(1), ((0, 8),), 2) == ((0, 8),)
    assert store.get(G, sequence(1), ((0, 8),), 2) == ((0, 8),)
    counted = store.counters
    assert (counted.evicted, counted.offloaded, counted.found_on_disk, counted.got_from_disk) == (6, 6, 6, 6)
    sources = store.sources(G, sequence(1), ((0, 8),))
    assert sum(size for source, size in sources.items() if source.replica_type is ReplicaType.DISK) == 6 * BLOCK
    store.audit()


def test_what_is_on_disk_alone_is_not_stored_again():
    store = tiered()
    put(store, 1, 8, 0)
    put(store, 2, 10, 1)
    assert put(store, 1, 8, 2) == () and store.counters.put == 18
    assert store.replicas(G, sequence(1), ((0, 8),)) == {ReplicaType.MEMORY: (), ReplicaType.DISK: ((0, 8),)}


def test_without_offload_on_evict_a_put_writes_both():
    store = tiered(offload=Offload.ON_PUT)
    put(store, 1, 8, 0)
    assert store.replicas(G, sequence(1), ((0, 8),)) == {ReplicaType.MEMORY: ((0, 8),), ReplicaType.DISK: ((0, 8),)}
    assert store.counters.offloaded == 8
    put(store, 2, 10, 1)
    assert store.exists(G, sequence(1), ((0, 8),), 2) == ((0, 8),)


def test_what_a_full_disk_does_not_take_stays_in_memory_and_puts_are_refused():
    store = tiered(disk_blocks=4)
    put(store, 1, 10, 0)
    assert put(store, 2, 6, 1) == ((4, 6),)
    assert store.counters.rejected == 2
    assert store.exists(G, sequence(1), ((0, 10),), 2) == ((0, 10),)
    store.audit()


def test_with_offload_force_evict_it_goes():
    store = tiered(disk_blocks=4, unwritten=Unwritten.GOES)
    put(store, 1, 10, 0)
    assert put(store, 2, 8, 1) == ()
    assert num_blocks(store.exists(G, sequence(1), ((0, 10),), 2)) < 10
    store.audit()


@pytest.mark.parametrize(("eviction", "kept"), [(DiskEviction.FIFO, 2), (DiskEviction.LRU, 1)])
def test_from_a_full_disk_goes_what_is_oldest_or_was_not_read(eviction, kept):
    store = tiered(memory_blocks=4, disk_blocks=8, eviction=eviction)
    for stream in (1, 2, 3):
        put(store, stream, 4, stream)  # 1 and 2 are on disk, 3 in memory
    assert store.get(G, sequence(1), ((0, 4),), 4) == ((0, 4),)
    put(store, 4, 4, 5)
    assert store.exists(G, sequence(kept), ((0, 4),), 6) == ((0, 4),)
    assert store.exists(G, sequence(3 - kept), ((0, 4),), 6) == ()
    assert store.counters.evicted_from_disk == 4
    store.audit()


def test_what_is_read_from_disk_twice_comes_back_one_a_heartbeat():
    store = tiered(memory_blocks=8, clients=1, promotion=Promotion(2, 1, heartbeat_ns=10))
    put(store, 1, 4, 0)
    put(store, 2, 8, 1)
    store.remove(G, sequence(2), ((0, 8),), 2)
    store.get(G, sequence(1), ((0, 4),), 3)
    store.exists(G, (), (), 15)
    assert store.replicas(G, sequence(1), ((0, 4),))[ReplicaType.MEMORY] == ()
    store.get(G, sequence(1), ((0, 3),), 16)
    for beat in (1, 2, 3, 4):
        store.exists(G, (), (), 16 + 10 * beat)
        assert num_blocks(store.replicas(G, sequence(1), ((0, 4),))[ReplicaType.MEMORY]) == min(beat, 3)
    assert store.replicas(G, sequence(1), ((0, 4),))[ReplicaType.DISK] == ((0, 4),)
    assert store.counters.promoted == 3
    store.audit()


def test_a_read_takes_no_more_from_a_disk_than_its_buffer_holds():
    store = tiered(memory_blocks=8, buffer=3 * BLOCK)
    put(store, 1, 8, 0)
    put(store, 2, 8, 1)
    assert store.get(G, sequence(1), ((0, 8),), 2) == ((0, 6),), "three from each of two"
    assert (store.counters.unstaged, store.counters.late) == (2, 2)


def test_a_disk_is_lost_with_its_client():
    store = tiered(memory=SegmentedMemory(5 * BLOCK, 2, (BLOCK,)))
    put(store, 1, 10, 0)
    put(store, 2, 10, 1)
    store.lose_client(0, 2)
    assert store.exists(G, sequence(1), ((0, 10),), 3) == ((0, 10),)
    assert num_blocks(store.get(G, sequence(1), ((0, 10),), 3)) == 5
    assert num_blocks(store.exists(G, sequence(1), ((0, 10),), 12)) == 5
    assert (store.counters.lost, store.counters.lost_from_disk) == (5, 5)
    store.audit()


def test_the_disks_of_the_living_do_not_take_what_fits_those_of_the_dead():
    memory = SegmentedMemory(5 * BLOCK, 2, (BLOCK,))
    store = tiered(disk_blocks=20, memory=memory, unwritten=Unwritten.GOES, offload=Offload.ON_PUT)
    put(store, 1, 10, 0)
    store.lose_client(0, 2)
    for stream in range(2, 12):
        put(store, stream, 5, 3)
    assert store.disks.used_bytes == 15 * BLOCK, "five on the dead disk, ten on the other one"
    store.exists(G, sequence(1), ((0, 10),), 12)
    assert store.disks.used_bytes == store.disks.capacity_bytes == 10 * BLOCK
    store.audit()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "exists", "get", "remove")),
        st.integers(0, 3),
        st.integers(0, 12),
        st.integers(1, 8),
        st.integers(0, 3),
    ),
    max_size=60,
)
RULES = st.fixed_dictionaries(
    {
        "offload": st.sampled_from(Offload),
        "unwritten": st.sampled_from(Unwritten),
        "eviction": st.sampled_from(DiskEviction),
        "promotion": st.sampled_from((None, Promotion(1, 2, 5), Promotion(2, 1, 5))),
    }
)


def missing(store, operations):
    """How many blocks that were put and not removed do not exist."""
    now_ns, expected, absent = 0, dict.fromkeys(range(4), ()), 0
    for name, stream, start, size, wait in operations:
        now_ns += wait
        runs = ((start, start + size),)
        answer = getattr(store, name)(G, sequence(stream), runs, now_ns)
        store.audit()
        if name == "put":
            kept = set(range(start, start + size)).difference(*(range(a, b) for a, b in answer))
            expected[stream] = union(expected[stream], tuple((block, block + 1) for block in sorted(kept)))
        elif name == "remove":
            blocks = {block for a, b in expected[stream] for block in range(a, b)} - set(range(start, start + size))
            expected[stream] = union((), tuple((block, block + 1) for block in sorted(blocks)))
    for stream, runs in expected.items():
        absent += num_blocks(runs) - num_blocks(store.holds(G, sequence(stream), runs))
    return absent


@settings(max_examples=60)
@given(OPERATIONS, RULES)
def test_with_room_on_disk_nothing_is_ever_lost(operations, rules):
    assert missing(tiered(disk_blocks=1_000, **rules), operations) == 0


def test_without_a_disk_something_is():
    fill = [("put", stream, 0, 8, 1) for stream in range(3)]
    assert missing(tiered(disk_blocks=1_000), fill) == 0
    assert missing(MooncakePool(10 * BLOCK, (BLOCK,), 0, 1.0, 0.1), fill) > 0


@settings(max_examples=60)
@given(OPERATIONS, RULES, st.integers(1, 30), st.integers(0, 4))
def test_objects_and_bytes_are_conserved(operations, rules, disk_blocks, lease_ns):
    store = tiered(disk_blocks=disk_blocks * 2, lease_ns=lease_ns, **rules)
    assert missing(store, operations) >= 0

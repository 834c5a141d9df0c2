"""Segments of the simulated pool are those of a real master: what goes where, and who is lost with a client."""

import time

import pytest

from connector.testbed.processes import SegmentOwner
from kvcore.types import GroupId, StreamId
from kvsim.pool.memory import Preferred, SegmentedMemory, Strategy
from kvsim.pool.places import phase
from kvsim.pool.store import MooncakePool
from tests.differential.mooncake_master import master_and_client

G = GroupId(0)
BLOCK_BYTES = 64 << 10
SEGMENT = 256  # objects; 16 MiB
TTL_S = 2
SURE = 10.8
"""The 99.9th percentile of chi squared with one degree of freedom."""


def single(name):
    return (StreamId(name), 0, 1)


class Twin:
    """Two clients with a segment each; every object has a stream of its own."""

    def __init__(self, strategy=Strategy.RANDOM, copies=1, preferred=Preferred.NONE):
        self.memory = SegmentedMemory(SEGMENT * BLOCK_BYTES, 2, (BLOCK_BYTES,), strategy, copies, preferred)
        self.pool = MooncakePool(self.memory, (BLOCK_BYTES,), 1, 1.0, 0.0, client_ttl_ns=TTL_S * 10**9)
        self.now_ns = 0

    def put(self, name, writer=None):
        self.now_ns += 1
        return not self.pool.put(G, (single(name),), ((0, 1),), self.now_ns, writer=writer)

    def holders(self, name):
        """Segments of its copies, the first one first."""
        (place,) = self.memory.places((G, StreamId(name)), 0, 1)
        return place.holders(place.counts(phase((G, StreamId(name)))).index(1))

    def exists(self, name, now_ns):
        return bool(self.pool.exists(G, (single(name),), ((0, 1),), now_ns))

    def get(self, name, now_ns):
        return bool(self.pool.get(G, (single(name),), ((0, 1),), now_ns))


class RealPair:
    """A master that never evicts, and two processes that lend it a segment each."""

    def __init__(self, folder, *flags):
        self.context = master_and_client(folder, 0, 1_000, 1.0, 0.0, f"--client_ttl={TTL_S}", *flags)
        self.master, self.client = self.context.__enter__()
        self.owners, self.ends, self.value = [], {}, bytes(BLOCK_BYTES)
        for name in ("first", "second"):
            (folder / name).mkdir()
            self.owners.append(SegmentOwner(self.master, folder / name, SEGMENT * BLOCK_BYTES))
            if name == "first":
                assert self.put(name)
                self.holders([name])
        self.client.remove("first", True)

    def put(self, name, copies=1, preferred=None):
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num = copies
        if preferred is not None:
            config.preferred_segment = preferred
        return self.client.put(str(name), self.value, config) == 0

    def holders(self, names):
        """Segments of each object's copies; 0 is the first owner's."""
        told = self.client.batch_get_replica_desc(list(map(str, names)))
        found = {}
        for name in names:
            ends = [
                copy.get_memory_descriptor().buffer_descriptor.transport_endpoint for copy in told.get(str(name), ())
            ]
            found[name] = tuple(self.ends.setdefault(end, len(self.ends)) for end in ends)
        return found

    def present(self, names):
        told = self.client.batch_is_exist(list(map(str, names)))
        return {name for name, there in zip(names, told, strict=True) if there == 1}

    def close(self):
        for owner in self.owners:
            owner.kill()
        self.context.__exit__(None, None, None)


@pytest.fixture
def pair(tmp_path, request):
    pair = RealPair(tmp_path, *getattr(request, "param", ()))
    yield pair
    pair.close()


def check_even(counts):
    """Each object is on either of two with the same chance."""
    expected = sum(counts) / 2
    assert sum((count - expected) ** 2 / expected for count in counts) < SURE, counts


def check_levelled(counts):
    assert abs(counts[0] - counts[1]) <= 1, counts


def real_counts(pair, names, at=0):
    held = pair.holders(names)
    return [sum(holders[at] == segment for holders in held.values()) for segment in (0, 1)]


def twin_counts(twin, names, at=0):
    return [sum(twin.holders(name)[at] == segment for name in names) for segment in (0, 1)]


@pytest.mark.store
def test_places_copies_refusals_and_losses_are_a_real_masters(pair):
    """One pair of processes for all of it: they take their time to start."""
    singles, doubles = range(150), range(1_000, 1_080)
    one, two = Twin(), Twin(copies=2)
    assert all(pair.put(name) and one.put(name) for name in singles)
    assert all(pair.put(name, 2) and two.put(name) for name in doubles)
    # Where they are: in distribution.
    for counts in (real_counts(pair, singles), twin_counts(one, singles)):
        check_even(counts)
    for counts in (real_counts(pair, doubles), twin_counts(two, doubles)):
        check_even(counts)
    # Copies: exactly.
    assert all(sorted(holders) == [0, 1] for holders in pair.holders(doubles).values())
    assert all(sorted(two.holders(name)) == [0, 1] for name in doubles)
    # More copies than segments: as many as there are segments.
    three = Twin(copies=3)
    assert pair.put("three", 3) and three.put(0)
    assert len(pair.holders(["three"])["three"]) == len(three.holders(0)) == 2

    # A client dies: until the master notices, what it held exists and cannot be read.
    segments = pair.master.segments()
    pair.owners[0].kill()
    died_s = time.monotonic()
    held = pair.holders(singles)
    readable = {name for name in singles if held[name] == (1,)}
    some = [*sorted(readable)[:8], *sorted(set(singles) - readable)[:2]]
    for name in some:
        assert bool(pair.client.get(str(name))) == (name in readable)
    # A copy elsewhere does not help before that, when it is not the first.
    firsts = {name: holders[0] for name, holders in pair.holders(doubles).items()}
    some = [next(name for name in doubles if firsts[name] == segment) for segment in (0, 1)]
    assert [bool(pair.client.get(str(name))) for name in some] == [False, True]
    # What the master gives it meanwhile fails, and with it what has a copy elsewhere.
    assert not pair.put("doomed", 2)
    if time.monotonic() - died_s < TTL_S - 0.3:
        assert pair.present(singles) == set(singles)
    left = {name for name in singles if one.holders(name) == (1,)}
    one.pool.lose_client(0, 10**9)
    assert {name for name in singles if one.get(name, 10**9 + 1)} == left
    assert all(one.exists(name, (1 + TTL_S) * 10**9 - 1) for name in singles)
    two.pool.lose_client(0, 10**9)
    assert [two.get(name, 10**9 + 1) for name in doubles] == [two.holders(name)[0] == 1 for name in doubles]
    two.now_ns = 10**9 + 1
    assert not two.put(900)

    # Then it is gone, and what has a copy elsewhere stays.
    deadline = died_s + TTL_S + 5
    while pair.master.segments() == segments:
        assert time.monotonic() < deadline, "the master does not notice"
        time.sleep(0.05)
    assert time.monotonic() - died_s > TTL_S - 1.5, "it believed in it for about that long"
    assert pair.present(singles) == readable
    assert pair.present(doubles) == set(doubles)
    after_ns = (1 + TTL_S) * 10**9
    assert {name for name in singles if one.exists(name, after_ns)} == left
    assert all(pair.client.get(str(name)) for name in doubles)
    assert all(two.get(name, after_ns) for name in doubles)

    # What is left takes what it has room for, to the last object.
    pair.client.remove_all(True)
    accepted = sum(pair.put(name) for name in range(2_000, 2_000 + SEGMENT + 20))
    for name in singles:
        one.pool.remove(G, (single(name),), ((0, 1),), after_ns)
    one.now_ns = after_ns
    assert accepted == sum(one.put(name) for name in range(2_000, 2_000 + SEGMENT + 20)) == SEGMENT


@pytest.mark.store
def test_a_reader_takes_its_own_copy_as_a_real_client_does(tmp_path):
    from mooncake.store import ReplicateConfig

    config, value, twin = ReplicateConfig(), bytes(BLOCK_BYTES), Twin(copies=2)
    config.replica_num = 2
    with master_and_client(tmp_path, SEGMENT * BLOCK_BYTES, 1_000, 1.0, 0.0) as (master, client):
        owner = SegmentOwner(master, tmp_path, SEGMENT * BLOCK_BYTES)
        try:
            assert all(client.put(str(name), value, config) == 0 and twin.put(name) for name in range(24))
        finally:
            owner.kill()
        assert all(client.get(str(name)) == value for name in range(24)), "half of the first copies are dead"
    twin.pool.lose_client(1, 10**9)
    got = [twin.pool.get(G, (single(name),), ((0, 1),), 10**9, reader=0) for name in range(24)]
    assert got == [((0, 1),)] * 24
    stranger = [twin.pool.get(G, (single(name),), ((0, 1),), 10**9) for name in range(24)]
    assert () in stranger, "who has no copy of its own takes the first, dead or not"


@pytest.mark.store
@pytest.mark.parametrize("pair", [("--allocation_strategy=free_ratio_first",)], indirect=True)
def test_free_ratio_first_and_a_preferred_segment_are_a_real_masters(pair):
    names, twin = range(151), Twin(Strategy.FREE_RATIO_FIRST)
    assert all(pair.put(name) and twin.put(name) for name in names)
    check_levelled(real_counts(pair, names))
    check_levelled(twin_counts(twin, names))
    # A preferred segment, until it is full; the others then.
    pair.client.remove_all(True)
    own = Twin(Strategy.FREE_RATIO_FIRST, preferred=Preferred.OWN)
    preferred = pair.master.segments()[0]
    names = range(3_000, 3_000 + SEGMENT + 40)
    assert all(pair.put(name, preferred=preferred) and own.put(name, 0) for name in names)
    told = list(pair.holders(names).values())
    assert set(told[:SEGMENT]) == {told[0]} and set(told[SEGMENT:]) == {told[-1]} != {told[0]}
    assert [own.holders(name) for name in names] == [(0,)] * SEGMENT + [(1,)] * 40


def test_the_checks_reject_other_places():
    random = Twin()
    assert all(random.put(name) for name in range(300))
    with pytest.raises(AssertionError):
        check_levelled(twin_counts(random, range(300)))
    local = Twin(preferred=Preferred.OWN)
    assert all(local.put(name, 0) for name in range(150))
    for check in (check_even, check_levelled):
        with pytest.raises(AssertionError):
            check(twin_counts(local, range(150)))

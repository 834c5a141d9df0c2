"""Disks below the simulated pool keep, read and give back what those below a real one do."""

import time

import pytest

from connector.testbed.pool import DiskPool
from kvcore.types import GroupId, StreamId
from kvsim.pool.disks import Disks, Promotion
from kvsim.pool.memory import Memory
from kvsim.pool.sources import ReplicaType
from kvsim.pool.store import MooncakePool
from tests.kvsim.test_pool_disks import AMPLE

G = GroupId(0)
BLOCK_BYTES = 64 << 10
CAPACITY = 256  # objects; 16 MiB
STORED = 300
WATERMARK = 0.9
LEASE_MS = 200
MS, SECOND = 10**6, 10**9
NAMES = range(STORED)


class Twin:
    """Every object has a stream of its own."""

    def __init__(self, disks):
        memory = Memory(CAPACITY * BLOCK_BYTES, (BLOCK_BYTES,))
        self.pool = MooncakePool(memory, (BLOCK_BYTES,), LEASE_MS * MS, WATERMARK, 0.05, disks=disks)
        self.now_ns = 0

    def call(self, method, name):
        return getattr(self.pool, method)(G, ((StreamId(name), 0, 1),), ((0, 1),), self.now_ns)

    def put(self, name):
        self.now_ns += MS
        return not self.call("put", name)

    def exists(self):
        return [bool(self.call("exists", name)) for name in NAMES]

    def tiers(self):
        told = {name: self.pool.replicas(G, ((StreamId(name), 0, 1),), ((0, 1),)) for name in NAMES}
        return {name: {tier.value for tier, runs in tiers.items() if runs} for name, tiers in told.items()}


def twin_with_disk():
    disks = Disks(AMPLE, 1, (BLOCK_BYTES,), AMPLE, promotion=Promotion(2, 1, SECOND))
    return Twin(disks)


def real_tiers(pool):
    told = pool.tiers(list(map(str, NAMES)))
    return {name: told[str(name)] for name in NAMES}


def put_patiently(client, name):
    """While memory is full of what is being written the master refuses."""
    deadline = time.monotonic() + 15
    while client.put(str(name), bytes(BLOCK_BYTES)) != 0:
        assert time.monotonic() < deadline, "nothing leaves memory"
        time.sleep(0.05)


def await_tiers(pool, holds):
    deadline = time.monotonic() + 20
    while not holds(tiers := real_tiers(pool)):
        assert time.monotonic() < deadline, tiers
        time.sleep(0.1)
    return tiers


def in_memory(tiers):
    return sum("memory" in held for held in tiers.values())


def check_kept(tiers):
    """Memory is at its watermark at most, and everything that is not there is on disk."""
    assert CAPACITY / 2 < in_memory(tiers) <= WATERMARK * CAPACITY
    assert all(tiers.values()), "something is lost"
    assert sum(held == {"disk"} for held in tiers.values()) >= STORED - WATERMARK * CAPACITY


@pytest.mark.store
def test_a_disk_keeps_reads_and_gives_back_what_a_real_one_does(tmp_path):
    twin, pool = twin_with_disk(), DiskPool(tmp_path, flags=(f"--default_kv_lease_ttl={LEASE_MS}",))
    try:
        with pool.client() as client:
            for name in NAMES:
                put_patiently(client, name)
                assert twin.put(name)
            check_kept(await_tiers(pool, lambda tiers: in_memory(tiers) <= WATERMARK * CAPACITY))
            check_kept(twin.tiers())
            assert client.batch_is_exist(list(map(str, NAMES))) == [1] * STORED
            assert all(twin.exists())

            # What is on disk alone in both is not stored again; it is read, and at the second read comes back.
            tiers, twins = real_tiers(pool), twin.tiers()
            name = next(name for name in NAMES if tiers[name] == twins[name] == {"disk"})
            assert client.put(str(name), bytes(BLOCK_BYTES)) == 0 and twin.put(name)
            assert real_tiers(pool)[name] == twin.tiers()[name] == {"disk"}
            assert client.get(str(name)) == bytes(BLOCK_BYTES) and twin.call("get", name)
            time.sleep(2.5)
            twin.now_ns += 3 * SECOND
            assert twin.exists()[name] and real_tiers(pool)[name] == twin.tiers()[name] == {"disk"}, "read once"
            assert client.get(str(name)) == bytes(BLOCK_BYTES) and twin.call("get", name)
            await_tiers(pool, lambda tiers: tiers[name] == {"disk", "memory"})
            twin.now_ns += 2 * SECOND
            assert twin.exists()[name] and twin.tiers()[name] == {"disk", "memory"}

            # What is removed is nowhere.
            assert client.remove(str(name), True) == 0 and twin.call("remove", name)
            assert real_tiers(pool)[name] == twin.tiers()[name] == set()
            assert client.is_exist(str(name)) == 0 and not twin.exists()[name]
    finally:
        pool.kill()


def test_the_check_rejects_a_pool_without_a_disk_and_one_whose_memory_has_everything():
    alone = Twin(None)
    assert all(alone.put(name) for name in NAMES)
    with pytest.raises(AssertionError, match="something is lost"):
        check_kept(alone.tiers())
    with pytest.raises(AssertionError):
        check_kept({name: {ReplicaType.MEMORY.value, ReplicaType.DISK.value} for name in NAMES})

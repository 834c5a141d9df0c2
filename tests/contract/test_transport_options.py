"""What the settings tell Mooncake reaches it: seen at a real master, over TCP."""

import time
from dataclasses import replace

import numpy as np
import pytest
from kvconnector.pool_config import PoolConfig
from kvconnector.replication import Replication
from kvconnector.store import MooncakeStore

from connector.testbed.processes import Master, SegmentOwner
from kvcore.ports import StoreOutcome
from tests.contract.store_contract import StoreUnderTest, content
from tests.contract.test_mooncake_store import NAMESPACES, RPC_TIMEOUT_MS, Arena, MonotonicClock

pytestmark = pytest.mark.store

OK, MISSING, NO_SPACE, UNAVAILABLE = (
    StoreOutcome.OK,
    StoreOutcome.MISSING,
    StoreOutcome.NO_SPACE,
    StoreOutcome.UNAVAILABLE,
)
OBJECT_BYTES = 64 << 10
PATIENCE_S = 20


def join(master, **settings):
    """A client of the pool; those of one test share a namespace."""
    patience = {"local_buffer_bytes": 16 << 20, "rpc_timeout_ms": RPC_TIMEOUT_MS}  # the latter is the process's
    config = PoolConfig(master.address, local_hostname="127.0.0.1", **patience, **settings)
    store = MooncakeStore(config, MonotonicClock())
    arena = Arena(store)
    store.blocks = np.zeros((200, OBJECT_BYTES), np.uint8)
    store.blocks[:] = np.arange(200)[:, None]
    store.register(store.blocks.ctypes.data, store.blocks.nbytes)
    deadline = time.monotonic() + PATIENCE_S
    while not store.join(time.monotonic_ns() + 10**9):
        assert time.monotonic() < deadline, "the pool cannot be joined"
        time.sleep(0.1)
    return StoreUnderTest(store, MonotonicClock(), next(NAMESPACES), arena.make_buffer, arena.read_buffer)


def places(subject, keys):
    """Per key, where its copies in memory are."""
    client = subject.store._link.usable_client()
    found = client.batch_get_replica_desc([subject.store._text(key) for key in keys])
    copies = [[copy for copy in replicas if copy.is_memory_replica()] for replicas in found.values()]
    return [
        {copy.get_memory_descriptor().buffer_descriptor.transport_endpoint for copy in some if str(copy.status)}
        for some in copies
    ]


def put_blocks(subject, keys):
    """Store a large block of its own under each key."""
    buffers = [[(block.ctypes.data, OBJECT_BYTES)] for block in subject.store.blocks[: len(keys)]]
    return subject.store.put(keys, buffers, subject.deadline_ns())


def metric(master, name):
    return next(int(line.split()[1]) for line in master.http("metrics").splitlines() if line.startswith(f"{name} "))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A master and two holders of memory."""
    folder = tmp_path_factory.mktemp("pair")
    master = Master(folder)
    owners = [SegmentOwner(master, folder, 64 << 20) for _ in range(2)]
    yield master, owners
    for owner in owners:
        owner.kill()
    master.kill()


# -- copies ------------------------------------------------------------------------------------------------------------


def test_as_many_copies_are_stored_as_there_are_holders_for(pair):
    master, _ = pair
    for num_replicas, expected in ((1, 1), (2, 2), (3, 2)):
        subject = join(master, replication=Replication(num_replicas=num_replicas))
        keys = subject.keys(8)
        assert subject.put({key: content(number) for number, key in enumerate(keys)}) == [OK] * 8
        assert [len(copies) for copies in places(subject, keys)] == [expected] * 8
        assert subject.get(dict.fromkeys(keys, 96)) == [(OK, content(number)) for number in range(8)]
        subject.store.close()


def test_a_preferred_segment_is_where_objects_go(pair):
    master, _ = pair
    segments = master.http("get_all_segments").split()
    assert len(segments) == 2
    found = []
    for segment in segments:
        subject = join(master, replication=Replication(preferred_segments=(segment,)))
        keys = subject.keys(8)
        assert subject.put({key: content(1) for key in keys}) == [OK] * 8
        (only,) = set(map(frozenset, places(subject, keys)))
        found += only
        subject.store.close()
    assert len(set(found)) == 2, "each segment has its own"
    first = join(master, replication=Replication(preferred_segments=("nowhere:1", segments[0])))
    assert first.put({first.key(1): content(1)}) == [OK]
    assert places(first, [first.key(1)]) == [{found[0]}], "of several the first that there is"
    first.store.close()


def test_a_soft_pin_is_one_for_the_master(pair):
    master, _ = pair
    before = metric(master, "master_soft_pin_key_count")
    for replication in (Replication(soft_pin=True), Replication(soft_pin=True, soft_pin_ttl_ms=60_000), Replication()):
        subject = join(master, replication=replication)
        assert subject.put({key: content(1) for key in subject.keys(5)}) == [OK] * 5
        subject.store.close()
    assert metric(master, "master_soft_pin_key_count") == before + 10


# -- tenants -----------------------------------------------------------------------------------------------------------


def test_tenants_see_nothing_of_each_other_and_keep_to_their_quota(tmp_path):
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n  - name: large\n    quota: 1GB\n  - name: small\n    quota: 1MB\n")
    policy = ["--tenant_quota_connector_type=file", f"--tenant_quota_connector_uri={quotas}"]
    master = Master(tmp_path, ["--enable_multi_tenants=true", *policy])
    owner = SegmentOwner(master, tmp_path, 64 << 20)
    try:
        large = join(master, tenant_id="large")
        small, other = (
            replace(join(master, tenant_id=tenant), namespace=large.namespace) for tenant in ("small", "other")
        )
        (key,) = large.keys(1)
        assert large.put({key: content(1)}) == [OK]
        assert (large.exists([key]), small.exists([key])) == ([OK], [MISSING])
        assert small.put({key: content(2)}) == [OK]
        assert (large.get({key: 96}), small.get({key: 96})) == ([(OK, content(1))], [(OK, content(2))])
        assert NO_SPACE in put_blocks(small, small.keys(40)), "an answer, at which no breaker opens"
        assert other.put({key: content(3)}) == [NO_SPACE], "who is not registered has no quota"
        assert put_blocks(large, large.keys(40)[1:]) == [OK] * 39
    finally:
        owner.kill()
        master.kill()

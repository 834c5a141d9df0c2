"""The simulated pool evicts what a real master evicts: after the lease, oldest first, as many."""

import time

import pytest

from kvcore.runs import num_blocks
from kvcore.types import GroupId, StreamId
from kvsim.pool.store import MooncakePool
from tests.differential.mooncake_master import client_of_master

BLOCK_BYTES = 16 << 10
CAPACITY = 8_192
LEASED = 3_000
BEFORE = 6_960  # 85 % of the capacity
AFTER = 7_414  # 90.5 %: once above the high watermark
WATERMARK, RATIO = 0.9, 0.05
G = GroupId(0)


def twin_presence():
    """Presence per object in the simulated pool after the script both run."""
    pool = MooncakePool(CAPACITY * BLOCK_BYTES, (BLOCK_BYTES,), 60 * 10**9, WATERMARK, RATIO)
    # Each object has a stream of its own: the master knows nothing of sequences.
    for name in range(AFTER):
        if name == BEFORE:
            for leased in range(LEASED):
                assert pool.exists(G, ((StreamId(leased), 0, 1),), ((0, 1),), name)
        assert pool.put(G, ((StreamId(name), 0, 1),), ((0, 1),), name) == ()
    pool.audit()
    return [num_blocks(pool.exists(G, ((StreamId(name), 0, 1),), ((0, 1),), AFTER)) == 1 for name in range(AFTER)]


def master_presence(folder):
    """The same script against mooncake_master and one client on loopback."""
    with client_of_master(folder, CAPACITY * BLOCK_BYTES, 60_000, WATERMARK, RATIO) as client:
        value = bytes(BLOCK_BYTES)
        keys = [f"object-{name}" for name in range(AFTER)]
        assert all(client.put(key, value) == 0 for key in keys[:BEFORE])
        assert client.batch_is_exist(keys[:LEASED]) == [1] * LEASED
        assert all(client.put(key, value) == 0 for key in keys[BEFORE:])
        time.sleep(0.2)  # its eviction thread looks every 10 ms
        return [found == 1 for found in client.batch_is_exist(keys)]


def check(presence):
    """Number of evicted objects, or an assertion: leases hold, and the oldest leases that have expired go first."""
    evicted = [name for name, present in enumerate(presence) if not present]
    assert evicted and evicted[0] >= LEASED, "a leased object is gone"
    # The master picks by lease inside each of its 1,024 shards, the twin over all.
    assert evicted[-1] < LEASED + 2 * len(evicted), "a young object is gone while older ones stay"
    return len(evicted)


@pytest.mark.store
def test_evicts_like_a_real_master(tmp_path):
    # The master goes a few puts over the watermark before its thread looks, and then evicts that share more.
    assert check(master_presence(tmp_path)) == pytest.approx(check(twin_presence()), rel=0.15)


def test_the_check_rejects_other_victims():
    presence = twin_presence()
    num_evicted = check(presence)
    youngest_first = [name < AFTER - num_evicted for name in range(AFTER)]
    ignores_leases = [name >= num_evicted for name in range(AFTER)]
    for wrong in (youngest_first, ignores_leases, [True] * AFTER):
        with pytest.raises(AssertionError):
            check(wrong)

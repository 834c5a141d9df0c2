"""A real mooncake_master, and one client that gives it all the memory it has, on loopback."""

from contextlib import contextmanager

from connector.testbed.processes import Master


@contextmanager
def master_and_client(folder, size_bytes, lease_ms, watermark, ratio, *more):
    """Both, with these flags of the master; both are gone afterwards."""
    from mooncake.store import MooncakeDistributedStore

    flags = [
        f"--default_kv_lease_ttl={lease_ms}",
        f"--eviction_high_watermark_ratio={watermark}",
        f"--eviction_ratio={ratio}",
        *more,
    ]
    master = Master(folder, flags)
    client = MooncakeDistributedStore()
    try:
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", size_bytes, 16 << 20, "tcp", "", master.address) == 0
        yield master, client
    finally:
        client.close()
        master.kill()


@contextmanager
def client_of_master(folder, size_bytes, lease_ms, watermark, ratio):
    """The client alone."""
    with master_and_client(folder, size_bytes, lease_ms, watermark, ratio) as (_, client):
        yield client

"""A pool that engines share: its master, and the memory that is lent to it."""

import contextlib
import json
import time

from connector.testbed.processes import Master, SegmentOwner


class Pool:
    """A master and the memory lent to it; both can be killed and come back."""

    def __init__(self, folder, segment_bytes=256 << 20, flags=()):
        self.folder, self.segment_bytes = folder, segment_bytes
        self.master = Master(folder, flags)
        self.lend()

    def lend(self):
        """Give the store the memory that it lives in."""
        self.owner = SegmentOwner(self.master, self.folder, self.segment_bytes)

    def environment(self):
        """What an engine needs to find the pool."""
        path = self.folder / f"mooncake-{self.master.port}.json"
        path.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": self.master.address,
                    "protocol": "tcp",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": "64MB",
                }
            )
        )
        return {"MOONCAKE_CONFIG_PATH": str(path)}

    @contextlib.contextmanager
    def client(self):
        """A client of the store in the tests' own process."""
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", self.master.address) == 0
        try:
            yield client
        finally:
            client.close()

    def empty(self):
        """Remove everything that is stored."""
        with self.client() as client:
            client.remove_all(True)
        assert not self.master.stored_keys()

    def evict(self, keys):
        """Store other things until the master has evicted all the keys to make room."""
        deadline = time.monotonic() + 40
        with self.client() as client:
            while keys & set(self.master.stored_keys()):
                assert time.monotonic() < deadline, "the master evicts nothing"
                for _ in range(64):
                    client.put(f"filler {time.monotonic_ns()}", bytes(64 << 10))

    def kill(self):
        self.owner.kill()
        self.master.kill()

    def start(self):
        """Come back, empty, at the same address."""
        self.master.start()
        self.lend()

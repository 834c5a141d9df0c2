"""A pool that engines share: its master, and the memory that is lent to it."""

import contextlib
import json
import time

from connector.testbed.processes import PROJECT, DiskOwner, Master, SegmentOwner

SSD_RECIPE = PROJECT / "connector" / "deploy" / "ssd"


class Pool:
    """A master and the memory lent to it; both can be killed and come back."""

    def __init__(self, folder, segment_bytes=256 << 20, flags=()):
        self.folder, self.segment_bytes = folder, segment_bytes
        self.master = Master(folder, flags)
        self.lend()

    def lend(self):
        """Give the store the memory that it lives in."""
        self.owner = SegmentOwner(self.master, self.folder, self.segment_bytes)

    def environment(self, address=None):
        """What an engine needs to find the pool, with its master at another address if that is given."""
        path = self.folder / f"mooncake-{self.master.port}.json"
        path.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": address or self.master.address,
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


class DiskPool(Pool):
    """A pool whose memory has `disk` below it, started as connector/deploy/ssd says, but for sizes and places.

    What is evicted is written in files of 8 objects.
    """

    def __init__(self, folder, segment_bytes=16 << 20, flags=()):
        self.disk = folder / "disk"
        super().__init__(folder, segment_bytes, (f"--flagfile={SSD_RECIPE / 'master.flags'}", *flags))

    def lend(self):
        self.disk.mkdir(exist_ok=True)
        settings = dict(line.split("=", 1) for line in (SSD_RECIPE / "owner.env").read_text().split())
        settings |= {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.disk),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "8",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
        }
        flags = (f"--flagfile={SSD_RECIPE / 'owner.flags'}", f"--global_segment_size={self.segment_bytes}")
        self.owner = DiskOwner(self.master, self.folder, flags, settings)

    def tiers(self, keys):
        """Where each key's object is: "memory", "disk", both or nowhere; nobody's lease is renewed."""
        told = json.loads(self.master.http(f"batch_query_keys?keys={','.join(keys)}"))["data"]
        tiers = (("memory", "values"), ("disk", "local_disk_values"))
        return {key: {tier for tier, name in tiers if told[key].get(name)} for key in keys}

    def press_to_disk(self, keys):
        """Store other things until all the keys are on disk alone."""
        deadline = time.monotonic() + 60
        with self.client() as client:
            while set(map(frozenset, self.tiers(keys).values())) != {frozenset({"disk"})}:
                assert time.monotonic() < deadline, self.tiers(keys)
                for _ in range(32):
                    client.put(f"filler {time.monotonic_ns()}", bytes(64 << 10))
                time.sleep(0.2)

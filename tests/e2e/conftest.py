"""Real engines on one real pool, started once for all tests of a model: starting an engine takes ten seconds."""

import json
import os
import random
from dataclasses import dataclass

import pytest

from tests.e2e.processes import Engine, Master, SegmentOwner
from tests.e2e.tiny_model import write_tiny_model

LOOKUP_DEADLINE_S = 2  # generous, because here engine and lookup share one interpreter and two cores
CONNECTOR = {
    "name": "KVTwinConnector",
    "module": "kvconnector.connector",
    "extra": {"lookup_deadline_ms": LOOKUP_DEADLINE_S * 1_000},
}


class Pool:
    """A master and the memory lent to it; both can be killed and come back."""

    def __init__(self, folder):
        self.folder = folder
        self.master = Master(folder)
        self.owner = SegmentOwner(self.master, folder)

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

    def kill(self):
        self.owner.kill()
        self.master.kill()

    def start(self):
        """Come back, empty, at the same address."""
        self.master.start()
        self.owner = SegmentOwner(self.master, self.folder)


@dataclass
class Engines:
    """`plain` has no connector: what it computes is right. `writer` and `reader` share the pool."""

    pool: Pool
    plain: Engine
    writer: Engine
    reader: Engine

    def store(self, prompts, max_tokens=16):
        """Let the writer compute the prompts; when this returns, all of it is in the pool."""
        answer = self.writer.generate(prompts, max_tokens)
        self.writer.call("settle")
        return answer

    def read(self, prompts, max_tokens=16):
        """Let the reader compute the prompts without its own prefix cache."""
        assert self.reader.call("reset_local")
        answer = self.reader.generate(prompts, max_tokens)
        self.reader.call("settle")
        return answer


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.kill()


@pytest.fixture(scope="session", params=["qwen3", "gemma3"])
def engines(request, pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = write_tiny_model(request.param, folder / "model")
    started = []

    def start(name, connector):
        config = {"model": model, "connector": connector}
        started.append(Engine(config, folder / f"{name}.log", pool.environment()))
        return started[-1]

    try:
        # The first one compiles for all; the others start together.
        plain = start("plain", None).ready()
        writer, reader = start("writer", CONNECTOR), start("reader", CONNECTOR)
        yield Engines(pool, plain, writer.ready(), reader.ready())
    finally:
        for engine in started:
            engine.kill()


@pytest.fixture
def prompt(request):
    """Makes prompts of random tokens; equal numbers give equal prompts, and no other test makes the same."""

    def make(length, number=0):
        rng = random.Random(f"{request.node.nodeid} {number} {os.getpid()}")
        return [rng.randrange(3, 1024) for _ in range(length)]

    return make

"""Real engines on one real pool, started once for all tests of a model: starting an engine takes ten seconds."""

import contextlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.processes import Engine
from tests.e2e.proxy import Proxy

LOOKUP_DEADLINE_S = 5  # generous, because here engine and lookup share one interpreter and two cores
PROXIED_DEADLINE_S = 1
CONNECTOR = {
    "name": "KVTwinConnector",
    "module": "kvconnector.connector",
    "extra": {"lookup_deadline_ms": LOOKUP_DEADLINE_S * 1_000},
}

NUM_GROUPS = {"qwen3": 1, "gemma3": 2}


@dataclass
class Engines:
    """`plain` has no connector: what it computes is right. `writer` and `reader` share the pool, and a control file."""

    model: str
    pool: Pool
    plain: Engine
    writer: Engine
    reader: Engine
    control_file: Path
    num_groups: int

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


@pytest.fixture(scope="session", params=NUM_GROUPS)
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
        control_file = folder / "control.toml"
        connector = {**CONNECTOR, "extra": {**CONNECTOR["extra"], "control_file": str(control_file)}}
        writer, reader = start("writer", connector), start("reader", connector)
        yield Engines(model, pool, plain, writer.ready(), reader.ready(), control_file, NUM_GROUPS[request.param])
    finally:
        for engine in started:
            engine.kill()


@dataclass
class Cramped:
    """An engine that computes 128 tokens a step, with room for 2 to 4 prompts, on a pool for about 20 of 700 tokens."""

    pool: Pool
    engine: Engine

    def generate(self, prompts, max_tokens=16):
        """Without what the engine has cached itself; when this returns, all stores have ended and no block is held."""
        assert self.engine.call("reset_local")
        free_blocks = self.engine.call("free_blocks")
        answer = self.engine.generate(prompts, max_tokens)
        self.engine.call("settle")
        assert self.engine.call("free_blocks") == free_blocks
        return answer


@pytest.fixture(scope="session")
def cramped_and_used(engines, tmp_path_factory):
    """Found through the plugin's entry point, and scheduled asynchronously, as engines on GPUs are.

    The pool evicts only when it is full, and what has not been asked for in two seconds. With leases that are shorter
    than a slow machine takes for a get, loads would fail.
    """
    folder = tmp_path_factory.mktemp("cramped")
    flags = ("--default_kv_lease_ttl=2000", "--eviction_high_watermark_ratio=1")
    pool = Pool(folder, segment_bytes=16 << 20, flags=flags)
    config = {
        "model": engines.model,
        "connector": {
            "name": CONNECTOR["name"],
            "module": None,
            "extra": {**CONNECTOR["extra"], "load_deadline_ms": 60_000, "max_storing_share": 1.0},
        },
        "options": {
            "num_gpu_blocks_override": 48,
            "max_model_len": 1024,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 8,
        },
        "forced": {"scheduler_config": {"async_scheduling": True}},
    }
    engine = Engine(config, folder / "engine.log", pool.environment())
    try:
        yield Cramped(pool, engine.ready())
    finally:
        engine.kill()
        pool.kill()


@pytest.fixture
def cramped(cramped_and_used):
    """With an empty pool: what other tests stored there takes no room."""
    cramped_and_used.pool.empty()
    return cramped_and_used


@dataclass
class Proxied:
    """An engine that finds its pool's master behind a proxy."""

    pool: Pool
    proxy: Proxy
    engine: Engine

    def generate(self, prompts, max_tokens=16):
        """Without the engine's own prefix cache; when this returns, all stores have ended."""
        assert self.engine.call("reset_local")
        answer = self.engine.generate(prompts, max_tokens)
        self.engine.call("settle")
        return answer

    @contextlib.contextmanager
    def slowed(self, delay_s):
        """Each message to and from the master takes longer."""
        self.proxy.delay_s = delay_s
        try:
            yield
        finally:
            self.proxy.delay_s = 0.0


@pytest.fixture(scope="session")
def proxied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxied")
    pool = Pool(folder, flags=("--default_kv_lease_ttl=1000",))
    proxy = Proxy(pool.master.address)
    extra = {**CONNECTOR["extra"], "lookup_deadline_ms": PROXIED_DEADLINE_S * 1_000}
    config = {"model": write_tiny_model("qwen3", folder / "model"), "connector": {**CONNECTOR, "extra": extra}}
    engine = Engine(config, folder / "engine.log", pool.environment(proxy.address))
    try:
        yield Proxied(pool, proxy, engine.ready())
    finally:
        engine.kill()
        proxy.close()
        pool.kill()


@pytest.fixture
def faults():
    """`faults(engine, {...}, ...)`: from now to the test's end its store's client has these faults, and no others.

    See faulty_client; calls are counted from here. Without any fault the client is well again.
    """
    ordered = []

    def order(engine, *faults):
        ordered.append(engine)
        engine.call("order_faults", faults=faults)

    yield order
    for engine in ordered:
        engine.call("order_faults", faults=[])


@pytest.fixture
def prompt(request):
    """Makes prompts of random tokens; equal numbers give equal prompts, and no other test makes the same."""

    def make(length, number=0):
        rng = random.Random(f"{request.node.nodeid} {number} {os.getpid()}")
        return [rng.randrange(3, 1024) for _ in range(length)]

    return make

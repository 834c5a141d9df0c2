"""Blocks that the pool's memory has given to disk: hit, damaged and lost. The pool is that of connector/deploy/ssd."""

import shutil
import time

import numpy as np
import pytest

from connector.testbed.pool import DiskPool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.e2e.test_metrics import Watch

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

LEASE_MS = 500


class Tiered:
    """Two engines of one model on a pool with a disk: one believes what it loads, one verifies it."""

    def __init__(self, folder):
        self.pool = DiskPool(folder, flags=(f"--default_kv_lease_ttl={LEASE_MS}", "--promotion_admission_threshold=1"))
        self.model = write_tiny_model("qwen3", folder / "model")
        self.believing = self._engine(folder, "none")
        self.verifying = self._engine(folder, "checksum")

    def _engine(self, folder, integrity):
        extra = {**CONNECTOR["extra"], "integrity": integrity}
        config = {"model": self.model, "connector": {**CONNECTOR, "extra": extra}}
        return Engine(config, folder / f"{integrity}.log", self.pool.environment())

    def generate(self, engine, tokens):
        """Without the engine's own prefix cache; when this returns, what it stored is stored or refused."""
        assert engine.call("reset_local")
        answer = engine.generate([tokens])
        engine.call("settle")
        return answer

    def put_on_disk(self, engine, tokens):
        """Compute and store the prompt, and let the pool evict it; its right tokens, and its keys."""
        self.pool.empty()  # so that there is room, whatever other tests have left
        answer = self.generate(engine, tokens)
        assert answer["cached"] == [0]
        keys = sorted(self.pool.master.stored_keys())
        assert len(keys) >= 21
        self.pool.press_to_disk(keys)
        return answer["tokens"], keys

    def kill(self):
        for part in (self.believing, self.verifying, self.pool):
            part.kill()


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    tiered = Tiered(tmp_path_factory.mktemp("tiered"))
    try:
        tiered.believing.ready()
        tiered.verifying.ready()
        yield tiered
    finally:
        tiered.kill()


def overwrite_the_disk(pool):
    """Other bytes in every file that has objects, finite as float32."""
    rng = np.random.default_rng(0)
    for path in pool.disk.rglob("*.bucket"):
        path.write_bytes(rng.standard_normal(path.stat().st_size // 4 + 1).astype(np.float32).tobytes())


def test_what_memory_evicted_is_hit_on_disk_and_comes_back_to_memory(tiered, prompt):
    tokens = prompt(700)
    right, keys = tiered.put_on_disk(tiered.believing, tokens)
    watch = Watch(tiered.believing)
    hit = tiered.generate(tiered.believing, tokens)
    assert (hit["cached"], hit["tokens"]) == ([672], right)
    assert watch.changes()["keys_total{load,ok}"] == 21
    deadline = time.monotonic() + 20
    while not any("memory" in tiers for tiers in tiered.pool.tiers(keys).values()):
        assert time.monotonic() < deadline, "nothing is promoted"
        time.sleep(0.2)
    assert tiered.generate(tiered.believing, tokens)["tokens"] == right


def test_damage_on_disk_is_refused_counted_and_computed_by_who_verifies(tiered, prompt):
    tokens = prompt(700)
    right, _ = tiered.put_on_disk(tiered.verifying, tokens)
    overwrite_the_disk(tiered.pool)
    watch = Watch(tiered.verifying)
    answer = tiered.generate(tiered.verifying, tokens)
    assert answer["tokens"] == right
    assert watch.changes()["keys_total{load,bad_content}"] > 0


def test_control_damage_on_disk_changes_the_tokens_of_who_believes(tiered, prompt):
    tokens = prompt(700)
    right, _ = tiered.put_on_disk(tiered.believing, tokens)
    overwrite_the_disk(tiered.pool)
    answer = tiered.generate(tiered.believing, tokens)
    assert answer["cached"] == [672]
    assert answer["tokens"] != right


def test_a_disk_that_is_lost_costs_loads_and_no_token(tiered, prompt):
    """The master still says that the objects exist."""
    tokens = prompt(700)
    right, _ = tiered.put_on_disk(tiered.believing, tokens)
    shutil.rmtree(tiered.pool.disk)
    watch = Watch(tiered.believing)
    for _ in range(2):
        assert tiered.generate(tiered.believing, tokens)["tokens"] == right
    changes = watch.changes()
    assert changes["keys_total{load,missing}"] > 0
    assert "breaker_state{worker}" not in changes

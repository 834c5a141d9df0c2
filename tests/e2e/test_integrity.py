"""With `integrity` a damaged or planted object costs its blocks and no token: it is refused, counted and replaced."""

import itertools
import os
from dataclasses import dataclass

import pytest
from kvconnector.config import ConnectorConfig, Integrity
from kvconnector.jobs import Ended, LoadJob, StoreJob
from kvconnector.pool_config import PoolConfig
from kvconnector.seal import TRAILER_BYTES, SealedStore, seal_of
from kvconnector.store import MooncakeStore

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from kvcore.keys import BlockKey, format_key, namespace_digest
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.e2e.test_metrics import Watch
from tests.e2e.test_pool_hits import overwrite_with_noise
from tests.kvconnector.test_transfer import MonotonicClock
from tests.kvconnector.test_worker import entries, make_worker, outcome, random_cache, step

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

SECRET = "a secret of sixteen bytes"
VARIABLE = "KVTWIN_TEST_SECRET"


def objects_of(pool):
    """All objects of the pool, by key."""
    with pool.client() as client:
        return {key: client.get(key) for key in pool.master.stored_keys()}


def rewrite(pool, change):
    """`change(objects)` gives new bytes for some of the pool's objects, by key; another client plants them."""
    changed = change(objects_of(pool))
    with pool.client() as client:
        for key, data in changed.items():
            assert client.remove(key, True) == 0
            assert client.put(key, data) == 0


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


# -- a worker half on the real store -----------------------------------------------------------------------------------


NAMESPACES = (namespace_digest({"integrity": number, "run": os.getpid()}) for number in itertools.count())


@dataclass
class Worker:
    """One that has its own client, secret and cache."""

    half: object
    cache: object


@pytest.fixture
def workers(pool):
    closing = []

    def make(integrity, secret=SECRET):
        config = ConnectorConfig(
            PoolConfig(pool.master.address, local_hostname="127.0.0.1"),
            integrity=integrity,
            integrity_secret=secret.encode() if integrity is Integrity.KEYED else b"",
        )
        store = MooncakeStore(config.pool, MonotonicClock())
        memory = store if integrity is Integrity.NONE else SealedStore(store, seal_of(config))
        cache = random_cache(512)
        half = make_worker(memory, [[cache]], config=config)
        closing.extend([half.close, store.close])
        return Worker(half, cache)

    yield make
    for close in closing:
        close()


DAMAGE = {
    "a byte of the block": lambda data, other: flip(data, 1_000),
    "a byte of the digest": lambda data, other: flip(data, len(data) - 1),
    "another block's object": lambda data, other: other,
    "no trailer": lambda data, other: data[:-TRAILER_BYTES],
    "zeros": lambda data, other: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("integrity", [Integrity.CHECKSUM, Integrity.KEYED])
def test_what_another_client_planted_is_refused_counted_reported_and_replaced(pool, workers, integrity, damage):
    import torch

    namespace, writer, reader = next(NAMESPACES), workers(integrity), workers(integrity)
    blocks = entries((0, 0), (1, 1), (2, 2))
    step(writer.half, stores=[StoreJob(1, "a", namespace, blocks)])
    assert outcome(writer.half)[3] == [Ended(1, 1, ())]
    names = [format_key(BlockKey(namespace, 0, 0, block.hashes[0])) for block in blocks]
    rewrite(pool, lambda objects: {names[1]: damage(objects[names[1]], objects[names[2]])})
    load = LoadJob(2, "b", namespace, entries((0, 3), (1, 4), (2, 5)))
    step(reader.half, loads=[load])
    assert outcome(reader.half) == ({"b"}, set(), {4}, [Ended(2, 1, (1,), gone=(1,))])
    reason = "bad_length" if damage is DAMAGE["no trailer"] else "bad_content"
    counts = reader.half.tally.take()
    assert (counts["keys_total:load:ok"], counts[f"keys_total:load:{reason}"]) == (2, 1)
    assert names[1] not in pool.master.stored_keys()
    step(writer.half, stores=[StoreJob(3, "b", namespace, blocks)])
    outcome(writer.half)
    step(reader.half, loads=[load])
    assert outcome(reader.half) == ({"b"}, set(), set(), [Ended(2, 1, ())])
    assert torch.equal(reader.cache[3:], writer.cache[:3])


def test_a_writer_with_another_secret_is_a_stranger(workers):
    namespace = next(NAMESPACES)  # in production not even that is the same
    writer = workers(Integrity.KEYED, SECRET[::-1])
    reader = workers(Integrity.KEYED)
    step(writer.half, stores=[StoreJob(1, "a", namespace, entries((0, 0)))])
    outcome(writer.half)
    step(reader.half, loads=[LoadJob(2, "b", namespace, entries((0, 3)))])
    assert outcome(reader.half) == ({"b"}, set(), {3}, [Ended(2, 1, (0,), gone=(0,))])


def test_control_without_integrity_damage_is_loaded(pool, workers):
    import torch

    namespace, writer, reader = next(NAMESPACES), workers(Integrity.NONE), workers(Integrity.NONE)
    step(writer.half, stores=[StoreJob(1, "a", namespace, entries((0, 0)))])
    outcome(writer.half)
    name = format_key(BlockKey(namespace, 0, 0, b"h0"))
    rewrite(pool, lambda objects: {name: flip(objects[name], 1_000)})
    step(reader.half, loads=[LoadJob(2, "b", namespace, entries((0, 3)))])
    assert outcome(reader.half) == ({"b"}, set(), set(), [Ended(2, 1, ())])
    assert not torch.equal(reader.cache[3], writer.cache[0])


# -- a real engine -----------------------------------------------------------------------------------------------------


@dataclass
class Lone:
    """One engine that is its own writer and reader, on a pool of its own."""

    pool: Pool
    engine: Engine

    def generate(self, tokens):
        """Without the engine's own prefix cache; when this returns, all of it is stored."""
        assert self.engine.call("reset_local")
        answer = self.engine.generate([tokens])
        self.engine.call("settle")
        return answer


def start(folder, model, integrity, forced=None, **options):
    pool = Pool(folder)
    extra = {**CONNECTOR["extra"], "integrity": integrity}
    if integrity == "keyed":
        extra["integrity_secret"] = f"env:{VARIABLE}"
    config = {
        "model": write_tiny_model(model, folder / "model"),
        "connector": {**CONNECTOR, "extra": extra},
        "options": options,
        "forced": forced or {},
    }
    return Lone(pool, Engine(config, folder / "engine.log", {**pool.environment(), VARIABLE: SECRET}))


@pytest.fixture(scope="module", params=["qwen3-keyed", "gemma3-checksum"])
def lone(request, tmp_path_factory):
    lone = start(tmp_path_factory.mktemp(request.param), *request.param.split("-"))
    yield lone
    lone.engine.kill()
    lone.pool.kill()


def test_a_sealed_hit_gives_the_same_tokens(lone, prompt):
    tokens = prompt(700)
    missed = lone.generate(tokens)
    hit = lone.generate(tokens)
    assert (missed["cached"], hit["cached"], hit["tokens"]) == ([0], [672], missed["tokens"])


def test_damage_costs_the_load_and_the_next_request_hits_again(lone, prompt):
    tokens = prompt(700)
    lone.pool.empty()
    right = lone.generate(tokens)["tokens"]
    rewrite(lone.pool, lambda objects: {key: flip(data, 100) for key, data in objects.items()})
    watch = Watch(lone.engine)
    damaged = lone.generate(tokens)
    changes = watch.changes()
    assert (damaged["computed"], damaged["tokens"]) == (700 + 15, right)
    assert changes["keys_total{load,bad_content}"] == changes["late_misses_total{}"] >= 21
    assert "keys_total{load,ok}" not in changes
    again = lone.generate(tokens)
    assert (again["cached"], again["tokens"]) == ([672], right)


def test_objects_of_another_prompt_planted_under_these_keys_are_refused(lone, prompt):
    first, second = prompt(700, 1), prompt(700, 2)
    lone.pool.empty()
    lone.generate(second)
    foreign = list(objects_of(lone.pool).values())
    lone.pool.empty()
    right = lone.generate(first)["tokens"]
    rewrite(lone.pool, lambda objects: dict(zip(objects, foreign, strict=False)))
    answer = lone.generate(first)
    assert (answer["computed"], answer["tokens"]) == (700 + 15, right)


def test_noise_of_the_same_length_changes_no_token(lone, prompt):
    """What changes the tokens of an engine that verifies nothing: the control is in test_pool_hits."""
    tokens = prompt(700)
    right = lone.generate(tokens)["tokens"]
    overwrite_with_noise(lone.pool)
    assert lone.generate(tokens)["tokens"] == right


BUSY = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
MODELS = {
    "gemma3": {},
    "lfm2": {"block_size": 128, "mamba_cache_mode": "align"},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_busy_engine_refuses_nothing_of_its_own(model, tmp_path, prompt):
    """What is stored is final, though steps overlap, prompts come in chunks and answers go on in the next block."""
    forced = {
        "scheduler_config": {"async_scheduling": True, "enable_chunked_prefill": True},
        "cache_config": {"enable_prefix_caching": True},
    }
    lone = start(tmp_path, model, "checksum", forced, **BUSY, **MODELS[model])
    prompts = [prompt(length, number) for number, length in enumerate((700, 650, 600, 513, 400, 390, 300, 257))]
    try:
        watch = Watch(lone.engine)
        for _ in range(3):
            assert lone.engine.call("reset_local")
            lone.engine.generate(prompts, max_tokens=90)
            lone.engine.call("settle")
        changes = watch.changes()
        assert changes["keys_total{load,ok}"] > 8
        assert [name for name in changes if "bad_" in name] == []
    finally:
        lone.engine.kill()
        lone.pool.kill()

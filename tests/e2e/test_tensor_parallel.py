"""Two tensor parallel ranks, each a process of its own: what both hold is stored once, and a hit needs both parts."""

import os
import random
from array import array
from dataclasses import dataclass

import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from kvcore.hashing import hash_blocks
from kvcore.keys import parse_key
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine

# Ranks that wait for one another spin: with fewer cores the master does not come to answer within its time.
CORES = os.cpu_count() or 1
enough_cores = pytest.mark.skipif(CORES < 4, reason=f"two engines of two ranks keep 4 cores busy, here are {CORES}")
pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow, enough_cores]

LATENT = {
    "options": {"dtype": "bfloat16", "block_size": 16},
    "forced": {
        "cache_config": {"enable_prefix_caching": True},
        "scheduler_config": {"enable_chunked_prefill": True},
    },
}
MODELS = {
    # title: (model, changes to it, engine, tokens in a block, objects that it is)
    "two heads": ("qwen3", {}, {}, 32, 2),
    "single head": ("qwen3", {"num_key_value_heads": 1}, {}, 32, 1),
    "latent": ("dsv2", {}, LATENT, 16, 1),
}


@dataclass
class Fleet:
    """`plain` has no connector: what it computes is right. The other two share the pool."""

    pool: Pool
    plain: Engine
    writer: Engine
    reader: Engine
    block: int
    num_shards: int
    exact: bool

    def answer(self, engine, tokens, max_tokens=16):
        """Without what the engine itself has cached; when this returns, all stores have ended."""
        assert engine.call("reset_local")
        answer = engine.generate([tokens], max_tokens)
        if engine is not self.plain:
            engine.call("settle")
        return answer["tokens"], answer["cached"]

    def objects(self):
        return {parse_key(key): key for key in self.pool.master.stored_keys()}


@pytest.fixture(scope="module", params=MODELS)
def fleet(request, tmp_path_factory):
    name, changes, engine, *sizes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("ranks")
    pool = Pool(folder)
    model = write_tiny_model(name, folder / "model", changes=changes)
    started = []

    def start(label, connector):
        options = {**engine.get("options", {}), "tensor_parallel_size": 2}
        config = {**engine, "model": model, "connector": connector, "options": options}
        environment = {**pool.environment(), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        started.append(Engine(config, folder / f"{label}.log", environment))
        return started[-1]

    try:
        plain = start("plain", None).ready()
        writer, reader = start("writer", CONNECTOR), start("reader", CONNECTOR)
        yield Fleet(pool, plain, writer.ready(), reader.ready(), *sizes, exact=engine is not LATENT)
    finally:
        for each in started:
            each.kill()
        pool.kill()


def hit_locally(fleet, tokens, computed_len):
    """What an engine without a connector says that has computed so much of the prompt before.

    In bfloat16 the answer depends on what was computed together: only a prompt that was computed whole compares.
    """
    assert fleet.plain.call("reset_local")
    fleet.plain.generate([tokens[:computed_len]], 16)
    answer = fleet.plain.generate([tokens], 16)
    return answer["tokens"], answer["cached"]


def test_what_one_engine_stored_the_other_one_hits_and_objects_are_counted(fleet, prompt):
    fleet.pool.empty()
    tokens = prompt(700)
    computed = fleet.answer(fleet.plain, tokens)
    assert fleet.answer(fleet.writer, tokens) == computed == (computed[0], [0])
    objects = fleet.objects()
    blocks = {key.block_hash for key in objects}
    assert len(blocks) >= 700 // fleet.block
    assert len(objects) == fleet.num_shards * len(blocks)
    assert {key.rank for key in objects} == set(range(fleet.num_shards))
    assert fleet.answer(fleet.reader, tokens) == hit_locally(fleet, tokens, 700)


def test_a_hit_ends_before_the_block_that_one_rank_lacks(fleet, prompt):
    """Case S05."""
    fleet.pool.empty()
    tokens, lost_block = prompt(700), 9
    fleet.answer(fleet.writer, tokens)
    objects, lost_hash = fleet.objects(), hash_blocks(tokens, fleet.block, seed="0")[lost_block]
    (lost,) = [text for key, text in objects.items() if (key.rank, key.block_hash) == (fleet.num_shards - 1, lost_hash)]
    with fleet.pool.client() as client:
        assert client.remove(lost, True) == 0
    hit_len = lost_block * fleet.block
    answer, cached = fleet.answer(fleet.reader, tokens)
    assert cached == [hit_len]
    if fleet.exact:
        assert (answer, cached) == hit_locally(fleet, tokens, hit_len + 1)
    assert lost in fleet.objects().values(), "computed, and stored again"
    assert fleet.answer(fleet.writer, tokens)[1] == [700 // fleet.block * fleet.block]


def test_control_noise_in_one_part_changes_the_tokens(fleet, prompt):
    fleet.pool.empty()
    tokens = prompt(700)
    right, _ = fleet.answer(fleet.writer, tokens)
    noise = random.Random(0)
    with fleet.pool.client() as client:
        for key, text in fleet.objects().items():
            if key.rank == fleet.num_shards - 1:
                size_bytes = client.get_size(text)
                assert client.remove(text, True) == 0
                assert client.put(text, array("f", (noise.gauss(0, 1) for _ in range(size_bytes // 4))).tobytes()) == 0
    noisy, cached = fleet.answer(fleet.reader, tokens)
    assert (cached, noisy == right) == ([700 // fleet.block * fleet.block], False)

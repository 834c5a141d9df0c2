"""Two tensor parallel ranks, each a process of its own: what both hold is stored once, and a hit needs both parts.

Beside them an engine of one rank on the same pool: the two share where an object is the same bytes in both, and
nothing else.
"""

import random
from array import array
from dataclasses import dataclass

import numpy as np
import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from kvcore.hashing import hash_blocks
from kvcore.keys import parse_key
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

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
FEW_CORES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "20",
    "MC_TCP_STATUS_TIMEOUT_SEC": "20",
}
"""Ranks that wait by yielding can keep the pool from a core for longer than the 2 s after which a load is given up."""
PROMPT_LEN = 700
ROUNDING = 1e-3
"""How far apart what different numbers of ranks compute may be."""


@dataclass
class Fleet:
    """`ranks` are two, `whole` is one, both on the pool. `exact`: tokens do not depend on what is computed together."""

    pool: Pool
    ranks: Engine
    whole: Engine
    block: int
    num_shards: int
    exact: bool

    @property
    def hit_len(self):
        """Of a prompt that is all there."""
        return PROMPT_LEN // self.block * self.block

    def answer(self, engine, tokens):
        """(tokens, hit) without what the engine itself has cached; when this returns, all stores have ended."""
        assert engine.call("reset_local")
        return self.hit_locally(engine, tokens)

    def hit_locally(self, engine, tokens):
        """The same with it."""
        answer = engine.generate([tokens], 16)
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

    def start(label, num_ranks):
        options = {**engine.get("options", {}), "tensor_parallel_size": num_ranks}
        config = {**engine, "model": model, "connector": CONNECTOR, "options": options}
        environment = pool.environment() | (FEW_CORES if num_ranks > 1 else {})
        started.append(Engine(config, folder / f"{label}.log", environment))
        return started[-1]

    try:
        whole = start("whole", 1).ready()  # it compiles for both
        yield Fleet(pool, start("ranks", 2).ready(), whole, *sizes, exact=engine is not LATENT)
    finally:
        for each in started:
            each.kill()
        pool.kill()


def without_pool(fleet, tokens, computed_len):
    """What the ranks answer when they have computed so much of the prompt before, and nothing is in the pool."""
    fleet.pool.empty()
    fleet.answer(fleet.ranks, tokens[:computed_len])
    fleet.pool.empty()
    return fleet.hit_locally(fleet.ranks, tokens)


def test_what_the_ranks_stored_they_hit_and_objects_are_counted(fleet, prompt):
    tokens = prompt(PROMPT_LEN)
    right = without_pool(fleet, tokens, PROMPT_LEN)
    assert right[1] == [fleet.hit_len]
    fleet.pool.empty()
    computed = fleet.answer(fleet.ranks, tokens)
    assert computed[1] == [0]
    objects = fleet.objects()
    blocks = {key.block_hash for key in objects}
    assert len(blocks) >= PROMPT_LEN // fleet.block
    assert len(objects) == fleet.num_shards * len(blocks)
    assert {key.rank for key in objects} == set(range(fleet.num_shards))
    assert fleet.answer(fleet.ranks, tokens) == right
    if fleet.exact:
        fleet.pool.empty()
        assert fleet.answer(fleet.whole, tokens) == computed


def test_a_hit_ends_before_the_block_that_one_rank_lacks(fleet, prompt):
    """Case S05."""
    tokens, lost_block = prompt(PROMPT_LEN), 9
    hit_len = lost_block * fleet.block
    right = without_pool(fleet, tokens, hit_len + 1)
    fleet.pool.empty()
    fleet.answer(fleet.ranks, tokens)
    objects, lost_hash = fleet.objects(), hash_blocks(tokens, fleet.block, seed="0")[lost_block]
    (lost,) = [text for key, text in objects.items() if (key.rank, key.block_hash) == (fleet.num_shards - 1, lost_hash)]
    with fleet.pool.client() as client:
        assert client.remove(lost, True) == 0
    answer, cached = fleet.answer(fleet.ranks, tokens)
    assert cached == [hit_len]
    if fleet.exact:
        assert (answer, cached) == right
    assert lost in fleet.objects().values(), "computed, and stored again"
    assert fleet.answer(fleet.ranks, tokens)[1] == [fleet.hit_len]


def test_engines_of_one_and_two_ranks_share_what_is_the_same_in_both(fleet, prompt):
    """With two heads it is nothing: an object of both is none of one. What is shared differs by rounding at most."""
    tokens, stored = prompt(PROMPT_LEN), []
    for writer, reader in ((fleet.whole, fleet.ranks), (fleet.ranks, fleet.whole)):
        fleet.pool.empty()
        computed = fleet.answer(writer, tokens)
        assert computed[1] == [0]
        stored.append(prompt_values(fleet, tokens))
        answer, cached = fleet.answer(reader, tokens)
        assert cached == [fleet.hit_len if fleet.num_shards == 1 else 0]
        if fleet.exact:
            assert answer == computed[0]
    assert len({key.namespace for key in fleet.objects()}) == fleet.num_shards
    if fleet.num_shards == 1:
        one, two = (np.stack(values) for values in stored)
        assert np.abs(one - two).max() < ROUNDING
        assert np.abs(one - np.roll(two, 1, axis=0)).max(axis=1).min() > 10 * ROUNDING, "control: of other blocks"


def prompt_values(fleet, tokens):
    """The prompt's objects as numbers, block by block; of a latent the first of two layers.

    With a latent, vLLM 0.32 on CPU computes something else on two ranks than on one, whatever is in the pool: of five
    prompts the answers to five differed, in float32 too. The first layer depends on no attention.
    """
    texts = {key.block_hash: text for key, text in fleet.objects().items()}
    with fleet.pool.client() as client:
        data = [client.get(texts[block_hash]) for block_hash in hash_blocks(tokens, fleet.block, seed="0")]
    if fleet.exact:
        return [np.frombuffer(each, np.float32) for each in data]
    layers = [np.frombuffer(each[: len(each) // 2], np.uint16) for each in data]
    return [(layer.astype(np.uint32) << 16).view(np.float32) for layer in layers]


def test_control_noise_in_one_part_changes_the_tokens(fleet, prompt):
    fleet.pool.empty()
    tokens = prompt(PROMPT_LEN)
    right, _ = fleet.answer(fleet.ranks, tokens)
    noise = random.Random(0)
    with fleet.pool.client() as client:
        for key, text in fleet.objects().items():
            if key.rank == fleet.num_shards - 1:
                size_bytes = client.get_size(text)
                assert client.remove(text, True) == 0
                assert client.put(text, array("f", (noise.gauss(0, 1) for _ in range(size_bytes // 4))).tobytes()) == 0
    noisy, cached = fleet.answer(fleet.ranks, tokens)
    assert (cached, noisy == right) == ([fleet.hit_len], False)

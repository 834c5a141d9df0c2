"""One pool for vLLM's MooncakeStoreConnector and this one with its keys: each hits what the other one stored.

Both are set up as in connector/deploy/rolling-over.
"""

import json
import tempfile
from dataclasses import dataclass

import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.e2e.test_pool_hits import overwrite_with_noise
from tests.kvconnector.recipes import DEPLOY

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]


def stage_of(recipe):
    """An engine's connector at that stage of the recipe, as patient as a slow machine must be."""
    settings = json.loads((DEPLOY / "rolling-over" / f"{recipe}.json").read_text(encoding="utf-8"))
    ours = settings["kv_connector"] == CONNECTOR["name"]
    return {
        "name": settings["kv_connector"],
        "module": CONNECTOR["module"] if ours else None,
        "extra": {**settings["kv_connector_extra_config"], **(CONNECTOR["extra"] if ours else {})},
    }


THEIRS, OURS = stage_of("before"), stage_of("during")

MODELS = {
    "qwen3": {},
    "gemma3": {},  # a window beside full attention
    "lfm2": {"options": {"block_size": 128, "mamba_cache_mode": "align"}},
    "dsv2": {
        "options": {"dtype": "bfloat16", "block_size": 16},
        "forced": {
            "cache_config": {"enable_prefix_caching": True},
            "scheduler_config": {"enable_chunked_prefill": True},
        },
    },
}

NUM_GROUPS = {"qwen3": 1, "gemma3": 2, "lfm2": 2, "dsv2": 1}


@dataclass
class Fleet:
    """`plain` has no connector: what it computes is right. The other two share the pool, and no cache else."""

    pool: Pool
    plain: Engine
    ours: Engine
    theirs: Engine
    num_groups: int

    def answer(self, engine, prompts, max_tokens=16):
        """Without what the engine itself has cached; when this returns, all stores have ended."""
        assert engine.call("reset_local")
        answer = engine.generate(prompts, max_tokens)
        engine.call("settle")
        return answer

    def objects(self):
        """All that is stored: bytes by key."""
        with self.pool.client() as client:
            return {key: client.get(key) for key in self.pool.master.stored_keys()}

    def pair(self, writer):
        """(writer, reader)."""
        return (self.ours, self.theirs) if writer == "ours" else (self.theirs, self.ours)


@pytest.fixture(scope="module", params=MODELS)
def fleet(request, tmp_path_factory):
    """Their requests fail when a lease runs out during a get, which takes seconds on a slow machine."""
    folder = tmp_path_factory.mktemp(f"fleet-{request.param}")
    pool = Pool(folder, flags=("--default_kv_lease_ttl=60000",))
    model = write_tiny_model(request.param, folder / "model")
    started = []

    def start(name, connector, **environment):
        config = {"model": model, "connector": connector, **MODELS[request.param]}
        started.append(Engine(config, folder / f"{name}.log", {**pool.environment(), **environment}))
        return started[-1]

    with tempfile.TemporaryDirectory() as sockets:  # theirs listens there, and a longer path would not do
        try:
            # The first one compiles for all; the others start together.
            plain = start("plain", None).ready()
            ours, theirs = start("ours", OURS), start("theirs", THEIRS, VLLM_RPC_BASE_PATH=sockets)
            yield Fleet(pool, plain, ours.ready(), theirs.ready(), NUM_GROUPS[request.param])
        finally:
            for engine in started:
                engine.kill()
            pool.kill()


@pytest.fixture(params=["theirs", "ours"])
def writer(request):
    return request.param


@pytest.mark.parametrize("length", [700, 768])
def test_each_hits_what_the_other_one_stored(fleet, prompt, writer, length):
    """In bfloat16 a hit need not say what a recomputation says, wherever it comes from."""
    tokens = prompt(length)
    missed, hit_locally = (fleet.plain.generate([tokens], 40) for _ in range(2))
    writer, reader = fleet.pair(writer)
    stored = fleet.answer(writer, [tokens], 40)
    assert (stored["cached"], stored["tokens"]) == ([0], missed["tokens"])
    hit = fleet.answer(reader, [tokens], 40)
    assert hit["cached"] == hit_locally["cached"]
    assert hit["cached"][0] >= 640
    assert hit["tokens"] == hit_locally["tokens"]


@pytest.mark.parametrize("fleet", ["qwen3", "gemma3"], indirect=True)
def test_control_noise_in_the_pool_changes_the_tokens(fleet, prompt, writer):
    tokens = prompt(700)
    writer, reader = fleet.pair(writer)
    right = fleet.answer(writer, [tokens])["tokens"]
    overwrite_with_noise(fleet.pool)
    noisy = fleet.answer(reader, [tokens])
    assert noisy["cached"] == [672]
    assert noisy["tokens"] != right


def test_both_store_the_same_bytes_under_the_same_keys(fleet, prompt):
    """Ours stores the answer's blocks too."""
    tokens, objects = prompt(700), []
    for engine in (fleet.theirs, fleet.ours):
        fleet.pool.empty()
        assert fleet.answer(engine, [tokens])["cached"] == [0]
        objects.append(fleet.objects())
    theirs, ours = objects
    assert len({key.partition("@group:")[2].partition("@")[0] for key in theirs}) == fleet.num_groups
    assert all(key.startswith("fleet@model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:") for key in theirs)
    assert {key: ours.get(key) for key in theirs} == theirs
    assert len(set(theirs.values())) == len(theirs)


@pytest.mark.parametrize("fleet", ["qwen3", "gemma3"], indirect=True)
def test_a_conversation_goes_from_one_to_the_other_and_back(fleet, prompt):
    tokens, hits = prompt(200), []
    for turn, engine in enumerate([fleet.theirs, fleet.ours, fleet.theirs, fleet.ours, fleet.ours]):
        right = fleet.plain.generate([tokens], 40)["tokens"]
        answer = fleet.answer(engine, [tokens], 40)
        assert answer["tokens"] == right
        hits.append(answer["cached"][0])
        tokens = tokens + right[0] + prompt(60, turn + 1)
    # A turn is 100 tokens. Theirs stores no block of an answer, ours all but the answer's last token.
    assert hits == [0, 192, 320, 384, 512]

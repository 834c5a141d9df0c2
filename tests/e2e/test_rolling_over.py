"""One pool for vLLM's MooncakeStoreConnector and this one with its keys: each hits what the other one stored."""

import tempfile
from dataclasses import dataclass

import pytest

from tests.e2e.conftest import CONNECTOR, Pool
from tests.e2e.processes import Engine
from tests.e2e.test_pool_hits import overwrite_with_noise
from tests.e2e.tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

OURS = {**CONNECTOR, "extra": {**CONNECTOR["extra"], "key_format": "vllm", "cache_prefix": "fleet"}}
THEIRS = {"name": "MooncakeStoreConnector", "extra": {"cache_prefix": "fleet"}}


@dataclass
class Fleet:
    """`plain` has no connector: what it computes is right. The other two share the pool, and no cache else."""

    pool: Pool
    plain: Engine
    ours: Engine
    theirs: Engine

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


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def fleet(request, pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"fleet-{request.param}")
    model = write_tiny_model(request.param, folder / "model")
    started = []

    def start(name, connector, **environment):
        config = {"model": model, "connector": connector}
        started.append(Engine(config, folder / f"{name}.log", {**pool.environment(), **environment}))
        return started[-1]

    with tempfile.TemporaryDirectory() as sockets:  # theirs listens there, and a longer path would not do
        try:
            # The first one compiles for all; the others start together.
            plain = start("plain", None).ready()
            ours, theirs = start("ours", OURS), start("theirs", THEIRS, VLLM_RPC_BASE_PATH=sockets)
            yield Fleet(pool, plain, ours.ready(), theirs.ready())
        finally:
            for engine in started:
                engine.kill()


@pytest.fixture(params=["theirs", "ours"])
def writer(request):
    return request.param


def test_each_hits_what_the_other_one_stored(fleet, prompt, writer):
    prompts = [prompt(700), prompt(704, 1), prompt(100, 2)]
    right = fleet.plain.generate(prompts)["tokens"]
    writer, reader = fleet.pair(writer)
    stored = fleet.answer(writer, prompts)
    assert (stored["cached"], stored["tokens"]) == ([0, 0, 0], right)
    hit = fleet.answer(reader, prompts)
    assert hit["cached"] == [672, 672, 96]
    assert hit["tokens"] == right


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
    assert len(theirs) >= 21
    assert all(key.startswith("fleet@model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:") for key in theirs)
    assert {key: ours.get(key) for key in theirs} == theirs
    assert len(set(theirs.values())) == len(theirs)


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

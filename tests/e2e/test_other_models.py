"""Latent attention and recurrent layers, short convolutions and gated delta nets, hit like the engine's own cache."""

import pytest

from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]


@pytest.fixture
def engine(pool, tmp_path):
    """Starts an engine with a model of that name; its own prefix cache is on, which vLLM denies MLA on some CPUs."""
    started = []

    def start(model, **options):
        folder = write_tiny_model(model, tmp_path / "model")
        forced = {"cache_config": {"enable_prefix_caching": True}, "scheduler_config": {"enable_chunked_prefill": True}}
        config = {"model": folder, "connector": CONNECTOR, "options": options, "forced": forced}
        started.append(Engine(config, tmp_path / "engine.log", pool.environment()))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def computed_and_hit(engine, tokens, max_tokens=40):
    """The answers without any cache, from the engine's own, and from the pool."""
    computed, own = engine.generate([tokens], max_tokens), engine.generate([tokens], max_tokens)
    engine.call("settle")
    assert engine.call("reset_local")
    from_pool = engine.generate([tokens], max_tokens)
    engine.call("settle")
    return computed, own, from_pool


def test_latent_attention_hits_like_the_engine_s_own_cache(engine, prompt):
    """In bfloat16 a hit need not say what a recomputation says, wherever it comes from."""
    engine = engine("dsv2", dtype="bfloat16")
    free_blocks = engine.call("free_blocks")
    for number in range(3):
        computed, own, from_pool = computed_and_hit(engine, prompt(700, number))
        assert computed["cached"] == [0]
        assert from_pool["cached"] == own["cached"]
        assert 640 <= own["cached"][0] < 700
        assert from_pool["tokens"] == own["tokens"]
    assert engine.call("free_blocks") == free_blocks


def test_gated_delta_net_states_hit_like_the_engine_s_own(engine, prompt):
    """The next turn goes on from the state that the last prompt left behind, as for every recurrent model."""
    engine = engine("qwen3next", dtype="bfloat16", mamba_cache_mode="align")
    free_blocks = engine.call("free_blocks")
    question = prompt(700)
    computed, own, from_pool = computed_and_hit(engine, question)
    (block,) = own["cached"]  # chosen by the engine, so that a state is as large as the KV of a block
    assert (computed["cached"], from_pool["cached"], 350 < block < 700) == ([0], [block], True)
    assert from_pool["tokens"] == own["tokens"]
    next_turn = [*question, *engine.generate([question], max_tokens=block - 60)["tokens"][0], *prompt(60, 1)]
    first, own, from_pool = computed_and_hit(engine, next_turn)
    assert (first["cached"], own["cached"], from_pool["cached"]) == ([block], [2 * block], [2 * block])
    assert from_pool["tokens"] == own["tokens"]
    assert engine.call("free_blocks") == free_blocks


def test_recurrent_states_hit_like_the_engine_s_own(engine, prompt):
    """A state is stored where the engine keeps one, with the attention blocks before it."""
    engine = engine("lfm2", block_size=128, mamba_cache_mode="align")
    free_blocks = engine.call("free_blocks")
    for number in range(3):
        computed, own, from_pool = computed_and_hit(engine, prompt(700, number))
        assert (computed["cached"], own["cached"], from_pool["cached"]) == ([0], [640], [640])
        assert from_pool["tokens"] == own["tokens"] == computed["tokens"]
    assert engine.call("free_blocks") == free_blocks


def test_the_next_turn_of_a_recurrent_model_goes_on_from_the_last(engine, prompt):
    """The engine keeps no state of generated tokens; the next prompt leaves one behind its own, for all who follow."""
    engine = engine("lfm2", block_size=128, mamba_cache_mode="align")
    question = prompt(700)
    (answer,) = engine.generate([question], max_tokens=240)["tokens"]
    first, own, from_pool = computed_and_hit(engine, [*question, *answer, *prompt(60, 7)])
    assert (first["cached"], own["cached"], from_pool["cached"]) == ([640], [896], [896])
    assert from_pool["tokens"] == own["tokens"]

"""Engine A stores, engine B in another process hits, and the tokens are those of an engine without connector."""

import numpy as np
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK = 32


def test_what_one_engine_stored_another_one_hits(engines, prompt):
    tokens = prompt(700)
    missed = engines.plain.generate([tokens])
    hit_locally = engines.plain.generate([tokens])
    assert (missed["cached"], hit_locally["cached"]) == ([0], [672])

    stored = engines.store([tokens])
    assert (stored["cached"], stored["tokens"]) == ([0], missed["tokens"])
    hit = engines.read([tokens])
    assert (hit["cached"], hit["computed"]) == ([672], 700 - 672 + 15)
    assert hit["tokens"] == missed["tokens"] == hit_locally["tokens"]


def test_control_noise_in_the_pool_changes_the_tokens(engines, prompt):
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    overwrite_with_noise(engines.pool)
    noisy = engines.read([tokens])
    assert noisy["cached"] == [672]
    assert noisy["tokens"] != right


def test_a_hit_leaves_at_least_one_token_to_compute(engines, prompt):
    """Case S04: 22 whole blocks, of which a token must be computed."""
    tokens = prompt(704)
    right = engines.store([tokens])["tokens"]
    hit = engines.read([tokens])
    assert (hit["cached"], hit["computed"]) == ([672], 32 + 15)
    assert hit["tokens"] == right


def test_a_shorter_and_a_forked_prompt_hit_what_they_share(engines, prompt):
    tokens = prompt(700)
    engines.store([tokens])
    shorter, forked = tokens[:400], tokens[:500] + prompt(200, 1)
    right = engines.plain.generate([shorter, forked])["tokens"]
    hit = engines.read([shorter, forked])
    assert hit["cached"] == [384, 480]
    assert hit["tokens"] == right


def test_the_answer_is_stored_too(engines, prompt):
    tokens = prompt(100)
    answer = engines.store([tokens], max_tokens=64)["tokens"][0]
    next_turn = tokens + answer + prompt(40, 1)
    right = engines.plain.generate([next_turn])["tokens"]
    hit = engines.read([next_turn])
    assert hit["cached"] == [(100 + 63) // BLOCK * BLOCK]  # the last token of an answer is never computed
    assert hit["tokens"] == right


def test_many_requests_at_once(engines, prompt):
    prompts = [prompt(200 + 37 * number, number) for number in range(12)]
    right = engines.plain.generate(prompts)["tokens"]
    free_blocks = engines.reader.call("free_blocks")
    engines.store(prompts)
    hit = engines.read(prompts)
    assert hit["cached"] == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in prompts]
    assert hit["tokens"] == right
    assert engines.reader.call("free_blocks") == free_blocks


def overwrite_with_noise(pool):
    """Give every object of the pool other bytes of the same length, finite as float32."""
    rng = np.random.default_rng(0)
    with pool.client() as client:
        for key in pool.master.stored_keys():
            size = client.get_size(key)
            assert client.remove(key, True) == 0
            assert client.put(key, rng.standard_normal(size // 4).astype(np.float32).tobytes()) == 0

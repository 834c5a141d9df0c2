"""Whatever the engine does with its requests, tokens are those of an engine without connector, and no block is lost."""

import random
import time
from collections import Counter

import pytest

from tests.e2e.test_faults import resumes_hitting

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK = 32


HELD_PUTS = {"on": "put", "do": "hold"}


def test_a_conversation_that_moves_between_engines(engines, prompt):
    """Each turn hits all that the turn before computed, elsewhere."""
    tokens, question = prompt(100), []
    for turn in range(4):
        right = engines.plain.generate([tokens], 40)["tokens"]
        engine = (engines.writer, engines.reader)[turn % 2]
        assert engine.call("reset_local")
        answer = engine.generate([tokens], 40)
        engine.call("settle")
        assert answer["tokens"] == right
        # The last token of an answer is sampled, but not computed.
        assert answer["cached"] == [(len(tokens) - len(question) - 1) // BLOCK * BLOCK if turn else 0]
        question = prompt(50, turn)
        tokens = tokens + right[0] + question


def test_aborts_at_any_time_leave_nothing_behind(engines, prompt):
    """Half of the requests may be aborted while they wait, load, compute or store; the other half ends as it should."""
    prompts = [prompt(100 + 40 * number, number) for number in range(12)]
    right = engines.plain.generate(prompts, 30)["tokens"]
    engines.store(prompts, 30)
    free_blocks, num_aborted = engines.reader.call("free_blocks"), 0
    for seed in range(3):
        doomed = random.Random(seed).sample(range(12), 6)
        assert engines.reader.call("reset_local")
        tokens = engines.reader.call("abort_storm", prompts=prompts, doomed=doomed, seed=seed, max_tokens=30)
        engines.reader.call("settle")
        aborted = [number for number in range(12) if tokens[number] is None]
        assert set(aborted) <= set(doomed)
        assert all(tokens[number] == right[number] for number in range(12) if number not in aborted)
        assert engines.reader.call("free_blocks") == free_blocks
        num_aborted += len(aborted)
    assert num_aborted > 0


def test_a_reset_fails_while_stores_read_blocks_and_succeeds_after(engines, prompt, faults):
    tokens = prompt(700)
    faults(engines.writer, HELD_PUTS)
    right = engines.writer.generate([tokens])["tokens"]
    assert not engines.writer.call("reset_local")
    faults(engines.writer)
    engines.writer.call("settle")
    assert engines.writer.call("reset_local")
    hit = engines.read([tokens])
    assert (hit["cached"], hit["tokens"]) == ([672], right)


@pytest.mark.parametrize("after_steps", [2, 11, 20])
def test_requests_whose_blocks_are_taken_away_start_over(engines, prompt, after_steps):
    worked, tokens, right = taken_away(engines, prompt, after_steps, quiet=True)
    assert worked
    assert tokens == right


def test_requests_go_on_when_a_store_keeps_their_blocks_from_being_taken_away(engines, prompt, faults):
    faults(engines.writer, HELD_PUTS)
    worked, tokens, right = taken_away(engines, prompt, 20, quiet=False)
    assert not worked
    assert tokens == right


def taken_away(engines, prompt, after_steps, quiet):
    """Whether a reset under running requests worked, their tokens, and the right ones."""
    prompts = [prompt(300 + 100 * number, number) for number in range(4)]
    right = engines.plain.generate(prompts, 60)["tokens"]
    worked, tokens = engines.writer.call(
        "reset_under_requests", prompts=prompts, max_tokens=60, after_steps=after_steps, quiet=quiet
    )
    return worked, tokens, right


def test_a_reset_of_the_connector_leaves_the_pool_s_content_behind(cramped, prompt):
    """Case S23: what other engines share stays, so the call succeeds whatever the pool does."""
    tokens = prompt(700)
    right = cramped.generate([tokens])["tokens"]
    assert cramped.generate([tokens])["cached"] == [672]
    assert cramped.engine.call("reset_local", connector=True)
    for cached in (0, 672):
        answer = cramped.generate([tokens])
        assert (answer["cached"], answer["tokens"]) == ([cached], right)


def test_a_full_pool_rejects_stores_and_takes_later_ones(engines, cramped, prompt):
    """Case S21, of many prompts; of one in test_case_pool."""
    prompts = [prompt(700, number) for number in range(26)]
    right = engines.plain.generate(prompts, 8)["tokens"]
    before = outcomes(cramped, "store")
    for _ in range(2):
        assert cramped.generate(prompts, 8)["tokens"] == right
    assert set(outcomes(cramped, "store") - before) == {"ok", "no_space"}
    deadline = time.monotonic() + 50
    while cramped.generate(prompts[:1], 8)["cached"] != [672]:  # the master evicts in its own time
        assert time.monotonic() < deadline


def test_what_is_evicted_while_its_load_waits_is_recomputed(cramped, prompt, faults):
    """Case S13, of one request; of 16 at once in test_case_pool."""
    tokens = prompt(700)
    right = cramped.generate([tokens])["tokens"][0]
    stored, free_blocks = set(cramped.pool.master.stored_keys()), cramped.engine.call("free_blocks")
    assert cramped.engine.call("reset_local")
    before = outcomes(cramped, "load")
    faults(cramped.engine, {"on": "get", "do": "hold"})
    request_id = cramped.engine.call("begin_load", prompt=tokens)
    cramped.pool.evict(stored)
    faults(cramped.engine)
    assert cramped.engine.call("finish", request_id=request_id) == right
    cramped.engine.call("settle")
    assert set(outcomes(cramped, "load") - before) == {"missing"}
    assert cramped.engine.call("free_blocks") == free_blocks


@pytest.mark.parametrize("engines", ["qwen3"], indirect=True)
def test_a_frozen_holder_of_the_bytes_delays_a_request_by_seconds(engines, prompt):
    """Mooncake's own patience with a holder is 30 s a piece, which the connector shortens."""
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    engines.pool.owner.process.freeze()
    try:
        start = time.monotonic()
        answer = engines.read([tokens])
        assert (answer["cached"], answer["tokens"]) == ([0], right)
        assert time.monotonic() - start < 25
    finally:
        engines.pool.owner.process.thaw()
    assert resumes_hitting(lambda: engines.read([tokens]))["tokens"] == right


def outcomes(cramped, operation):
    """How many blocks were loaded or stored so far, by outcome."""
    return Counter(cramped.engine.call("outcomes")[operation])

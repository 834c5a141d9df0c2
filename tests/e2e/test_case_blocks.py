"""Whose block it is: what a store reads is what its key names, and a block that nobody needs is free."""

import numpy as np
import pytest

from tests.e2e.test_integrity import objects_of

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

ATOL = 1e-4
"""Prompts computed in other chunks differ by rounding; the values are of the order of 1."""


def values_of(pool):
    """What each object holds, by what its key says of it beside the namespace."""
    return {name.partition("-")[2]: np.frombuffer(data, np.float32) for name, data in objects_of(pool).items()}


def differing(pool, others):
    """Of the objects that are in both pools, those whose values differ; and how many there are."""
    found, right = values_of(pool), values_of(others)
    both = [(values, right[name]) for name, values in found.items() if name in right]
    return sum(not np.allclose(values, expected, rtol=0, atol=ATOL) for values, expected in both), len(both)


def test_every_object_holds_what_its_key_names_though_blocks_changed_hands(engines, cramped, prompt, faults):
    """Case S01: each put waits for half a second; meanwhile one of two requests is preempted, its room used."""
    prompts = [prompt(700, number) for number in range(2)]
    right = engines.store(prompts, 90)["tokens"]
    faults(cramped.engine, {"on": "put", "do": "delay", "seconds": 0.5})
    answer = cramped.generate(prompts, 90)
    assert answer["tokens"] == right
    assert answer["preemptions"] > 0
    num_wrong, num_compared = differing(cramped.pool, engines.pool)
    assert num_wrong == 0
    assert num_compared == len(cramped.pool.master.stored_keys()) >= 2 * 700 // 32


def test_control_objects_of_another_prompt_differ(engines, cramped, prompt):
    """Bytes of the same kind under these keys would be found out."""
    tokens, other = prompt(700), prompt(700, 1)
    engines.store([tokens, other])
    cramped.generate([other])
    foreign = list(objects_of(cramped.pool).values())
    cramped.pool.empty()
    cramped.generate([tokens])
    with cramped.pool.client() as client:
        for name, data in zip(cramped.pool.master.stored_keys(), foreign, strict=False):
            assert client.remove(name, True) == client.put(name, data) == 0
    num_wrong, num_compared = differing(cramped.pool, engines.pool)
    assert num_wrong == num_compared > 0


def test_jobs_name_the_blocks_of_their_request_through_preemption_and_chunked_prefill(engines, cramped, prompt):
    """Case S10: a tiny cache, 30 long requests, cold and warm."""
    prompts = [prompt(300, number) for number in range(30)]
    right = engines.plain.generate(prompts, 100)["tokens"]
    cramped.engine.call("wrong_tables")
    cold, warm = cramped.generate(prompts, 100), cramped.generate(prompts, 100)
    assert cold["tokens"] == warm["tokens"] == right
    assert min(cold["preemptions"], warm["preemptions"]) > 0
    num_hits = warm["cached"].count(288)  # of the model with windows the pool has not room for all
    assert num_hits >= 15
    assert cold["cached"] == [0] * 30
    assert warm["computed"] < cold["computed"] - num_hits * 288 / 2
    num_compared, wrong = cramped.engine.call("wrong_tables")
    assert wrong == []
    assert num_compared > 90


def test_errors_of_the_store_pin_nothing_and_what_they_cost_is_stored_later(engines, prompt, faults):
    """Case S02: the first 20 questions and the first 20 saves raise, then the store is well."""
    prompts = [prompt(40, number) for number in range(200)]
    ill = [{"on": operation, "do": "raise", "calls": [0, 20]} for operation in ("exists", "put")]
    engines.writer.call("settle")
    free_blocks, before = engines.writer.call("free_blocks"), engines.writer.call("metrics")
    faults(engines.writer, *ill)
    right = engines.store(prompts, 2)["tokens"]
    assert engines.writer.call("free_blocks") == free_blocks
    after = engines.writer.call("metrics")
    for operation in ("lookup", "store"):
        name = f"keys_total{{{operation},unavailable}}"
        assert after[name] - before[name] >= 20
    engines.store(prompts, 2)  # it finds them in its own cache, and offers what was refused
    hit = engines.read(prompts, 2)
    assert (hit["cached"], hit["tokens"]) == ([32] * 200, right)

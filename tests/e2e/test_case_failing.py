"""A pool that is late costs a hit, and where a load that fails is to be an error, it is that request's alone."""

import time

import pytest

from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR, NUM_GROUPS
from tests.e2e.faulty_client import MISSING
from tests.e2e.processes import Engine
from tests.e2e.test_metrics import Watch

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

MODEL = "gemma3"
DEADLINE_S = 2


@pytest.fixture(scope="module")
def strict(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strict")
    connector = {
        **CONNECTOR,
        "extra": {**CONNECTOR["extra"], "on_load_failure": "fail", "lookup_deadline_ms": DEADLINE_S * 1_000},
    }
    config = {"model": write_tiny_model(MODEL, folder / "model"), "connector": connector}
    engine = Engine(config, folder / "engine.log", pool.environment())
    yield engine.ready()
    engine.kill()


@pytest.mark.parametrize("group", range(NUM_GROUPS[MODEL]))
def test_a_load_that_lacks_one_block_of_one_group_ends_its_request_and_no_other(strict, prompt, faults, group):
    """Case S07, policy fail."""
    prompts = [prompt(700, number) for number in range(3)]
    right = [strict.generate([tokens])["tokens"][0] for tokens in prompts]
    strict.call("settle")
    assert strict.call("reset_local")
    free_blocks = strict.call("free_blocks")
    faults(strict, {"on": "get", "do": "fail", "code": MISSING, "group": group, "keys": [0]})
    answer = strict.generate([*prompts, prompt(300, 4)])
    strict.call("settle")
    failed = [tokens for tokens in answer["tokens"] if not tokens]
    assert len(failed) == 1
    assert all(tokens in (given, []) for tokens, given in zip(answer["tokens"], right, strict=False))
    assert strict.call("free_blocks") == free_blocks
    faults(strict)
    assert strict.call("reset_local")
    assert strict.generate(prompts)["tokens"] == right


def test_an_answer_that_comes_after_the_deadline_is_a_miss_and_the_next_one_counts(strict, prompt, faults):
    tokens = prompt(700)
    right = strict.generate([tokens])["tokens"]
    strict.call("settle")
    assert strict.call("reset_local")
    watch = Watch(strict)
    faults(strict, {"on": "exists", "do": "late", "seconds": DEADLINE_S + 1, "calls": [0, 1]})
    start = time.monotonic()
    answer = strict.generate([tokens], 1)
    assert DEADLINE_S <= time.monotonic() - start < DEADLINE_S + 1
    assert (answer["cached"], answer["tokens"][0]) == ([0], right[0][:1])
    strict.call("settle")
    assert watch.changes()["keys_total{lookup,timeout}"] > 0
    time.sleep(1.5)  # until the thread that asks is back
    assert strict.call("reset_local")
    hit = strict.generate([tokens])
    assert (hit["cached"], hit["tokens"]) == ([672], right)

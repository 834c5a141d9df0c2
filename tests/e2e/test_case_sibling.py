"""Beside a connector that always wins: what it has not received yet nobody stores, and what it loads is not ours."""

from dataclasses import dataclass

import numpy as np
import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.e2e.test_integrity import objects_of

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

PROMISED_LEN, PROMPT_LEN = 320, 700
NUM_PROMISED, NUM_WHOLE = PROMISED_LEN // 32, PROMPT_LEN // 32
RECEIVED = 0.5
"""What a sibling that has received fills its blocks with."""

SIBLING = {"kv_connector": "Sibling", "kv_connector_module_path": "tests.e2e.sibling", "kv_role": "kv_both"}
OURS = {
    "kv_connector": CONNECTOR["name"],
    "kv_connector_module_path": CONNECTOR["module"],
    "kv_role": "kv_both",
    "kv_connector_extra_config": CONNECTOR["extra"],
}


@dataclass
class Beside:
    """An engine with both connectors, the sibling first."""

    pool: Pool
    engine: Engine

    def generate(self, tokens, promised_len=0, max_tokens=16):
        """Without what the engine has cached; when this returns, all is stored."""
        assert self.engine.call("reset_local")
        self.engine.call("promise", promised_len=promised_len)
        answer = self.engine.generate([tokens], max_tokens)
        self.engine.call("settle")
        return answer

    def stored(self):
        """The values of each object of the pool."""
        return [np.frombuffer(data, np.float32) for data in objects_of(self.pool).values()]


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sibling")
    pool = Pool(folder)
    connector = {"name": "MultiConnector", "extra": {"connectors": [SIBLING, OURS]}}
    config = {"model": write_tiny_model("qwen3", folder / "model"), "connector": connector}
    engine = Engine(config, folder / "engine.log", pool.environment())
    try:
        yield Beside(pool, engine.ready())
    finally:
        engine.kill()
        pool.kill()


def test_nothing_is_stored_before_the_sibling_has_received_it_and_all_of_it_after(beside, prompt):
    """Case S09."""
    beside.pool.empty()
    free_blocks = beside.engine.call("free_blocks")
    beside.generate(prompt(PROMPT_LEN), PROMISED_LEN, 1)
    puts_before, *more = beside.engine.call("promise", promised_len=0)
    assert (puts_before, more) == ([], [])
    received = [bool(np.all(values == RECEIVED)) for values in beside.stored()]
    assert (len(received), sum(received)) == (NUM_WHOLE, NUM_PROMISED)
    assert beside.engine.call("free_blocks") == free_blocks


def test_a_request_that_ends_before_the_sibling_has_received_leaves_nothing_in_the_pool(beside, prompt):
    """Case S09: its blocks were never what their keys name."""
    beside.pool.empty()
    assert beside.engine.call("reset_local")
    free_blocks = beside.engine.call("free_blocks")
    beside.engine.call("promise", promised_len=PROMISED_LEN)
    beside.engine.call("abort_after_steps", prompt=prompt(PROMPT_LEN), num_steps=2)
    assert beside.pool.master.stored_keys() == []
    assert beside.engine.call("free_blocks") == free_blocks


def test_a_sibling_that_wins_leaves_us_nothing_to_load(beside, prompt, faults):
    """Case S08: the pool has the whole prompt."""
    tokens = prompt(PROMPT_LEN)
    beside.pool.empty()
    beside.generate(tokens)
    assert beside.generate(tokens)["cached"] == [672], "alone, ours wins"
    faults(beside.engine)
    assert beside.generate(tokens, PROMISED_LEN)["cached"] == [PROMISED_LEN]
    assert beside.engine.call("calls", operation="get") == []


def test_what_follows_the_sibling_s_blocks_is_stored_from_the_request_s_own(beside, prompt):
    """Case S08: a hit of both says what the request said."""
    tokens = prompt(PROMPT_LEN)
    beside.pool.empty()
    first = beside.generate(tokens, PROMISED_LEN, 40)
    hit = beside.generate(tokens, 0, 40)
    assert (first["cached"], hit["cached"]) == ([PROMISED_LEN], [672])
    assert hit["tokens"] == first["tokens"]


def test_control_what_the_sibling_receives_decides_the_tokens(beside, prompt):
    tokens = prompt(PROMPT_LEN)
    beside.pool.empty()
    received = beside.generate(tokens, PROMISED_LEN)["tokens"]
    beside.pool.empty()
    assert beside.generate(tokens)["tokens"] != received

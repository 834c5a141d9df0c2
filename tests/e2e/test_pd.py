"""Prefill on one engine and decode on another, over NIXL and over Mooncake, with the pool beside them."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from connector.testbed.needs import missing
from connector.testbed.pair import PEERS, STORE, Pair
from connector.testbed.processes import free_port
from tests.e2e import processes
from tests.e2e.conftest import CONNECTOR, Engines
from tests.e2e.test_pool_hits import overwrite_with_noise

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK = 32


class Engine(processes.Engine):
    driver = Path(__file__).with_name("pair_driver.py")


@dataclass
class Disaggregated:
    """A pair, beside engines that each do both; `blocks` are free on either side when nothing is under way."""

    engines: Engines
    pair: Pair
    peer: str
    blocks: list[int]

    def right(self, prompt):
        return self.engines.plain.generate([prompt])["tokens"]

    def answer(self, prompt):
        """(what the prefill side said, what the decode side said)."""
        prefilled, transfer = self.pair.prefilled(prompt)
        return prefilled, self.pair.decoded(prompt, 16, transfer)

    def free_blocks(self):
        return [side.call("free_blocks") for side in (self.pair.prefill, self.pair.decode)]


@pytest.fixture(scope="module", params=PEERS)
def disaggregated(request, engines, pool, tmp_path_factory):
    if reason := missing(request.param):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    pair = Pair(request.param, engines.model, pool, folder, CONNECTOR["extra"], Engine)
    try:
        blocks = [side.call("free_blocks") for side in (pair.prefill, pair.decode)]
        yield Disaggregated(engines, pair, PEERS[request.param], blocks)
    finally:
        pair.kill()


def test_decode_goes_on_with_what_prefill_computed(disaggregated, prompt):
    tokens = prompt(700)
    prefilled, decoded = disaggregated.answer(tokens)
    assert (prefilled["computed"], prefilled["granted_by"]) == (700, {})
    assert (decoded["computed"], decoded["granted_by"]) == (16, {disaggregated.peer: 700})
    assert decoded["tokens"] == disaggregated.right(tokens)
    assert disaggregated.free_blocks() == disaggregated.blocks


def test_metrics_tell_what_came_from_prefill(disaggregated, prompt):
    if disaggregated.peer == PEERS["mooncake"]:
        pytest.skip("vLLM 0.32 has no metrics where a MooncakeConnector is in a MultiConnector")
    before = disaggregated.pair.decode.call("metrics")
    disaggregated.answer(prompt(700))
    after = disaggregated.pair.decode.call("metrics")
    rose = {name: after[name] - before[name] for name in after if "prompt_tokens" in name or "rejected" in name}
    assert {name: by for name, by in rose.items() if by} == {
        "prompt_tokens_total{sibling}": 699,  # the last token of a prompt is always computed
        "prompt_tokens_total{computed}": 1,
    }


def test_control_noise_at_the_prefill_side_changes_the_tokens(disaggregated, prompt):
    tokens = prompt(700)
    _, transfer = disaggregated.pair.prefilled(tokens)
    disaggregated.pair.prefill.call("wait_for_stores")
    disaggregated.pair.prefill.call("spoil")
    decoded = disaggregated.pair.decoded(tokens, 16, transfer)
    assert decoded["granted_by"] == {disaggregated.peer: 700}
    assert decoded["tokens"] != disaggregated.right(tokens)
    assert all(side.call("reset_local") for side in (disaggregated.pair.prefill, disaggregated.pair.decode))


def test_the_next_turn_s_prefill_hits_the_answer_that_decode_stored(disaggregated, prompt):
    tokens = prompt(700)
    _, decoded = disaggregated.answer(tokens)
    next_turn = [*tokens, *decoded["tokens"][0], *prompt(60, 1)]
    prefilled, decoded = disaggregated.answer(next_turn)
    # 672 tokens are in the prefill side's own cache. The engine keeps no window of generated tokens, but the pool does.
    assert (prefilled["granted_by"], prefilled["computed"]) == ({STORE: 32}, len(next_turn) - 704)
    assert (list(decoded["granted_by"]), decoded["computed"]) == ([disaggregated.peer], 16)
    assert decoded["tokens"] == disaggregated.right(next_turn)
    assert disaggregated.free_blocks() == disaggregated.blocks


def test_what_a_pair_stored_hits_elsewhere(disaggregated, prompt):
    tokens, (right,) = prompt(700), disaggregated.right(prompt(700))
    disaggregated.answer(tokens)
    engines = disaggregated.engines
    hit = engines.read([[*tokens, *right[:8]]])
    assert (hit["cached"], hit["tokens"]) == ([704], disaggregated.right([*tokens, *right[:8]]))


def test_control_noise_in_the_pool_changes_what_prefill_says(disaggregated, prompt):
    tokens, prefill = prompt(700), disaggregated.pair.prefill
    disaggregated.answer(tokens)
    overwrite_with_noise(disaggregated.engines.pool)
    assert prefill.call("reset_local")
    noisy = prefill.call("generate", prompts=[tokens], max_tokens=16)
    assert noisy["granted_by"] == {STORE: 672}
    assert noisy["tokens"] != disaggregated.right(tokens)
    prefill.call("settle")
    assert prefill.call("reset_local")


def test_blocks_that_are_not_filled_yet_are_not_stored(disaggregated, prompt):
    """Prefill is frozen before decode has fetched anything, and the request is aborted while it waits."""
    assert keys_of_an_aborted_pull(disaggregated, prompt(700), lambda decode: None) == []


def test_control_blocks_taken_for_filled_would_be_stored(disaggregated, prompt):
    stored = keys_of_an_aborted_pull(disaggregated, prompt(700), lambda decode: decode.call("forget_what_is_filled"))
    assert len(stored) >= 21


def test_a_transfer_that_fails_is_computed_and_what_is_stored_is_right(disaggregated, prompt):
    """There is nobody where the prompt's KV should be."""
    tokens, decode = prompt(700), disaggregated.pair.decode
    _, transfer = disaggregated.pair.prefilled(prompt(700, 1))
    disaggregated.pair.decoded(prompt(700, 1), 16, transfer)
    nowhere = {**transfer, "remote_engine_id": "nobody", "remote_port": free_port()}
    answer = decode.call("generate", prompts=[tokens], max_tokens=16, transfers=[nowhere])
    assert (answer["granted_by"], answer["computed"]) == ({disaggregated.peer: 700}, 715)
    assert answer["tokens"] == disaggregated.right(tokens)
    decode.call("settle")
    hit = disaggregated.engines.read([tokens])
    assert (hit["cached"], hit["tokens"]) == ([672], answer["tokens"])
    assert disaggregated.free_blocks() == disaggregated.blocks


def keys_of_an_aborted_pull(disaggregated, tokens, spoil):
    """What is in the pool once the decode side has given up waiting for the prompt; no block is lost."""
    prefill, decode, pool = disaggregated.pair.prefill, disaggregated.pair.decode, disaggregated.engines.pool
    _, transfer = disaggregated.pair.prefilled(tokens)
    prefill.call("wait_for_stores")
    pool.empty()
    prefill.process.freeze()
    try:
        request_id = decode.call("begin_pull", prompt=tokens, transfer=transfer)
        assert decode.call("steps", number=20) == 0
        assert pool.master.stored_keys() == []
        spoil(decode)
        decode.call("abort", request_id=request_id)
        decode.call("steps", number=20)
        decode.call("wait_for_stores")
        stored = pool.master.stored_keys()
    finally:
        prefill.process.thaw()
    prefill.ask("settle")
    decode.call("settle")
    prefill.answer()
    assert disaggregated.free_blocks() == disaggregated.blocks
    return stored

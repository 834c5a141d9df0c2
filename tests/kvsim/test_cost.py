"""Step times: affine decode, monotone, and where they stand against measured operators."""

import csv
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import catalog
from kvsim.clock import PS_PER_MS
from kvsim.cost.roofline import Roofline
from tests.support import shared_data

ROOFLINE = Roofline(catalog.llm_model("llama-3.1-8b"), catalog.device("h100-sxm"))

chunks_of = st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 8_192)), max_size=4)
num_decodes_of = st.integers(1, 1024)
context_of = st.integers(0, 10**8)


def is_affine_in_context(step_time, num_decodes, context):
    base_ps, slope_ps, _ = step_time.decode_affine_ps(num_decodes, context)
    return step_time.step_ps((), num_decodes, context) == base_ps + slope_ps * context


@given(num_decodes_of, context_of)
def test_decode_step_is_exactly_affine(num_decodes, context):
    assert is_affine_in_context(ROOFLINE, num_decodes, context)


def test_affinity_check_rejects_rounded_totals():
    class RoundsTotals(Roofline):
        __slots__ = ()

        def step_ps(self, chunks, num_decodes, decode_context):
            return super().step_ps(chunks, num_decodes, decode_context) // 7 * 7

    broken = RoundsTotals(catalog.llm_model("llama-3.1-8b"), catalog.device("h100-sxm"))
    assert not all(is_affine_in_context(broken, 3, context) for context in range(1000, 1010))


@given(num_decodes_of, context_of, st.integers(1, 500))
def test_many_decode_steps_sum_to_the_closed_form(num_decodes, context, num_steps):
    base_ps, slope_ps, _ = ROOFLINE.decode_affine_ps(num_decodes, context)
    one_by_one = sum(ROOFLINE.step_ps((), num_decodes, context + num_decodes * i) for i in range(num_steps))
    jump = num_steps * (base_ps + slope_ps * context) + slope_ps * num_decodes * num_steps * (num_steps - 1) // 2
    assert one_by_one == jump


@given(chunks_of, st.integers(0, 1024), context_of)
def test_a_batch_takes_time_and_more_work_never_less(chunks, num_decodes, context):
    context = context if num_decodes else 0
    step_ps = ROOFLINE.step_ps(chunks, num_decodes, context)
    assert (step_ps > 0) == bool(chunks or num_decodes)
    assert ROOFLINE.step_ps([*chunks, (0, 1)], num_decodes, context) >= step_ps
    assert ROOFLINE.step_ps(chunks, num_decodes + 1, context) >= step_ps


@given(st.integers(0, 100_000), st.integers(1, 4096), st.integers(1, 4096))
def test_splitting_a_prefill_never_saves_time(context, first, second):
    whole = ROOFLINE.step_ps([(context, first + second)], 0, 0)
    parts = ROOFLINE.step_ps([(context, first)], 0, 0) + ROOFLINE.step_ps([(context + first, second)], 0, 0)
    assert parts >= whole


def test_one_request_computes_its_last_prompt_token_as_a_decode_would():
    # A one-token chunk and a decode step have the same shape and are both bound by memory.
    assert ROOFLINE.step_ps([(5000, 1)], 0, 0) == pytest.approx(ROOFLINE.step_ps((), 1, 5000), rel=1e-4)


def test_terms_by_hand():
    # 8,192 tokens: 2 x 6,979,321,856 x 8,192 flops at 989e12 x 0.45; attention 4 x 32 x 4,096 per pair of 33,558,528;
    # lm_head 1,050,673,152 bytes at 3.35e12 x 0.8; 162 small operators of 3 us.
    seconds = (2 * 6_979_321_856 * 8_192 + 524_288 * 33_558_528) / (989e12 * 0.45) + 1_050_673_152 / 2.68e12 + 486e-6
    assert ROOFLINE.step_ps([(0, 8_192)], 0, 0) == pytest.approx(seconds * 1e12, rel=1e-9)
    # Decode of one: weights, lm_head and KV are read once.
    seconds = (13_958_643_712 + 1_050_673_152 + 131_072 * 1_001) / 2.68e12 + 486e-6
    assert ROOFLINE.step_ps((), 1, 1_000) == pytest.approx(seconds * 1e12, rel=1e-6)


def ratios(table, row_ms, ours_ps):
    with shared_data("step_times", f"llama-3.1-8b_h100_tp1_{table}.csv").open() as file:
        return [ours_ps(row) / PS_PER_MS / float(row[row_ms]) for row in csv.DictReader(file)]


def prefill_ps(row):
    return ROOFLINE.step_ps([(int(row["prefix_tokens"]), int(row["new_tokens"]))], 0, 0)


def decode_ps(row):
    batch = int(row["batch_per_rank"])
    return ROOFLINE.step_ps((), batch, batch * int(row["context_tokens"]))


def test_agreement_with_aiconfigurators_measured_operators():
    """The bands that roofline.py's docstring states; nothing was fitted to reach them."""
    prefill = ratios("prefill", "prefill_ms", prefill_ps)
    decode = ratios("decode", "tpot_ms", decode_ps)
    assert min(prefill) >= 0.80 and max(prefill) <= 1.56, (min(prefill), max(prefill))
    assert min(decode) >= 0.89 and max(decode) <= 1.18, (min(decode), max(decode))
    assert median(prefill) == pytest.approx(1.48, abs=0.01)
    assert median(decode) == pytest.approx(1.08, abs=0.01)


def test_the_bands_reject_a_model_without_attention():
    decode = ratios("decode", "tpot_ms", lambda row: ROOFLINE.step_ps((), int(row["batch_per_rank"]), 0))
    assert min(decode) < 0.1

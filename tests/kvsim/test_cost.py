"""Step times from the roofline: straight decodes, monotone, divided among GPUs, and held against measured operators."""

from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import catalog
from kvsim.cost.agreement import ratios
from kvsim.cost.attention import Attention, num_pairs
from kvsim.cost.experts import ExpertLayers, touched_share
from kvsim.cost.parallel import Collectives, Parallel
from kvsim.cost.rates import Rates
from kvsim.cost.roofline import Roofline
from kvsim.cost.shipped import measured_on
from kvsim.llm.cache import Scan
from kvsim.llm.model import ExpertPlacement
from tests.support import PROJECT

H100, GB200 = catalog.device("h100-sxm"), catalog.device("gb200")
LLAMA = catalog.llm_model("llama-3.1-8b")
KIMI = catalog.llm_model("kimi-k2.5-nvfp4")
ROOFLINE = Roofline(LLAMA, H100)
# Every kind of layer, on one GPU and on several; no division is even for all of them.
WHOLE = ExpertPlacement.WHOLE
MODELS = [
    ROOFLINE,
    Roofline(catalog.llm_model("gpt-oss-120b"), H100, Parallel(4)),
    Roofline(catalog.llm_model("gemma-4-31b"), H100),
    Roofline(catalog.llm_model("qwen3.5-397b-a17b"), GB200, Parallel(2, 4, WHOLE)),
    Roofline(KIMI, GB200, Parallel(1, 8, WHOLE)),
    Roofline(catalog.llm_model("deepseek-v3.2"), GB200, Parallel(4, 2)),
    Roofline(catalog.llm_model("deepseek-v4-flash"), GB200, Parallel(4, 1, WHOLE)),
    Roofline(catalog.llm_model("kimi-k3"), GB200, Parallel(8, 1, WHOLE)),
]

models_of = st.sampled_from(MODELS)
chunk_of = st.tuples(st.integers(0, 200_000), st.integers(1, 8_192))
num_decodes_of = st.integers(1, 1024)
context_of = st.integers(0, 10**8)


def is_affine_in_context(step_time, num_decodes, context, part):
    base_ps, slope_ps, max_context = step_time.decode_affine_ps(num_decodes, context)
    end = 10 * context if max_context is None else max_context
    assert end >= context
    ats = (context, context + int(part * (end - context)), end)
    return all(step_time.step_ps((), num_decodes, at) == base_ps + slope_ps * at for at in ats)


@given(models_of, num_decodes_of, context_of, st.floats(0, 1))
def test_decode_steps_are_exactly_on_their_line(model, num_decodes, context, part):
    assert is_affine_in_context(model, num_decodes, context, part)


def test_affinity_check_rejects_rounded_totals():
    class RoundsTotals(Roofline):
        __slots__ = ()

        def step_ps(self, chunks, num_decodes, decode_context):
            return super().step_ps(chunks, num_decodes, decode_context) // 7 * 7

    broken = RoundsTotals(LLAMA, H100)
    assert not all(is_affine_in_context(broken, 3, context, 0.5) for context in range(1000, 1010))


def test_windows_bound_what_decodes_read():
    """Half of gpt-oss's layers see 128 tokens: the slope falls there once, and the line is unbroken."""
    model = MODELS[1]
    short, long = model.decode_affine_ps(10, 0), model.decode_affine_ps(10, 10 * 1_000)
    assert short.max_context == 10 * 127 and long.max_context is None
    assert long.slope_ps == pytest.approx(short.slope_ps / 2, rel=1e-3)
    at = short.max_context
    assert short.base_ps + short.slope_ps * at == long.base_ps + long.slope_ps * at


@given(num_decodes_of, context_of, st.integers(1, 500))
def test_many_decode_steps_sum_to_the_closed_form(num_decodes, context, num_steps):
    base_ps, slope_ps, _ = ROOFLINE.decode_affine_ps(num_decodes, context)
    one_by_one = sum(ROOFLINE.step_ps((), num_decodes, context + num_decodes * i) for i in range(num_steps))
    jump = num_steps * (base_ps + slope_ps * context) + slope_ps * num_decodes * num_steps * (num_steps - 1) // 2
    assert one_by_one == jump


ROUNDED_PS = 100
"""More than there are terms, each rounded up to a whole picosecond; the least step takes a million times as much."""


@given(models_of, st.lists(chunk_of, max_size=4), st.integers(0, 256), st.integers(0, 200_000))
def test_a_batch_takes_time_and_more_work_never_less(model, chunks, num_decodes, each):
    context = each * num_decodes
    step_ps = model.step_ps(chunks, num_decodes, context)
    assert (step_ps > 0) == bool(chunks or num_decodes)
    assert model.step_ps([*chunks, (0, 1)], num_decodes, context) >= step_ps
    # Decodes of the same context: a rank's share of them is rounded up to whole ps per token, terms to whole ps.
    assert model.step_ps(chunks, num_decodes + 1, context + each) >= step_ps - context - ROUNDED_PS
    if num_decodes:
        assert model.step_ps(chunks, num_decodes, context + 1) >= step_ps
    assert all(step_ps >= model.step_ps([chunk], 0, 0) for chunk in chunks)
    assert step_ps >= model.step_ps((), num_decodes, context)


@given(models_of, chunk_of, st.integers(1, 1000))
def test_a_longer_chunk_and_a_longer_context_never_take_less(model, chunk, more):
    context_len, num_new_tokens = chunk
    step_ps = model.step_ps([chunk], 0, 0)
    assert model.step_ps([(context_len + more, num_new_tokens)], 0, 0) >= step_ps
    assert model.step_ps([(context_len, num_new_tokens + more)], 0, 0) >= step_ps


@given(models_of, st.integers(0, 100_000), st.integers(1, 4096), st.integers(1, 4096))
def test_splitting_a_prefill_never_saves_time(model, context, first, second):
    whole = model.step_ps([(context, first + second)], 0, 0)
    parts = model.step_ps([(context, first)], 0, 0) + model.step_ps([(context + first, second)], 0, 0)
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


# --- on several GPUs --------------------------------------------------------------------------------------------------


def test_tensor_parallelism_divides_what_it_should():
    """Of Llama-3.1-8B on two GPUs: matrices, KV and lm_head by two; launches stay; 64 all-reduces come on top."""
    two = Roofline(LLAMA, H100, Parallel(2))
    launches_ps = 162 * 3 * 10**6
    # Ring of two: each sends its half twice, 4,096 activations of 2 bytes a token.
    told_ps = 64 * (10 * 10**6 + 4_096 * 2 * 10**12 / 450e9)
    alone_ps = ROOFLINE.step_ps((), 1, 10_000) - launches_ps
    assert two.step_ps((), 1, 10_000) - launches_ps - told_ps == pytest.approx(alone_ps / 2, rel=1e-6)
    told_ps = 64 * (10 * 10**6 + 8_192 * 4_096 * 2 * 10**12 / 450e9)
    alone_ps = ROOFLINE.step_ps([(0, 8_192)], 0, 0) - launches_ps
    assert two.step_ps([(0, 8_192)], 0, 0) - launches_ps - told_ps == pytest.approx(alone_ps / 2, rel=1e-6)


def test_latents_are_held_by_every_rank_of_tensor_parallelism():
    """What a token of context costs a decode: of grouped-query attention a rank's share, of MLA all that is kept."""

    def slope_ps(name, tp):
        return Attention(catalog.llm_model(name).work(tp), Rates(GB200), 1).decode_line(1, 0).slope_ps

    assert slope_ps("llama-3.1-8b", 1) == 8 * slope_ps("llama-3.1-8b", 8)
    # 64 heads over one latent are bound by flops, 16 and 8 by reading it.
    assert slope_ps("kimi-k2.5-nvfp4", 1) > slope_ps("kimi-k2.5-nvfp4", 4) == slope_ps("kimi-k2.5-nvfp4", 8)


def test_ranks_of_data_parallelism_take_requests_in_turn():
    """Eight decodes take one of each rank, a ninth makes one rank hold two; a lone chunk is not divided."""
    eight, alone = Roofline(LLAMA, H100, Parallel(1, 8)), ROOFLINE
    assert eight.step_ps((), 8, 8 * 5_000) == pytest.approx(alone.step_ps((), 1, 5_000), rel=1e-5)
    assert eight.step_ps((), 9, 9 * 5_000) == pytest.approx(alone.step_ps((), 2, 2 * 5_000), rel=1e-5)
    assert eight.step_ps([(0, 4_096)], 0, 0) == alone.step_ps([(0, 4_096)], 0, 0)
    assert eight.step_ps([(0, 512)] * 16, 0, 0) == alone.step_ps([(0, 512)] * 2, 0, 0)


def test_collectives_by_hand():
    """Kimi-K2.5 on eight data parallel ranks, 16 tokens each: 60 mixtures send every token to 8 experts and back."""
    collectives = Collectives(KIMI, Parallel(1, 8, WHOLE), Rates(GB200))
    seconds = 120 * (10e-6 + 16 * 8 * 7_168 * 2 * 7 / 8 / 900e9)
    assert collectives.step_ps(16, 128) == pytest.approx(seconds * 1e12, rel=1e-6)
    # Experts cut over the ranks: everybody's 128 tokens come to each, 7 of 8 from others, and the sums go back.
    collectives = Collectives(KIMI, Parallel(1, 8), Rates(GB200))
    seconds = 120 * (10e-6 + 128 * 7_168 * 2 * 7 / 8 / 900e9)
    assert collectives.step_ps(16, 128) == pytest.approx(seconds * 1e12, rel=1e-6)
    assert Collectives(KIMI, Parallel(), Rates(GB200)).step_ps(16, 16) == 0
    assert Collectives(LLAMA, Parallel(1, 8), Rates(GB200)).step_ps(16, 128) == 0


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def test_the_expected_share_of_experts_by_hand():
    assert touched_share(8, 384, 0)[0] == 0
    assert touched_share(8, 384, 1) == (8, 384)
    touched, of = touched_share(2, 4, 2)
    assert touched / of == 0.75


def test_experts_touched_are_those_that_random_choices_touch():
    rng, experts = Random(0), range(64)
    runs = [len({e for _ in range(12) for e in rng.sample(experts, 4)}) for _ in range(2_000)]
    touched, of = touched_share(4, 64, 12)
    assert sum(runs) / len(runs) / 64 == pytest.approx(touched / of, rel=0.01)


def test_a_large_batch_reads_every_expert():
    (weights,) = KIMI.rank_weights(4, 1, WHOLE).experts
    layers = ExpertLayers(weights, Rates(GB200))
    reads_ps = [layers.read_ps(num_tokens) for num_tokens in (1, 2, 64, 1_535, 1_536, 10**6)]
    assert reads_ps == sorted(reads_ps) and reads_ps[-1] == reads_ps[-2] == Rates(GB200).read_ps(weights.size_bytes)
    assert reads_ps[0] == pytest.approx(reads_ps[-1] * 8 / 384, rel=1e-9)


# --- attention --------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.integers(0, 60), st.integers(1, 40), st.sampled_from([1, 4, 7]), st.sampled_from([None, 1, 3, 10]))
def test_pairs_are_those_that_counting_finds(context_len, num_new_tokens, tokens_per_entry, max_entries):
    scan = Scan(1, 1, 1, tokens_per_entry, max_entries)
    ends = range(context_len + 1, context_len + num_new_tokens + 1)
    counted = sum(min(end // tokens_per_entry, end if max_entries is None else max_entries) for end in ends)
    assert num_pairs(scan, context_len, num_new_tokens) == counted


# --- against aiconfigurator's measured operators ----------------------------------------------------------------------

# (least, median, most) of roofline / table over all points; docs/STEP_TIMES.md discusses them. Nothing was fitted.
AGREEMENT = {
    ("llama-3.1-8b_h100_tp1", "prefill"): (0.80, 1.48, 1.56),
    ("llama-3.1-8b_h100_tp1", "decode"): (0.90, 1.08, 1.17),
    ("llama-3.1-8b_h200_tp1", "prefill"): (0.76, 1.47, 1.58),
    ("llama-3.1-8b_h200_tp1", "decode"): (0.86, 1.04, 1.19),
    ("qwen3-32b_h200_tp2", "prefill"): (0.74, 1.43, 1.53),
    ("qwen3-32b_h200_tp2", "decode"): (0.91, 1.04, 1.21),
    ("kimi-k2.5-nvfp4_gb200_tp4ep4", "prefill"): (0.51, 0.84, 1.09),
    ("kimi-k2.5-nvfp4_gb200_tp4ep4", "decode"): (0.36, 0.64, 1.02),
    ("kimi-k2.5-nvfp4_gb200_tp4moetp4", "prefill"): (0.49, 0.83, 1.05),
    ("kimi-k2.5-nvfp4_gb200_tp4moetp4", "decode"): (0.36, 0.66, 1.01),
    ("kimi-k2.5-nvfp4_gb200_dp8ep8", "prefill"): (0.33, 0.81, 1.07),
    ("kimi-k2.5-nvfp4_gb200_dp8ep8", "decode"): (0.32, 0.59, 1.51),
    ("deepseek-v3_h200_tp8", "prefill"): (0.41, 0.84, 1.13),
    ("deepseek-v3_h200_tp8", "decode"): (0.27, 0.75, 1.54),
    ("deepseek-v3.1-nvfp4_gb200_tp4ep4", "prefill"): (0.58, 1.02, 1.40),
    ("deepseek-v3.1-nvfp4_gb200_tp4ep4", "decode"): (0.09, 0.27, 0.77),
    ("deepseek-v4-flash-nvfp4_gb200_tp4ep4", "prefill"): (0.19, 0.29, 0.58),
    ("deepseek-v4-flash-nvfp4_gb200_tp4ep4", "decode"): (0.05, 0.13, 0.28),
}


def roofline_of(name, model=Roofline):
    of = measured_on(name)
    placement = WHOLE if of.enable_expert_parallel else ExpertPlacement.CUT
    parallel = Parallel(of.tensor_parallel_size, of.data_parallel_size, placement)
    return model(catalog.llm_model(of.model), catalog.device(of.device), parallel)


def agreement(name, phase, step_time):
    found = ratios(name, phase, step_time)
    return tuple(round(ratio, 2) for ratio in (min(found), median(found), max(found)))


def test_every_table_has_its_agreement():
    assert {name for name, _ in AGREEMENT} == set(catalog.step_tables())


@pytest.mark.parametrize(("name", "phase"), AGREEMENT)
def test_agreement_with_measured_operators(name, phase):
    assert agreement(name, phase, roofline_of(name)) == pytest.approx(AGREEMENT[name, phase], abs=0.011)


def test_the_document_says_the_same():
    lines = (PROJECT / "docs" / "STEP_TIMES.md").read_text(encoding="utf-8").splitlines()
    for (name, phase), (least, middle, most) in AGREEMENT.items():
        assert f"| {name} | {phase} | {least:.2f} | {middle:.2f} | {most:.2f} |" in lines


def outside(name, phase, step_time):
    """Ratios that leave the band by more than a tenth of its width."""
    least, _, most = AGREEMENT[name, phase]
    margin = (most - least) / 10
    return [ratio for ratio in ratios(name, phase, step_time) if not least - margin <= ratio <= most + margin]


class SeesNoPairs(Roofline):
    """Attention of a chunk as of its last token only: without the quadratic term."""

    __slots__ = ()

    def _chunks_ps(self, chunks):
        return sum(self._attention.chunk_ps(context + new - 1, 1) for context, new in chunks)


@pytest.mark.parametrize("name", ["llama-3.1-8b_h100_tp1", "kimi-k2.5-nvfp4_gb200_tp4ep4", "deepseek-v3_h200_tp8"])
def test_the_bands_reject_a_roofline_without_quadratic_attention(name):
    assert outside(name, "prefill", roofline_of(name, SeesNoPairs))
    assert not outside(name, "prefill", roofline_of(name))


@pytest.mark.parametrize("name", ["kimi-k2.5-nvfp4_gb200_tp4ep4", "kimi-k2.5-nvfp4_gb200_tp4moetp4"])
def test_the_bands_reject_a_roofline_that_reads_every_expert(name, monkeypatch):
    whole_ps = ExpertLayers.read_ps
    monkeypatch.setattr(ExpertLayers, "read_ps", lambda self, num_tokens: whole_ps(self, 10**6 if num_tokens else 0))
    assert outside(name, "decode", roofline_of(name))


def test_the_bands_reject_a_roofline_without_kv_reads():
    class ReadsNothing(Roofline):
        __slots__ = ()

        def step_ps(self, chunks, num_decodes, decode_context):
            return super().step_ps(chunks, num_decodes, 0)

    name = "llama-3.1-8b_h100_tp1"
    assert min(outside(name, "decode", roofline_of(name, ReadsNothing))) < 0.1

"""The language models of the catalogue against what is published about them: bytes of KV, parameters, capacity."""

import pytest

from kvcore.errors import InvalidArgument
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from kvsim import catalog, toml
from kvsim.llm.groups import gpu_block_bytes
from kvsim.llm.model import ExpertPlacement, LlmModel
from tests.support import PROJECT

K = 1024
BF16, FP8 = 16, 8

# Of one token of context, in bf16. GQA: 2 x layers x KV heads x head size x 2; MLA: layers x (512 + 64) x 2; a sparse
# index adds 128 elements a layer. Model cards and config.json; the same numbers stand in shared/FACTS.md, section 6.
BYTES_PER_TOKEN = {
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "qwen3-8b": 147_456,
    "qwen3-32b": 262_144,
    "qwen3-30b-a3b": 98_304,
    "qwen3-235b-a22b": 192_512,
    "minimax-m2.5": 253_952,
    "deepseek-v3": 70_272,
    "deepseek-v3.1-nvfp4": 70_272,
    "kimi-k2.5-nvfp4": 70_272,
    "deepseek-v3.2": 85_888,
    "glm-5": 109_824,
}
# (bits of an element, bytes of a token, bytes of a sequence) from the length on where all windows are full.
BYTES_PER_TOKEN_AND_SEQUENCE = {
    "qwen3.5-397b-a17b": (BF16, 30_720, 192_061_440),
    "kimi-k3": (BF16, 27_648, 449_372_160),
    "nemotron-3-nano-30b-a3b": (BF16, 6_144, 49_082_368),
    "gpt-oss-120b": (BF16, 36_864, 4_718_592),
    "llama-4-scout": (BF16, 49_152, 1_207_959_552),
}
# (bits, average bytes of a token in a sequence of 1K, 32K and 128K tokens), rounded down.
AVERAGE_BYTES = {
    "deepseek-v4-pro": (FP8, 8_348, 4_566, 4_474),
    "deepseek-v4-flash": (FP8, 5_856, 3_190, 3_125),
    "deepseek-v4-flash-nvfp4": (FP8, 5_856, 3_190, 3_125),
    "gemma-4-31b": (BF16, 901_120, 107_520, 88_320),
}
# Where the publisher rounds to one or two digits, or counts a vision encoder, by how much the layers may differ; others
# by 1 %.
ROUNDED = {"kimi-k2.5-nvfp4": 0.03, "deepseek-v4-pro": 0.02, "llama-4-scout": 0.02}


def test_every_class_of_published_values_has_a_model():
    published = BYTES_PER_TOKEN.keys() | BYTES_PER_TOKEN_AND_SEQUENCE.keys() | AVERAGE_BYTES.keys()
    assert published == set(catalog.llm_models())


def complaints(model: LlmModel) -> list[str]:
    """What of the model is not as published."""
    found = []
    token = BYTES_PER_TOKEN.get(model.name)
    if token is not None and [model.sequence_bytes(n, BF16) for n in (1, 7, 10_000)] != [
        token,
        7 * token,
        10_000 * token,
    ]:
        found.append("bytes per token")
    if model.name in BYTES_PER_TOKEN_AND_SEQUENCE:
        bits, token, sequence = BYTES_PER_TOKEN_AND_SEQUENCE[model.name]
        if any(model.sequence_bytes(n, bits) != n * token + sequence for n in (32 * K, 128 * K)):
            found.append("bytes per token and sequence")
    if model.name in AVERAGE_BYTES:
        bits, *averages = AVERAGE_BYTES[model.name]
        if [model.sequence_bytes(n * K, bits) // (n * K) for n in (1, 32, 128)] != averages:
            found.append("average bytes per token")
    if abs(model.num_params / model.weights.published_params - 1) > ROUNDED.get(model.name, 0.01):
        found.append("parameters")
    return found + active_complaints(model)


def active_complaints(model: LlmModel) -> list[str]:
    """Publishers count the embedding in or the output projection out, and round to the last digit they give."""
    published = model.weights.published_active_params
    if published is None:
        return []
    whole = model.rank_weights()
    half_a_digit = 5 * 10 ** (len(str(published)) - len(str(published).rstrip("0"))) // 10
    low, high = model.num_active_params - whole.lm_head.num_params, model.num_active_params + whole.embedding.num_params
    return [] if low - half_a_digit <= published <= high + half_a_digit else ["active parameters"]


@pytest.mark.parametrize("name", catalog.llm_models())
def test_models_are_as_published(name):
    assert complaints(catalog.llm_model(name)) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("llama-3.1-8b", "num_kv_heads = 8", "num_kv_heads = 16", {"bytes per token", "parameters"}),
        ("qwen3-30b-a3b", "expert_intermediate_size = 768", "expert_intermediate_size = 786", {"parameters"}),
        ("deepseek-v3", "experts_per_token = 8", "experts_per_token = 6", {"active parameters"}),
        ("deepseek-v3.2", "\nhead_dim = 128", "\nhead_dim = 64", {"bytes per token"}),
        ("deepseek-v4-pro", "compress_ratio = 128", "compress_ratio = 4", {"average bytes per token"}),
        ("gpt-oss-120b", "window = 128", "window = 256", {"bytes per token and sequence"}),
        ("kimi-k3", "conv_kernel = 4", "conv_kernel = 3", {"bytes per token and sequence"}),
        (
            "nemotron-3-nano-30b-a3b",
            "state_len = 128",
            "state_len = 64",
            {"bytes per token and sequence", "active parameters"},
        ),
        ("llama-4-scout", "chunk = 8192", "chunk = 4096", {"bytes per token and sequence"}),
        ("gemma-4-31b", "window = 1024", "window = 512", {"average bytes per token"}),
    ],
)
def test_a_wrong_file_is_noticed(tmp_path, name, old, new, expected):
    text = (PROJECT / "models" / "llm" / f"{name}.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / f"{name}.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert set(complaints(toml.load(LlmModel, path))) == expected


def test_kimi_in_its_two_layouts():
    """Plain fp8 is 576 bytes a layer, the packed layout 656."""
    model = catalog.llm_model("kimi-k2.5-nvfp4")
    assert [model.kv_groups(64, 4, dtype)[0].pool_bytes for dtype in (None, "fp8", "fp8_ds_mla", "bfloat16")] == [
        64 * 35_136,
        64 * 35_136,
        64 * 40_016,
        64 * 70_272,
    ]


def test_kimi_has_the_capacity_of_the_published_prefill_instance():
    """461,216 tokens of fp8 KV on GB200, tensor parallel 4, memory utilisation 0.85 (ivanium/vllm, pull 5).

    The weights are ours, what the engine needs beside them is the default of `[engine] reserved_bytes`.
    """
    model, device = catalog.llm_model("kimi-k2.5-nvfp4"), catalog.device("gb200")
    free_bytes = device.memory.capacity_bytes * 85 // 100 - model.rank_weights(4).size_bytes - 3_274_912_563
    assert free_bytes // gpu_block_bytes(model.kv_groups(64, 4)) * 64 == pytest.approx(461_216, rel=0.02)


# --- tensor parallelism -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.llm_models())
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_pool_holds_the_same_bytes_per_token_whatever_the_ranks(name, tp):
    """Blocks may be longer or shorter; what a token or a state takes is not, and replicas count once."""
    model = catalog.llm_model(name)

    def kept(groups):
        each = {}
        for group in groups:
            per = 1 if isinstance(group.spec, Recurrent) else group.spec.block_size
            kind = (type(group.spec), getattr(group.spec, "window", None))
            num_layers, size = each.get(kind, (0, 0))
            each[kind] = num_layers + group.num_layers, size + group.pool_bytes / per
        return each

    assert kept(model.kv_groups(16, tp)) == kept(model.kv_groups(16, 1))


@pytest.mark.parametrize(
    ("name", "tp", "shards"),
    [
        ("llama-3.1-8b", 4, [4]),
        ("qwen3-30b-a3b", 8, [4]),
        ("deepseek-v3", 8, [1]),
        ("deepseek-v3.2", 8, [1]),
        ("deepseek-v4-flash", 4, [1] * 5),
        ("qwen3.5-397b-a17b", 4, [4, 4, 4, 2]),
        ("kimi-k3", 8, [8, 8, 8, 1]),
        ("gemma-4-31b", 8, [8, 8, 8, 8, 8, 4]),
    ],
)
def test_heads_are_divided_latents_are_replicated(name, tp, shards):
    assert [group.num_shards for group in catalog.llm_model(name).kv_groups(16, tp)] == shards


def test_an_uneven_division_is_refused():
    with pytest.raises(InvalidArgument, match="tensor_parallel_size = 3: expected a divisor or a multiple of 8 heads"):
        catalog.llm_model("llama-3.1-8b").kv_groups(16, 3)


@pytest.mark.parametrize("name", catalog.llm_models())
def test_ranks_together_weigh_the_model_and_its_replicas(name):
    model = catalog.llm_model(name)
    whole, rank = model.rank_weights(), model.rank_weights(8)
    assert whole.size_bytes / 8 <= rank.size_bytes < whole.size_bytes
    assert 8 * sum(e.size_bytes for e in rank.experts) == sum(e.size_bytes for e in whole.experts)
    assert 8 * rank.lm_head.num_params == pytest.approx(whole.lm_head.num_params, rel=1e-4)


def test_experts_are_cut_or_dealt_out():
    model = catalog.llm_model("deepseek-v3")
    (cut,), (whole,) = model.rank_weights(2, 4).experts, model.rank_weights(2, 4, ExpertPlacement.WHOLE).experts
    assert (cut.num_experts, whole.num_experts) == (256, 32)
    assert 8 * cut.each.num_params == whole.each.num_params == 3 * 7168 * 2048
    assert cut.num_params == whole.num_params


@pytest.mark.parametrize(
    ("name", "size_bytes", "share"),
    [
        ("gpt-oss-120b", 60.8 * 2**30, 0.005),  # model card, arXiv 2508.10925
        (
            "deepseek-v4-flash",
            160e9,
            0.03,
        ),  # https://framia.pro/page/en-US/news/deepseek-v4-parameters, with a draft layer
        ("deepseek-v4-pro", 865e9, 0.03),
    ],
)
def test_weights_are_as_large_as_the_checkpoint(name, size_bytes, share):
    assert catalog.llm_model(name).rank_weights().size_bytes == pytest.approx(size_bytes, rel=share)


def test_quantised_weights_count_their_scales():
    """A byte per parameter and a float32 for 128 x 128 of them, two bytes where nothing is quantised."""
    model = catalog.llm_model("deepseek-v3")
    assert model.rank_weights().size_bytes == pytest.approx(671e9 + 2 * 129_280 * 7_168, rel=0.001)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_gemma_s_windows_become_groups_as_large_as_its_full_layers():
    groups = catalog.llm_model("gemma-4-31b").kv_groups(16)
    assert [(type(group.spec), group.spec.block_size, group.num_layers) for group in groups] == [
        *[(SlidingWindow, 16, 10)] * 5,
        (FullAttention, 32, 10),
    ]
    assert len({group.page_bytes for group in groups}) == 1


def test_a_block_beside_a_recurrent_state_is_as_long_as_the_state_is_large():
    groups = catalog.llm_model("qwen3.5-397b-a17b").kv_groups(16)
    assert [(type(group.spec), group.spec.block_size, group.num_layers) for group in groups] == [
        *[(Recurrent, 2096, 15)] * 3,
        (FullAttention, 2096, 15),
    ]
    assert groups[0].block_bytes == 15 * 4_268_032 < groups[0].page_bytes == groups[3].page_bytes


@pytest.mark.parametrize("name", catalog.llm_models())
def test_groups_are_a_model_for_kvcore(name):
    spec = ModelSpec(tuple(group.spec for group in catalog.llm_model(name).kv_groups(16, 8)))
    assert spec.alignment == max(group.block_size for group in spec.groups)


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.llm_models())
@pytest.mark.parametrize("tp", [1, 8])
def test_what_is_scanned_is_what_is_kept(name, tp):
    """Long sequences: entries of all scans are the bytes of the groups, but for what waits to be compressed."""
    model, dtype = catalog.llm_model(name), "bfloat16"
    groups = model.kv_groups(16, tp, dtype)
    closed = sum(g.block_bytes / g.spec.block_size for g in groups if isinstance(g.spec, FullAttention))
    scanned = sum(
        layer.num_layers * scan.entry_bytes / scan.tokens_per_entry
        for layer in model.work(tp, dtype)
        for scan in layer.scans
        if not is_window(model, scan)
    )
    assert scanned == pytest.approx(closed)
    assert sum(layer.num_layers for layer in model.work(tp)) == model.num_layers


def is_window(model, scan):
    """Whether the scan is of the last tokens only."""
    bounds = {getattr(layer, name, None) for layer in model.attention for name in ("window", "chunk")}
    return scan.max_entries in bounds - {None}


def test_sparse_attention_meets_few_entries_and_its_index_meets_all():
    (layer,) = catalog.llm_model("deepseek-v3.2").work(8, "fp8_ds_mla")
    index, latent = layer.scans
    assert (index.max_entries, index.entry_bytes, index.decode_macs) == (None, 132, 64 * 128)
    assert (latent.max_entries, latent.entry_bytes, latent.decode_macs) == (2048, 656, 16 * (576 + 512))

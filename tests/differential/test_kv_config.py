"""Our KV cache groups are vLLM's: block sizes, layers, page sizes, replicas, and how many blocks a GPU holds."""

import logging
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.spec import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from kvsim import catalog, toml
from kvsim.llm.feed_forward import Dense
from kvsim.llm.groups import gpu_block_bytes
from kvsim.llm.latent import Compressed
from kvsim.llm.layers import GroupedQuery
from kvsim.llm.model import LlmModel
from tests.support import PROJECT

pytestmark = pytest.mark.engine

BLOCK_SIZE = 64
AVAILABLE_BYTES = 40 * 2**30
PACKED = ("deepseek", "kimi-k2", "glm")
CASES = [
    (name, tp, dtype)
    for name in catalog.llm_models()
    for tp in (1, 2, 8)
    for dtype in ("bfloat16", "fp8", "fp8_ds_mla")
    if dtype != "fp8_ds_mla" or name.startswith(PACKED)
]
SOURCE = {"source": "a test", "date": date(2026, 11, 30)}


@pytest.fixture(autouse=True)
def quiet():
    """vLLM warns of every layer that it pads a group with."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("name", "tp", "dtype"), CASES)
def test_groups_and_number_of_blocks_are_those_of_vllm(name, tp, dtype):
    model = catalog.llm_model(name)
    assert ours(model, tp, dtype) == theirs(model, tp, dtype)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("llama-3.1-8b", "num_kv_heads = 8", "num_kv_heads = 4"),
        ("deepseek-v3", "kv_lora_rank = 512", "kv_lora_rank = 448"),
        ("deepseek-v4-flash", "num_layers = 21", "num_layers = 20"),
        ("deepseek-v4-pro", "compress_ratio = 128", "compress_ratio = 1"),
        ("gemma-4-31b", "num_layers = 50", "num_layers = 49"),
        ("gpt-oss-120b", "window = 128", "window = 256"),
        ("qwen3.5-397b-a17b", "value_head_dim = 128", "value_head_dim = 256"),
        ("kimi-k3", "conv_kernel = 4", "conv_kernel = 2"),
        ("nemotron-3-nano-30b-a3b", "num_groups = 8", "num_groups = 4"),
        ("llama-4-scout", "chunk = 8192", "chunk = 4096"),
    ],
)
def test_a_wrong_file_has_other_groups_than_vllm(tmp_path, name, old, new):
    text = (PROJECT / "models" / "llm" / f"{name}.toml").read_text(encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(with_as_many_layers(text.replace(old, new, 1)), encoding="utf-8")
    wrong, right = toml.load(LlmModel, tmp_path / "wrong.toml"), catalog.llm_model(name)
    assert ours(wrong, 1, None) != theirs(right, 1, right.kv_cache.dtype)


def with_as_many_layers(text):
    """One feed-forward layer less where one attention layer is missing."""
    attention, feed_forward = text.split("[[feed_forward]]", 1)
    layers = sum(int(line.split()[-1]) for line in attention.splitlines() if line.startswith("num_layers"))
    start, _, rest = feed_forward.rpartition("num_layers = ")
    others = sum(int(line.split()[-1]) for line in start.splitlines() if line.startswith("num_layers"))
    return f"{attention}[[feed_forward]]{start}num_layers = {layers - others}\n{rest.split(chr(10), 1)[1]}"


KINDS = st.tuples(
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([None, 128, 1024]),
)


@given(st.lists(KINDS, min_size=1, max_size=4, unique_by=lambda kind: kind[1:]))
@settings(max_examples=60, deadline=None)
def test_any_mixture_of_windows_and_full_attention_is_grouped_as_by_vllm(kinds):
    attention = tuple(
        GroupedQuery(kind="gqa", num_layers=n, num_heads=24, num_kv_heads=h, head_dim=d, window=w, **SOURCE)
        for n, h, d, w in kinds
    )
    feed_forward = (Dense(kind="dense", num_layers=sum(kind[0] for kind in kinds), intermediate_size=1, **SOURCE),)
    model = catalog.llm_model("llama-3.1-8b").model_copy(update={"attention": attention, "feed_forward": feed_forward})
    assert ours(model, 1, "bfloat16") == theirs(model, 1, "bfloat16")


# --- both sides in the same words -------------------------------------------------------------------------------------


def ours(model, tp, dtype):
    """(groups, blocks in AVAILABLE_BYTES)."""
    groups = model.kv_groups(BLOCK_SIZE, tp, dtype)
    return [summary(group) for group in groups], AVAILABLE_BYTES // gpu_block_bytes(groups)


def summary(group):
    spec = group.spec
    window = getattr(spec, "window", getattr(spec, "chunk", None))
    return type(spec), spec.block_size, window, group.num_layers, group.page_bytes, group.block_bytes, group.num_shards


def theirs(model, tp, dtype):
    """The same of vLLM; DeepSeek-V4's kernels take blocks of 256 tokens only."""
    from tests.differential.vllm_kv_specs import kv_cache_config

    side_by_side = any(isinstance(layer, Compressed) for layer in model.attention)
    config = kv_cache_config(model, 256 if side_by_side else BLOCK_SIZE, tp, dtype, AVAILABLE_BYTES)
    return [their_summary(group, model, tp) for group in config.kv_cache_groups], config.num_blocks


def their_summary(group, model, tp):
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    mixed = isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    layers = (
        list(group.kv_cache_spec.kv_cache_specs.values()) if mixed else [group.kv_cache_spec] * len(group.layer_names)
    )
    (spec, *_) = layers
    return (
        kind_of(spec),
        spec.block_size,
        reach(spec),
        len(layers),
        sum(layer.page_size_bytes for layer in layers),
        sum(layer.real_page_size_bytes for layer in layers),
        tp // replicas(spec, model, tp),
    )


def reach(spec):
    """Tokens of a window or a chunk."""
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)


def kind_of(spec):
    from vllm.v1 import kv_cache_interface as interface

    kinds = {
        interface.FullAttentionSpec: FullAttention,
        interface.SlidingWindowSpec: SlidingWindow,
        interface.ChunkedLocalAttentionSpec: ChunkedLocal,
        interface.MambaSpec: Recurrent,
    }
    (kind,) = [kind for cls, kind in kinds.items() if isinstance(spec, cls)]
    return kind


def replicas(spec, model, tp):
    """Latents say it themselves; of KV heads it is how many of all there are on the ranks together."""
    from vllm.v1.core.kv_cache_utils import _layer_tp_replicas
    from vllm.v1.kv_cache_interface import MambaSpec

    if isinstance(spec, MambaSpec) or spec.max_tp_shards is not None:
        return _layer_tp_replicas(spec, tp, 1)
    (total,) = {
        layer.num_kv_heads
        for layer in model.attention
        if isinstance(layer, GroupedQuery)
        and (layer.head_dim, layer.window or layer.chunk) == (spec.head_size, reach(spec))
        and max(1, layer.num_kv_heads // tp) == spec.num_kv_heads
    }
    return spec.num_kv_heads * tp // total

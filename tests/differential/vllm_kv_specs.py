"""The KV cache specs of a model of our catalogue as vLLM's own layers make them, without weights, and its groups.

Specs come out of the methods of vLLM's model classes, called on stand-ins that have the fields of a layer. The fields
are those of our files; what becomes of them (bytes, block sizes, windows, padding, groups) is vLLM's.
Nothing is imported from vLLM at the top, so that the tests can be collected everywhere.
"""

import functools
import itertools
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import patch

from kvsim.llm.latent import Compressed, Latent
from kvsim.llm.layers import GroupedQuery
from kvsim.llm.recurrent import DeltaRule, Mamba2, StateLayers

SERVED = {"bfloat16": "auto", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
"""Our dtypes in the words of `--kv-cache-dtype`."""


PLACES = {
    "ModelConfig": "vllm.config",
    "VllmConfig": "vllm.config",
    "set_current_vllm_config": "vllm.config",
    "Attention": "vllm.model_executor.layers.attention.attention",
    "ChunkedLocalAttention": "vllm.model_executor.layers.attention.chunked_local_attention",
    "MLAAttention": "vllm.model_executor.layers.attention.mla_attention",
    "MambaBase": "vllm.model_executor.layers.mamba.abstract",
    "DeepseekV32IndexerCache": "vllm.model_executor.models.deepseek_v2",
    "NemotronHForCausalLM": "vllm.model_executor.models.nemotron_h",
    "Qwen3NextForCausalLM": "vllm.model_executor.models.qwen3_next",
    "DeepseekV4Attention": "vllm.models.deepseek_v4.attention",
    "DeepseekV4IndexerCache": "vllm.models.deepseek_v4.attention",
    "CompressorStateCache": "vllm.models.deepseek_v4.compressor",
    "MultiHeadLatentAttention": "vllm.models.kimi_k3.nvidia.mla",
    "KimiLinearForCausalLM": "vllm.models.kimi_k3.nvidia.model",
    "Platform": "vllm.platforms.interface",
    "kv_cache_dtype_str_to_dtype": "vllm.utils.torch_utils",
    "AttentionType": "vllm.v1.attention.backend",
    "FlashAttentionBackend": "vllm.v1.attention.backends.flash_attn",
    "FlashMLABackend": "vllm.v1.attention.backends.mla.flashmla",
    "DeepseekV4SWACache": "vllm.v1.attention.backends.mla.sparse_swa",
    "MambaAttentionBackendEnum": "vllm.v1.attention.backends.registry",
    "get_kv_cache_groups": "vllm.v1.core.kv_cache_utils",
    "get_kv_cache_config_from_groups": "vllm.v1.core.kv_cache_utils",
    "KVCacheSpecRegistry": "vllm.v1.kv_cache_spec_registry",
    "bfloat16": "torch",
    "float32": "torch",
    "uint8": "torch",
}


@functools.cache
def vllm():
    """What is used of vLLM and torch, by name; its specs are registered."""
    found = SimpleNamespace(**{name: getattr(import_module(place), name) for name, place in PLACES.items()})
    found.KVCacheSpecRegistry._ensure_registered()
    return found


def kv_cache_config(model, block_size, tp, dtype, available_bytes):
    """vLLM's KVCacheConfig of the model on one rank of `tp`."""
    vllm_config = engine_config(model, block_size, tp, dtype)
    with vllm().set_current_vllm_config(vllm_config):
        specs = layer_specs(model, vllm_config)
        groups = vllm().get_kv_cache_groups(vllm_config, specs)
    return vllm().get_kv_cache_config_from_groups(vllm_config, groups, available_bytes)


def engine_config(model, block_size, tp, dtype):
    """A VllmConfig with what specs and groups ask for; the layout is what the kernels for NVIDIA GPUs prefer."""
    config = vllm().VllmConfig()
    side_by_side = any(isinstance(layer, Compressed) for layer in model.attention)
    cache = config.cache_config
    cache.block_size = cache.mamba_block_size = block_size
    cache.cache_dtype, cache.mamba_cache_mode = SERVED[dtype], "align"
    cache.mamba_ssm_cache_dtype = "float32"
    cache.kv_cache_layout = "BLHNC" if side_by_side else "LBNHC"
    config.parallel_config.tensor_parallel_size = tp
    config.model_config = stand_in_model_config(model)
    if any(isinstance(layer, StateLayers) for layer in model.attention):
        align_block_to_state(config)
    return config


def stand_in_model_config(model):
    (layer, *_) = [layer for layer in model.attention if not isinstance(layer, StateLayers)]
    latent = isinstance(layer, Latent)
    num_kv_heads = 1 if latent else getattr(layer, "num_kv_heads", 1)
    states = next((layer for layer in model.attention if isinstance(layer, StateLayers)), None)
    config = SimpleNamespace(
        dtype=vllm().bfloat16,
        use_mla=latent,
        architecture=None if states is None else states.kind,
        max_model_len=model.architecture.max_model_len,
        model_arch_config=SimpleNamespace(total_num_kv_heads=num_kv_heads),
        get_head_size=lambda: layer.kv_lora_rank + layer.qk_rope_head_dim if latent else layer.head_dim,
        hf_config=None if states is None else hf_config(states),
    )
    config.get_num_kv_heads = functools.partial(vllm().ModelConfig.get_num_kv_heads, config)
    config.hf_text_config = config.hf_config
    return config


def hf_config(layer):
    """The fields of config.json that states are sized by."""
    if layer.kind == "kda":
        sizes = {"num_heads": layer.num_value_heads, "head_dim": layer.value_head_dim}
        return SimpleNamespace(linear_attn_config={**sizes, "short_conv_kernel_size": layer.conv_kernel})
    if layer.kind == "mamba2":
        return SimpleNamespace(
            mamba_num_heads=layer.num_heads,
            mamba_head_dim=layer.head_dim,
            n_groups=layer.num_groups,
            ssm_state_size=layer.state_len,
            conv_kernel=layer.conv_kernel,
        )
    return SimpleNamespace(
        linear_num_key_heads=layer.num_key_heads,
        linear_num_value_heads=layer.num_value_heads,
        linear_key_head_dim=layer.key_head_dim,
        linear_value_head_dim=layer.value_head_dim,
        linear_conv_kernel_dim=layer.conv_kernel,
    )


def state_class(kind):
    """Qwen3.5's own class needs packages that are not here; its states are Qwen3-Next's."""
    classes = {"gdn": "Qwen3NextForCausalLM", "kda": "KimiLinearForCausalLM", "mamba2": "NemotronHForCausalLM"}
    return getattr(vllm(), classes[kind])


def align_block_to_state(config):
    """What vLLM's platform does to a hybrid model's block size, with the kernels of NVIDIA GPUs."""
    backend = vllm().FlashMLABackend if config.model_config.use_mla else vllm().FlashAttentionBackend
    found = (state_class(config.model_config.architecture), config.model_config.architecture)
    with (
        patch.object(vllm().Platform, "_find_non_ssm_backends", classmethod(lambda _cls, _config: [backend])),
        patch("vllm.model_executor.models.ModelRegistry.resolve_model_cls", lambda *_args, **_more: found),
    ):
        vllm().Platform._align_hybrid_block_size(config, backend)


def layer_specs(model, config):
    """{name of a cache: spec}, all layers; kinds of layers take turns as long as there are some of each."""
    left = {index: kind.num_layers for index, kind in enumerate(model.attention)}
    specs, numbers = {}, itertools.count()
    while any(left.values()):
        for index in [index for index, count in left.items() if count]:
            left[index] -= 1
            layer = f"model.layers.{next(numbers)}"
            kind = model.attention[index]
            specs |= {f"{layer}.{name}": spec for name, spec in MAKERS[type(kind)](kind, config, layer).items()}
    return specs


def grouped_query(kind, config, _layer):
    served = SimpleNamespace(use_mla=False, model_arch_config=SimpleNamespace(total_num_kv_heads=kind.num_kv_heads))
    layer = SimpleNamespace(
        attn_type=vllm().AttentionType.DECODER,
        attn_backend=vllm().FlashAttentionBackend,
        kv_cache_dtype=config.cache_config.cache_dtype,
        kv_cache_torch_dtype=torch_dtype(config),
        sliding_window=kind.window,
        attention_chunk_size=kind.chunk,
        num_kv_heads=vllm().ModelConfig.get_num_kv_heads(served, config.parallel_config),
        head_size=kind.head_dim,
        head_size_v=kind.head_dim,
    )
    cls = vllm().Attention if kind.chunk is None else vllm().ChunkedLocalAttention
    return {"attn": cls.get_kv_cache_spec(layer, config)}


def latent(kind, config, _layer):
    layer = SimpleNamespace(
        kv_cache_dtype=config.cache_config.cache_dtype,
        head_size=kind.kv_lora_rank + kind.qk_rope_head_dim,
        sliding_window=None,
        indexer=None,
        non_causal_multi_token_decode=False,
    )
    cls = vllm().MultiHeadLatentAttention if kind.output_gate else vllm().MLAAttention
    if kind.index is None:
        return {"attn": cls.get_kv_cache_spec(layer, config)}
    keys = SimpleNamespace(
        cache_config=config.cache_config,
        head_dim=kind.index.head_dim + kind.index.head_dim // 128 * 4,
        dtype=vllm().uint8,
    )
    index = vllm().DeepseekV32IndexerCache.get_kv_cache_spec(keys, config)
    return {"indexer": index, "attn": cls.get_kv_cache_spec(layer, config)}


def compressed(kind, config, layer):
    """In the order in which DeepseekV4Attention makes its caches."""
    packed = config.cache_config.cache_dtype == "fp8_ds_mla"
    dtype = vllm().uint8 if packed else torch_dtype(config)
    window = vllm().DeepseekV4SWACache(kind.head_dim, kind.window, dtype, f"{layer}.swa", config.cache_config)
    caches = {"swa": window}
    if kind.compress_ratio > 1:
        caches["attn"] = SimpleNamespace(
            compress_ratio=kind.compress_ratio,
            kv_cache_dtype=config.cache_config.cache_dtype,
            kv_cache_torch_dtype=dtype,
            head_dim=kind.head_dim,
        )
        caches["state"] = state_cache(kind, kind.head_dim, f"{layer}.state")
    if kind.index is not None:
        head_dim = kind.index.head_dim + kind.index.head_dim // 128 * 4
        keys = vllm().DeepseekV4IndexerCache(
            head_dim, vllm().uint8, f"{layer}.index", config.cache_config, kind.compress_ratio
        )
        states = state_cache(kind, kind.index.head_dim, f"{layer}.index.state")
        caches = {"index": keys, "index.state": states, **caches}
    attend = vllm().DeepseekV4Attention.get_kv_cache_spec
    return {
        name: attend(cache, config) if isinstance(cache, SimpleNamespace) else cache.get_kv_cache_spec(config)
        for name, cache in caches.items()
    }


def state_cache(kind, head_dim, prefix):
    """As DeepseekCompressor makes it: values and scores, twice where entries overlap."""
    overlap = 1 + (kind.compress_ratio == 4)
    cls = vllm().CompressorStateCache
    return cls(2 * overlap * head_dim, vllm().float32, kind.compress_ratio, prefix)


def recurrent(kind, config, _layer):
    cls = state_class(kind.kind)
    layer = SimpleNamespace(
        get_state_shape=lambda: cls.get_mamba_state_shape_from_config(config),
        get_state_dtype=lambda: cls.get_mamba_state_dtype_from_config(config),
        mamba_type=vllm().MambaAttentionBackendEnum.GDN_ATTN,
        is_kv_cache_tp_replicated=False,
    )
    return {"linear": vllm().MambaBase.get_kv_cache_spec(layer, config)}


def torch_dtype(config):
    return vllm().kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config)


MAKERS = {GroupedQuery: grouped_query, Latent: latent, Compressed: compressed, DeltaRule: recurrent, Mamba2: recurrent}

"""The only file that knows vLLM's versions (0.32 and 0.33): where its names live, and what its configuration says."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

from kvconnector.keys import Place
from kvcore.engine.model import flagged_or_all
from kvcore.errors import InvalidArgument, require
from kvcore.keys import NamespaceField
from kvcore.kv_events import BlockExtras, BlocksRemoved, BlocksStored, no_extra_keys, untagged
from kvcore.ranks import RankLayout, Sharding
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, ModelSpec, Recurrent, Scratch, SlidingWindow
from kvcore.types import Run

__all__ = [
    "KVCacheEvent", "KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorPromMetrics", "KVConnectorRole",
    "KVConnectorStats", "KVConnectorTransferResults", "KVConnectorWorkerMetadata", "SupportsHMA", "block_bytes",
    "describe_hashes", "describe_model", "event_extra_keys", "get_ip", "has_private_hashes", "hash_block_size",
    "in_tree_model_name", "in_tree_places", "lora_name", "namespace_fields", "published", "publishes_events",
    "rank_of", "require_memory_that_stays", "require_one_allocator", "shardings", "untested_version", "worker_name",
]  # fmt: skip

TESTED = {"0.32": "run on CPU", "0.33": "its signatures and scheduler, without a model"}
"""vLLM's versions, and what was done with each."""

_KV_HEADS = re.compile("kv_head|key_value_head|query_group|attention_group|heads_in_group")
"""In the name of a field of a model's configuration: a number of KV heads."""


def describe_model(vllm_config: Any, kv_cache_config: Any) -> ModelSpec:
    """The engine's KV cache groups and where its hits end; raises InvalidArgument naming what is not supported."""
    groups = kv_cache_config.kv_cache_groups
    require(groups, "kv_cache_groups", groups, "at least one group")
    block_size, hash_unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    hit_unit = kv_cache_config.cache_hit_alignment_tokens
    splits = hit_unit is not None and hit_unit < block_size
    return ModelSpec(
        tuple(_group_spec(_one_spec(group)) for group in groups),
        _draft_groups(vllm_config, groups),
        hash_unit=int(hash_unit) if splits else None,
        hit_unit=int(hit_unit) if splits else None,
    )


def _draft_groups(vllm_config: Any, groups: Sequence[Any]) -> frozenset[int]:
    """The groups whose last block of a hit the engine drops; all when it cannot tell which hold draft layers."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return frozenset()
    flagged = frozenset(index for index, group in enumerate(groups) if group.is_eagle_group)
    return flagged_or_all(flagged, len(groups))


def namespace_fields(vllm_config: Any, kv_cache_config: Any) -> dict[str, NamespaceField]:
    """Everything two engines must have in common for the bytes of one to be right in the other, and to be found."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "format": 3,
        "model": str(model.model),
        "revision": model.revision,
        "quantization": None if model.quantization is None else str(model.quantization),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "kv_layout": kv_cache_config.kv_cache_layout or cache.kv_cache_layout,
        "kv_packing": _packing(),
        "kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "positions": _position_fields(model),
        "drafts": _draft_fields(vllm_config.speculative_config),
        "groups": [_spec_fields(_one_spec(group)) for group in kv_cache_config.kv_cache_groups],
        "layers": [list(group.layer_names) for group in kv_cache_config.kv_cache_groups],
        "hash_block_size": hash_block_size(vllm_config, kv_cache_config),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(vllm_config),
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "stages": os.environ.get("VLLM_PP_LAYER_PARTITION") if parallel.pipeline_parallel_size > 1 else None,
        "shards": _shard_fields(vllm_config, kv_cache_config),
    }


def _packing() -> list[NamespaceField]:
    """What no layout says: attention packs a block as suits the processor (v1/attention/backends/cpu_attn.py, ROCm)."""
    device = current_platform.device_type
    if device == "cpu":
        return [device, platform.machine(), torch.cpu._is_amx_tile_supported()]
    return [device, os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")]


def _shard_fields(vllm_config: Any, kv_cache_config: Any) -> list[NamespaceField]:
    """Objects that a block of each group is; None for a group of which nothing is stored.

    With all else equal it says what each object holds: the latent, or one part of the KV heads of so many. The tensor
    parallel size is not in it: a latent is the same on any number of ranks, and so is one of two heads on two or four.
    """
    cuts = shardings(vllm_config, kv_cache_config)
    cacheable = [_one_spec(group).prefix_cacheable for group in kv_cache_config.kv_cache_groups]
    return [cut.num_shards if stored else None for cut, stored in zip(cuts, cacheable, strict=True)]


def in_tree_model_name(vllm_config: Any) -> str:
    """What vLLM's MooncakeStoreConnector calls the model in its keys: the last part of its path."""
    return str(vllm_config.model_config.model).rstrip("/").split("/")[-1]


def in_tree_places(vllm_config: Any, kv_cache_config: Any) -> tuple[tuple[Place, ...], ...]:
    """Per group, the place in vLLM's MooncakeStoreConnector of each shard; nothing where no key is made.

    Where that connector takes ranks to have equal bytes and `shardings` does not, they have the same place. Raises
    InvalidArgument naming what that connector stores in another way.
    """
    parallel, num_host_blocks = vllm_config.parallel_config, kv_cache_config.hisparse_host_num_blocks
    fix = 'with key_format "vllm"; set key_format to "kvtwin"'
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        require(getattr(parallel, name) == 1, name, getattr(parallel, name), f"1 {fix}")
    require(num_host_blocks is None, "hisparse_host_num_blocks", num_host_blocks, f"None {fix}")
    num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
    cacheable = kv_cache_config.prefix_cacheable_group_ids
    places: list[tuple[Place, ...]] = []
    cuts = shardings(vllm_config, kv_cache_config)
    for index, (group, cut) in enumerate(zip(kv_cache_config.kv_cache_groups, cuts, strict=True)):
        replicas = _tensor_replicas(group, parallel.tensor_parallel_size, num_kv_heads)
        holders = cut.holders if index in cacheable else ()
        places.append(tuple(_in_tree_place(parallel, ranks[0], replicas) for ranks in holders))
    return tuple(places)


def _in_tree_place(parallel: Any, rank: int, replicas: int) -> Place:
    stage, tp = divmod(rank, parallel.tensor_parallel_size)
    return Place(tp=tp // replicas, pcp=0, dcp=0, pp=stage % parallel.pipeline_parallel_size)


def _tensor_replicas(group: Any, tp: int, num_kv_heads: int) -> int:
    """Neighbouring tensor ranks that hold the same bytes of the group."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if any(isinstance(spec, MambaSpec) for spec in specs):
        return 1
    if all(isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) for spec in specs):
        return tp
    return max(1, tp // num_kv_heads)


def describe_hashes(vllm_config: Any) -> str:
    """Algorithm and seed of the block hashes: engines in which they differ have no hash in common."""
    return f"{vllm_config.cache_config.prefix_caching_hash_algo} with {_hash_seed(vllm_config)}"


def has_private_hashes(vllm_config: Any) -> bool:
    """Whether block hashes are seeded at random: what the engine stores, nobody else finds."""
    return _hash_seed(vllm_config) == _PRIVATE_SEED


_OWN_SEED = "vLLM's own seed"
_PRIVATE_SEED = "a seed that no other engine has, for want of PYTHONHASHSEED"


def _hash_seed(vllm_config: Any) -> str:
    """What seeds the block hashes, in words that do not tell it; different words for different seeds."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED (digest {hashlib.sha256(seed.encode()).hexdigest()[:8]})"
    return _PRIVATE_SEED if str(vllm_config.cache_config.prefix_caching_hash_algo).startswith("xxhash") else _OWN_SEED


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per entry of a request's `block_hashes`."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def shardings(vllm_config: Any, kv_cache_config: Any) -> tuple[Sharding, ...]:
    """Per group, which of the engine's ranks hold which part of its blocks.

    Raises InvalidArgument for context parallelism, under which a block's tokens are dealt out.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        require(size == 1, name, size, "1: sharding by context is not supported")
    layout = RankLayout(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size)
    groups = kv_cache_config.kv_cache_groups
    return tuple(Sharding(layout, _num_parts(vllm_config, group, layout.tp)) for group in groups)


def untested_version(version: str = vllm.__version__) -> str | None:
    """What to warn of when this vLLM is none that was tested; it names those that were."""
    tested = ", ".join(f"{known} ({how})" for known, how in TESTED.items())
    known = ".".join(version.split(".")[:2]) in TESTED
    return None if known else f"vLLM {version} has not been tested with kvtwin, but {tested}"


def require_memory_that_stays(vllm_config: Any) -> None:
    """Raises InvalidArgument for sleep mode where a connector is not told of it, as it is from vLLM 0.33 on.

    It takes the memory from under a KV cache that the pool has registered.
    """
    sleeps = bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
    told = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
    expected = "False with this vLLM, or vLLM 0.33: the KV cache's memory is registered with the pool"
    require(told or not sleeps, "enable_sleep_mode", sleeps, expected)


def require_one_allocator(vllm_config: Any) -> None:
    """Raises InvalidArgument where the KV cache is to come from another allocator already."""
    own = bool(getattr(vllm_config.model_config, "enable_cumem_allocator", False))
    require(not own, "enable_cumem_allocator", own, "False with custom_mem_pool, which allocates the KV cache itself")


def block_bytes(kv_cache_config: Any) -> tuple[int, ...]:
    """Per group, what a block takes on one rank."""
    return tuple(map(_block_bytes, kv_cache_config.kv_cache_groups))


def _block_bytes(group: Any) -> int:
    sizes_bytes = [int(spec.page_size_bytes) for spec in iter_layer_specs(group.kv_cache_spec)]
    return sum(sizes_bytes) if len(sizes_bytes) > 1 else sizes_bytes[0] * len(group.layer_names)


def worker_name(vllm_config: Any) -> str:
    """Of this worker among those of all data parallel engines; fit for a file name."""
    parallel = vllm_config.parallel_config
    return f"engine{parallel.data_parallel_index}-rank{parallel.rank}"


def rank_of(vllm_config: Any) -> int:
    """This worker's place among the engine's ranks, from 0."""
    return int(vllm_config.parallel_config.rank)


def _num_parts(vllm_config: Any, group: Any, tp: int) -> int:
    """Tensor ranks of the group that differ in their bytes: latents are on all of them, a KV head on some.

    All of them, unless it is certain that the rest are replicas: two that differ must not share an object. The answer
    must be the same in every worker and in the scheduler, which see different layers of the group.
    """
    spec = _one_spec(group)
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return 1
    if tp == 1 or isinstance(spec, MambaSpec) or not spec.prefix_cacheable or vllm_config.speculative_config:
        return tp
    model = vllm_config.model_config
    num_kv_heads = int(model.get_total_num_kv_heads())
    named = set(_numbers_of_kv_heads(getattr(model, "hf_text_config", None)))
    if tp % num_kv_heads or tp == num_kv_heads or not named <= {num_kv_heads, None}:
        return tp
    numbers = sorted({layer.num_kv_heads for layer in iter_layer_specs(group.kv_cache_spec)})
    require(numbers == [1], "num_kv_heads", numbers, f"1 on each rank, of {num_kv_heads} on {tp} tensor parallel ranks")
    return num_kv_heads


def _numbers_of_kv_heads(config: Any) -> Iterable[object]:
    """Every number of KV heads that a model's configuration names; layers may differ in it."""
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            named = _KV_HEADS.search(str(name)) and not isinstance(value, Mapping)
            yield from (value if isinstance(value, list | tuple) else [value]) if named else _numbers_of_kv_heads(value)
    elif isinstance(fields, list | tuple):
        for value in fields:
            yield from _numbers_of_kv_heads(value)


def publishes_events(vllm_config: Any) -> bool:
    """Whether the engine collects KV events, its own setting `enable_kv_cache_events`."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def lora_name(request: Any) -> str | None:
    """Of the adapter that the request runs with."""
    return None if request.lora_request is None else str(request.lora_request.lora_name)


def event_extra_keys(request: Any, block_size: int, run: Run) -> Sequence[BlockExtras]:
    """Per block of the run, what beside its tokens the engine has hashed into it, tagged."""
    given = (request.lora_request, request.mm_features, request.cache_salt)
    if not any(given) and request.prompt_embeds is None:
        return no_extra_keys(run)
    keys, item = [], 0
    for block in range(*run):
        block_keys, item = generate_block_hash_extra_keys(request, block * block_size, (block + 1) * block_size, item)
        keys.append(block_keys)
    return keys


def published(event: BlocksStored | BlocksRemoved, kv_cache_config: Any) -> KVCacheEvent:
    """The event about the pool in vLLM's form, hashes in the form that VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES chooses."""
    hashes = [maybe_convert_block_hash(block_hash) for block_hash in event.block_hashes]
    medium, group, locality = event.place.medium.value, event.place.group, "REMOTE"
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group, locality=locality)
    parent, spec = event.parent_block_hash, kv_cache_config.kv_cache_groups[group].kv_cache_spec
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=list(event.token_ids),
        block_size=event.block_size,
        lora_id=None,  # deprecated for the name, which says more to another engine
        medium=medium,
        lora_name=event.lora_name,
        extra_keys=untagged(event.extra_keys),
        group_idx=group,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        locality=locality,
    )


def _one_spec(group: Any) -> Any:
    # A group of layers that differ in size holds one spec per layer; what we read of them is equal.
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def _group_spec(spec: Any) -> GroupSpec:
    kind = type(spec)
    if not spec.prefix_cacheable:
        return Scratch(spec.block_size)
    # What the engine compares beside the shape: groups that differ in it are looked up apart.
    layout = f"{kind.__name__} {getattr(spec, 'num_kv_heads', '')} {getattr(spec, 'head_size', '')}"
    if kind in (FullAttentionSpec, MLAAttentionSpec):
        return FullAttention(spec.block_size, layout=layout)
    if kind in (SlidingWindowSpec, SlidingWindowMLASpec):
        retained = getattr(spec, "extra_retained_tokens", 0)
        return SlidingWindow(spec.block_size, spec.sliding_window, retained, layout=layout)
    if kind is ChunkedLocalAttentionSpec:
        return ChunkedLocal(spec.block_size, spec.attention_chunk_size)
    if kind is MambaSpec:
        mode = spec.mamba_cache_mode
        require(mode == "align", "mamba_cache_mode", mode, '"align": other modes keep no state at block ends')
        return Recurrent(spec.block_size)
    raise InvalidArgument("kv_cache_spec", kind.__name__, "full, sliding-window, chunked-local or Mamba layers")


def _position_fields(model: Any) -> str:
    """How positions are turned into keys: a user can override it without renaming the model."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    hf_config = getattr(model, "hf_text_config", None)
    fields = {name: getattr(hf_config, name, None) for name in names}
    text = json.dumps(fields, sort_keys=True, default=str)
    # These two choose their factors by the longest sequence that is served.
    depends_on_length = "longrope" in text or "dynamic" in text
    return f"{text} {model.max_model_len}" if depends_on_length else text


def _draft_fields(speculative: Any) -> list[NamespaceField]:
    if speculative is None:
        return []
    return [str(getattr(speculative, name, None)) for name in ("method", "model", "revision")]


def _spec_fields(spec: Any) -> list[NamespaceField]:
    named = ("block_size", "num_kv_heads", "head_size", "sliding_window", "attention_chunk_size", "page_size_bytes")
    of_any_type = ("dtype", "dtypes", "shapes", "mamba_type", "head_size_v", "kv_quant_mode")
    texts: list[NamespaceField] = [str(getattr(spec, name, None)) for name in of_any_type]
    return [type(spec).__name__, *texts, *(getattr(spec, name, None) for name in named)]

"""What the catalogue holds, as a document: models with the bytes of their KV cache groups, and devices."""

from kvcore.errors import InvalidArgument
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, Recurrent, SlidingWindow
from kvsim import catalog
from kvsim.document import Document
from kvsim.llm.groups import KVGroup
from kvsim.llm.model import LlmModel

BLOCK_SIZE = 16
"""vLLM's default, which models whose kernels need other sizes do not follow."""


def listing(tensor_parallel_size: int) -> Document:
    """All models on instances of so many ranks, and all devices; a model whose heads do not divide is left out."""
    models = [catalog.llm_model(name) for name in catalog.llm_models()]
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "models": [_model(model, tensor_parallel_size) for model in models if _divides(model, tensor_parallel_size)],
        "devices": [_device(name) for name in catalog.devices()],
    }


def bytes_per_token(groups: tuple[KVGroup, ...]) -> int:
    """In the pool, of the groups that need all of the past."""
    return sum(group.pool_bytes // group.spec.block_size for group in groups if group.spec.prefix_closed)


def bytes_per_sequence(groups: tuple[KVGroup, ...]) -> int:
    """In the pool, beside that: recurrent states, and windows that are full."""
    return sum(_bounded_bytes(group) for group in groups)


def kind_of(spec: GroupSpec) -> str:
    """Full, a window of so many tokens, a chunk, or a state."""
    match spec:
        case SlidingWindow():
            return f"window {spec.window}"
        case ChunkedLocal():
            return f"chunk {spec.chunk}"
        case Recurrent():
            return "state"
    assert isinstance(spec, FullAttention), spec
    return "full"


def _divides(model: LlmModel, tp: int) -> bool:
    try:
        model.kv_groups(BLOCK_SIZE, tp), model.rank_weights(tp)
    except InvalidArgument:
        return False
    return True


def _bounded_bytes(group: KVGroup) -> int:
    match group.spec:
        case SlidingWindow(window=num_tokens) | ChunkedLocal(chunk=num_tokens):
            return group.pool_bytes * num_tokens // group.spec.block_size
        case Recurrent():
            return group.pool_bytes
    return 0


def _model(model: LlmModel, tp: int) -> Document:
    groups = model.kv_groups(BLOCK_SIZE, tp)
    return {
        "name": model.name,
        "description": model.description,
        "num_params": model.num_params,
        "num_active_params": model.num_active_params,
        "weight_bytes_per_gpu": model.rank_weights(tp).size_bytes,
        "kv_cache_dtype": model.kv_cache.dtype,
        "kv_bytes_per_token": bytes_per_token(groups),
        "kv_bytes_per_sequence": bytes_per_sequence(groups),
        "groups": [_group(group) for group in groups],
    }


def _group(group: KVGroup) -> Document:
    return {
        "kind": kind_of(group.spec),
        "block_size": group.spec.block_size,
        "num_layers": group.num_layers,
        "block_bytes_per_gpu": group.block_bytes,
        "page_bytes_per_gpu": group.page_bytes,
        "pool_bytes": group.pool_bytes,
        "num_shards": group.num_shards,
    }


def _device(name: str) -> Document:
    device = catalog.device(name)
    return {
        "name": name,
        "description": device.description,
        "memory_bytes": device.memory.capacity_bytes,
        "memory_bytes_per_s": device.memory.bandwidth_bytes_per_s,
        "bf16_flops_per_s": device.compute.bf16_flops_per_s,
        "fp8_flops_per_s": device.compute.fp8_flops_per_s,
        "fp4_flops_per_s": device.compute.fp4_flops_per_s,
    }

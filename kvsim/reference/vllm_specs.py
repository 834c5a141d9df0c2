"""The groups of a model as vLLM specifies them: block tables and hits depend on nothing else of a layer."""

from typing import Any

from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, Recurrent, SlidingWindow

_DTYPE = STR_DTYPE_TO_TORCH_DTYPE["half"]


def vllm_spec(group: GroupSpec) -> Any:
    """One layer of the group, of the smallest head; groups of one kind and layout get equal specs."""
    layer = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 8, "dtype": _DTYPE}
    match group:
        case FullAttention():
            return FullAttentionSpec(**layer)
        case SlidingWindow():
            retained = group.extra_retained_tokens
            return SlidingWindowSpec(**layer, sliding_window=group.window, extra_retained_tokens=retained)
        case ChunkedLocal():
            return ChunkedLocalAttentionSpec(**layer, attention_chunk_size=group.chunk)
        case Recurrent():
            return MambaSpec(group.block_size, shapes=((1,),), dtypes=(_DTYPE,), mamba_cache_mode="align")
    raise AssertionError(group)

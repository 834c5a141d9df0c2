"""What every kind of attention layer answers, and the grouped-query one."""

from abc import abstractmethod
from typing import Annotated

from pydantic import model_validator

from kvcore.errors import require
from kvcore.spec import ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvsim import toml
from kvsim.llm.cache import CacheOptions, Kept, LayerCache, LayerWork, Scan, State
from kvsim.llm.dtypes import KV_BYTES, KVCacheDtype
from kvsim.sourced import Sourced
from kvsim.toml import PositiveCount

KINDS = ("gqa", "mla", "compressed", "gdn", "kda", "mamba2")
"""Of attention layers; what is none of them is refused as a grouped-query one."""


class AttentionLayers(Sourced):
    """`num_layers` equal attention layers; all answers but `work` are about one of them."""

    num_layers: PositiveCount

    @abstractmethod
    def num_params(self, hidden_size: int, tp: int) -> int:
        """Weights of its matrix products on one rank of `tp`."""

    @abstractmethod
    def caches(self, options: CacheOptions) -> tuple[LayerCache, ...]:
        """What it keeps, in the order in which vLLM registers it."""

    @abstractmethod
    def kept(self) -> tuple[Kept | State, ...]:
        """The same by the published formula."""

    @abstractmethod
    def work(self, tp: int, dtype: KVCacheDtype) -> LayerWork:
        """What these layers do beside their matrices."""

    def block_size(self, asked: int) -> int:
        """Tokens in a block, when the engine is asked for so many: what its kernels take."""
        return asked


def share(num_heads: int, tp: int) -> int:
    """Heads of one rank; heads fewer than ranks are held by several. Raises InvalidArgument for an uneven split."""
    even = num_heads % tp == 0 or tp % num_heads == 0
    require(even, "tensor_parallel_size", tp, f"a divisor or a multiple of {num_heads} heads")
    return max(1, num_heads // tp)


class GroupedQuery(AttentionLayers):
    """MHA, MQA, GQA: a K and a V per KV head; over all earlier tokens, a window of them, or the own chunk."""

    kind: Annotated[str, toml.one_of(KINDS)]
    num_heads: PositiveCount
    num_kv_heads: PositiveCount
    head_dim: PositiveCount
    window: PositiveCount | None = None
    chunk: PositiveCount | None = None
    output_gate: bool = False
    """The query projection also makes a gate for the output, of the same size."""
    k_is_v: bool = False
    """One projection makes K and V, which are kept apart."""

    @model_validator(mode="after")
    def _one_kind(self) -> "GroupedQuery":
        if self.window is not None and self.chunk is not None:
            raise ValueError("a window or a chunk, not both")
        return self

    def num_params(self, hidden_size: int, tp: int) -> int:
        """Q (and gate), K, V, O."""
        heads, kv_heads = share(self.num_heads, tp), share(self.num_kv_heads, tp)
        projections = heads * (3 if self.output_gate else 2) + kv_heads * (1 if self.k_is_v else 2)
        return hidden_size * self.head_dim * projections

    def caches(self, options: CacheOptions) -> tuple[LayerCache, ...]:
        """K and V of the rank's heads."""
        size_bytes = self._entry_bytes(options.tp, options.dtype) * options.block_size
        return (LayerCache(self._spec(options), size_bytes, size_bytes, min(options.tp, self.num_kv_heads)),)

    def kept(self) -> tuple[Kept | State, ...]:
        """K and V of all heads."""
        return (Kept(2 * self.num_kv_heads * self.head_dim, window=self.window or self.chunk),)

    def work(self, tp: int, dtype: KVCacheDtype) -> LayerWork:
        """QK^T and PV."""
        macs = 2 * share(self.num_heads, tp) * self.head_dim
        scan = Scan(macs, macs, self._entry_bytes(tp, dtype), max_entries=self.window or self.chunk)
        return LayerWork(self.num_layers, (scan,))

    def _entry_bytes(self, tp: int, dtype: KVCacheDtype) -> int:
        return 2 * share(self.num_kv_heads, tp) * self.head_dim * KV_BYTES[dtype]

    def _spec(self, options: CacheOptions) -> GroupSpec:
        layout = f"{share(self.num_kv_heads, options.tp)} x {self.head_dim}"
        if self.window is not None:
            return SlidingWindow(options.block_size, self.window, layout=layout)
        if self.chunk is not None:
            return ChunkedLocal(options.block_size, self.chunk, layout=layout)
        return FullAttention(options.block_size, layout=layout)

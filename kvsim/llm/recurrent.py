"""Layers with a state instead of a past: the gated delta rule of GDN and KDA."""

from typing import Literal

from kvcore.spec import Recurrent
from kvsim.llm.cache import CacheOptions, Kept, LayerCache, LayerWork, State
from kvsim.llm.dtypes import STATE_DTYPE_BYTES, KVCacheDtype
from kvsim.llm.layers import AttentionLayers, share
from kvsim.toml import PositiveCount

MACS_PER_STATE_ELEMENT = 3
"""Read by the key, written by the outer product, read by the query."""


class DeltaRule(AttentionLayers):
    """GDN (a gate per head) or KDA (a gate per channel): a matrix per value head, and the convolution's last inputs."""

    kind: Literal["gdn", "kda"]
    num_key_heads: PositiveCount
    num_value_heads: PositiveCount
    key_head_dim: PositiveCount
    value_head_dim: PositiveCount
    conv_kernel: PositiveCount
    conv_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    state_dtype: Literal["bfloat16", "float32"] = "float32"

    def num_params(self, hidden_size: int, tp: int) -> int:
        """Q, K, V, gate and output by heads; KDA's decay goes through a bottleneck that every rank has."""
        heads, key_dim, value_dim = share(self.num_value_heads, tp), self._key_dim(tp), self._value_dim(tp)
        common = hidden_size * (2 * key_dim + 3 * value_dim + heads) + (2 * key_dim + value_dim) * self.conv_kernel
        if self.kind == "gdn":
            return common + hidden_size * heads
        return common + self.key_head_dim * (hidden_size + key_dim)

    def caches(self, options: CacheOptions) -> tuple[LayerCache, ...]:
        """The state; the engine pads it to its page."""
        spec = Recurrent(options.block_size, layout="state")
        size_bytes = self._state_bytes(options.tp)
        return (LayerCache(spec, size_bytes, size_bytes, options.tp),)

    def kept(self) -> tuple[Kept | State, ...]:
        """The state."""
        return (State(self._state_bytes(1)),)

    def work(self, tp: int, dtype: KVCacheDtype) -> LayerWork:
        """The rule itself, token by token."""
        macs = MACS_PER_STATE_ELEMENT * self._value_dim(tp) * self.key_head_dim
        return LayerWork(self.num_layers, (), macs, self._state_bytes(tp))

    def _key_dim(self, tp: int) -> int:
        return share(self.num_key_heads, tp) * self.key_head_dim

    def _value_dim(self, tp: int) -> int:
        return share(self.num_value_heads, tp) * self.value_head_dim

    def _state_bytes(self, tp: int) -> int:
        convolved = (2 * self._key_dim(tp) + self._value_dim(tp)) * (self.conv_kernel - 1)
        matrices = self._value_dim(tp) * self.key_head_dim
        return convolved * STATE_DTYPE_BYTES[self.conv_dtype] + matrices * STATE_DTYPE_BYTES[self.state_dtype]

"""Layers with a state instead of a past: the gated delta rule of GDN and KDA, and Mamba2."""

from abc import abstractmethod
from typing import Literal

from kvcore.spec import Recurrent
from kvsim.llm.cache import CacheOptions, Kept, LayerCache, LayerWork, State
from kvsim.llm.dtypes import STATE_DTYPE_BYTES, KVCacheDtype
from kvsim.llm.layers import AttentionLayers, share
from kvsim.toml import PositiveCount

MACS_PER_ELEMENT = {"gdn": 3, "kda": 3, "mamba2": 2}
"""Of the state, per token. The delta rule reads it by the key, writes the outer product and reads it by the query;
Mamba2 writes and reads."""


class StateLayers(AttentionLayers):
    """A matrix per head, in float32 as a rule, and the last inputs of a short convolution."""

    kind: Literal["gdn", "kda", "mamba2"]
    conv_kernel: PositiveCount
    conv_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    state_dtype: Literal["bfloat16", "float32"] = "float32"

    @abstractmethod
    def _num_state_elements(self, tp: int) -> int:
        """Of the matrices on one rank."""

    @abstractmethod
    def _conv_len(self, tp: int) -> int:
        """What is convolved of a token, on one rank."""

    def caches(self, options: CacheOptions) -> tuple[LayerCache, ...]:
        """The state; the engine pads it to its page."""
        spec = Recurrent(options.block_size, layout="state")
        size_bytes = self._state_bytes(options.tp)
        return (LayerCache(spec, size_bytes, size_bytes, options.tp),)

    def kept(self) -> tuple[Kept | State, ...]:
        """The state."""
        return (State(self._state_bytes(1)),)

    def work(self, tp: int, dtype: KVCacheDtype) -> LayerWork:
        """The recurrence itself, token by token."""
        macs = MACS_PER_ELEMENT[self.kind] * self._num_state_elements(tp)
        return LayerWork(self.num_layers, (), macs, self._state_bytes(tp))

    def _state_bytes(self, tp: int) -> int:
        convolved_bytes = self._conv_len(tp) * (self.conv_kernel - 1) * STATE_DTYPE_BYTES[self.conv_dtype]
        return convolved_bytes + self._num_state_elements(tp) * STATE_DTYPE_BYTES[self.state_dtype]


class DeltaRule(StateLayers):
    """GDN (a gate per head) or KDA (a gate per channel): a matrix per value head."""

    kind: Literal["gdn", "kda"]
    num_key_heads: PositiveCount
    num_value_heads: PositiveCount
    key_head_dim: PositiveCount
    value_head_dim: PositiveCount

    def num_params(self, hidden_size: int, tp: int) -> int:
        """Q, K, V, gate and output by heads; KDA's decay goes through a bottleneck that every rank has."""
        heads, key_dim, value_dim = share(self.num_value_heads, tp), self._key_dim(tp), self._value_dim(tp)
        common = hidden_size * (2 * key_dim + 3 * value_dim + heads) + self._conv_len(tp) * self.conv_kernel
        if self.kind == "gdn":
            return common + hidden_size * heads
        return common + self.key_head_dim * (hidden_size + key_dim)

    def _num_state_elements(self, tp: int) -> int:
        return self._value_dim(tp) * self.key_head_dim

    def _conv_len(self, tp: int) -> int:
        return 2 * self._key_dim(tp) + self._value_dim(tp)

    def _key_dim(self, tp: int) -> int:
        return share(self.num_key_heads, tp) * self.key_head_dim

    def _value_dim(self, tp: int) -> int:
        return share(self.num_value_heads, tp) * self.value_head_dim


class Mamba2(StateLayers):
    """A matrix per head; heads of one group share what goes in and out of it."""

    kind: Literal["mamba2"]
    num_heads: PositiveCount
    head_dim: PositiveCount
    num_groups: PositiveCount
    state_len: PositiveCount

    def num_params(self, hidden_size: int, tp: int) -> int:
        """Gate, inputs, B, C, time steps, and output."""
        inputs = self._conv_len(tp) + share(self.num_heads, tp)
        return hidden_size * (2 * self._inner_len(tp) + inputs) + self._conv_len(tp) * self.conv_kernel

    def _num_state_elements(self, tp: int) -> int:
        return self._inner_len(tp) * self.state_len

    def _conv_len(self, tp: int) -> int:
        return self._inner_len(tp) + 2 * share(self.num_groups, tp) * self.state_len

    def _inner_len(self, tp: int) -> int:
        return share(self.num_heads, tp) * self.head_dim

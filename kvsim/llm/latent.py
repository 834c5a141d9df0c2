"""Attention over latents: MLA, also with a sparse index; DeepSeek-V4's over a window and compressed tokens."""

from typing import Literal

from kvcore.spec import FullAttention, SlidingWindow
from kvcore.units import div_ceil
from kvsim.llm.cache import CacheOptions, Kept, LayerCache, LayerWork, Scan, State
from kvsim.llm.dtypes import KV_BYTES, KVCacheDtype
from kvsim.llm.layers import AttentionLayers, share
from kvsim.sourced import Sourced
from kvsim.toml import PositiveCount

REPLICAS = 1
"""Every rank holds all of a latent."""

FP8, BF16, FLOAT32 = 1, 2, 4
"""Bytes of an element."""


class Index(Sourced):
    """A lightning indexer: small heads that choose which entries a layer attends to."""

    num_heads: PositiveCount
    head_dim: PositiveCount
    top_k: PositiveCount
    published_bits: PositiveCount | None = None
    """Of an element, where the published formula does not count it in the dtype of the KV cache."""
    cache_dtype: Literal["fp8", "mxfp4"] = "fp8"
    """vLLM's `indexer_kv_dtype`."""

    def num_params(self, hidden_size: int, q_lora_rank: int) -> int:
        """Queries out of the query latent, a key, a weight per head; every rank has all of them."""
        return q_lora_rank * self.num_heads * self.head_dim + hidden_size * (self.head_dim + self.num_heads)

    @property
    def entry_bytes(self) -> int:
        """Of a key with its scales, as vLLM keeps it: a float32 per 128 of fp8, an e8m0 per 32 of mxfp4."""
        if self.cache_dtype == "mxfp4":
            return self.head_dim // 2 + self.head_dim // 32
        return self.head_dim + self.head_dim // 128 * FLOAT32

    @property
    def macs(self) -> int:
        """Per query and key; the heads are not divided among ranks."""
        return self.num_heads * self.head_dim


class Latent(AttentionLayers):
    """MLA: one latent and one rotary key per token for all heads."""

    kind: Literal["mla"]
    num_heads: PositiveCount
    q_lora_rank: PositiveCount | None = None
    kv_lora_rank: PositiveCount
    qk_nope_head_dim: PositiveCount
    qk_rope_head_dim: PositiveCount
    v_head_dim: PositiveCount
    output_gate: bool = False
    index: Index | None = None

    def num_params(self, hidden_size: int, tp: int) -> int:
        """Down projections on every rank, up projections by heads."""
        heads, qk_dim = share(self.num_heads, tp), self.qk_nope_head_dim + self.qk_rope_head_dim
        q_input = hidden_size if self.q_lora_rank is None else self.q_lora_rank
        down = hidden_size * (self._latent_len + (self.q_lora_rank or 0))
        up = heads * (q_input * qk_dim + self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim))
        out = heads * self.v_head_dim * hidden_size * (2 if self.output_gate else 1)
        index = 0 if self.index is None else self.index.num_params(hidden_size, q_input)
        return down + up + out + index

    def caches(self, options: CacheOptions) -> tuple[LayerCache, ...]:
        """The latents, and the keys of the index."""
        sizes = {f"latent {self._latent_len}": self._entry_bytes(options.dtype)}
        if self.index is not None:
            sizes = {f"index {self.index.head_dim}": self.index.entry_bytes} | sizes
        return tuple(_page(FullAttention(options.block_size, layout=name), size) for name, size in sizes.items())

    def kept(self) -> tuple[Kept | State, ...]:
        """A latent, and a key of the index."""
        index = () if self.index is None else (Kept(self.index.head_dim, bits=self.index.published_bits),)
        return (Kept(self._latent_len), *index)

    def work(self, tp: int, dtype: KVCacheDtype) -> LayerWork:
        """Decodes attend in the space of latents; so do prefills that an index makes sparse."""
        heads = share(self.num_heads, tp)
        absorbed = heads * (self._latent_len + self.kv_lora_rank)
        size_bytes = self._entry_bytes(dtype)
        if self.index is not None:
            scans = (_index_scan(self.index), Scan(absorbed, absorbed, size_bytes, max_entries=self.index.top_k))
            return LayerWork(self.num_layers, scans)
        expanded = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return LayerWork(self.num_layers, (Scan(expanded, absorbed, size_bytes),))

    def block_size(self, asked: int) -> int:
        """The index's kernels take 64 tokens, the others what vLLM's do by default."""
        return div_ceil(asked, LATENT_BLOCK) * LATENT_BLOCK

    @property
    def _latent_len(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _entry_bytes(self, dtype: KVCacheDtype) -> int:
        """Packed: an fp8 latent, a float32 scale per 128 of it, the rotary key in bf16."""
        if dtype == "fp8_ds_mla":
            return self.kv_lora_rank + self.kv_lora_rank // 128 * FLOAT32 + self.qk_rope_head_dim * BF16
        return self._latent_len * KV_BYTES[dtype]


class Compressed(AttentionLayers):
    """DeepSeek-V4: the last `window` tokens as they are, and all of them in entries of `compress_ratio` tokens each.

    A ratio of 1 keeps the window only. What is not yet compressed waits in a window of its own, in float32.
    """

    kind: Literal["compressed"]
    num_heads: PositiveCount
    head_dim: PositiveCount
    rope_head_dim: PositiveCount
    q_lora_rank: PositiveCount
    o_groups: PositiveCount
    o_lora_rank: PositiveCount
    window: PositiveCount
    compress_ratio: Literal[1, 4, 128]
    index: Index | None = None

    def num_params(self, hidden_size: int, tp: int) -> int:
        """Query and output projections by heads; latents, compressor and index on every rank."""
        heads = share(self.num_heads, tp)
        down = hidden_size * (self.q_lora_rank + self.head_dim + self._state_len(self.head_dim))
        up = heads * self.head_dim * (self.q_lora_rank + self.o_lora_rank)
        out = share(self.o_groups, tp) * self.o_lora_rank * hidden_size
        if self.index is None:
            return down + up + out
        keys = hidden_size * (self._state_len(self.index.head_dim) + self.index.num_heads)
        return down + up + out + keys + self.q_lora_rank * self.index.macs

    def caches(self, options: CacheOptions) -> tuple[LayerCache, ...]:
        """Keys of the index and what waits for it, the window, compressed tokens and what waits for them."""
        size_bytes = self._entry_bytes(options.dtype)
        window = _page(SlidingWindow(WINDOW_BLOCK, self.window, layout="latent"), size_bytes, _pad(options))
        if self.compress_ratio == 1:
            return (window,)
        own = (window, self._compressed(options, "latent", size_bytes), self._state(options, self.head_dim))
        if self.index is None:
            return own
        index = self._compressed(options, "index", self.index.entry_bytes)
        return (index, self._state(options, self.index.head_dim), *own)

    def kept(self) -> tuple[Kept | State, ...]:
        """Window, compressed tokens, keys of the index; what waits to be compressed is not counted."""
        found = [Kept(self.head_dim, window=self.window)]
        if self.compress_ratio > 1:
            found.append(Kept(self.head_dim, self.compress_ratio))
        if self.index is not None:
            found.append(Kept(self.index.head_dim, self.compress_ratio, bits=self.index.published_bits))
        return tuple(found)

    def work(self, tp: int, dtype: KVCacheDtype) -> LayerWork:
        """The window, and all compressed tokens or those that the index chooses."""
        macs, size_bytes = 2 * share(self.num_heads, tp) * self.head_dim, self._entry_bytes(dtype)
        scans = [Scan(macs, macs, size_bytes, max_entries=self.window)]
        if self.compress_ratio > 1:
            top_k = None if self.index is None else self.index.top_k
            scans.append(Scan(macs, macs, size_bytes, self.compress_ratio, top_k))
        if self.index is not None:
            scans.append(_index_scan(self.index, self.compress_ratio))
        return LayerWork(self.num_layers, tuple(scans))

    def block_size(self, asked: int) -> int:
        """The kernels take 256 tokens: 64 entries of four."""
        return COMPRESSED_BLOCK

    def _entry_bytes(self, dtype: KVCacheDtype) -> int:
        """Packed: fp8 with 8 bytes of scales, the rotary part in bf16."""
        if dtype == "fp8_ds_mla":
            return self.head_dim - self.rope_head_dim + 8 + self.rope_head_dim * BF16
        return self.head_dim * KV_BYTES[dtype]

    def _state_len(self, head_dim: int) -> int:
        """Elements that wait per token: values and scores, twice where neighbouring entries overlap (ratio 4)."""
        return 0 if self.compress_ratio == 1 else 2 * self._overlap * head_dim

    @property
    def _overlap(self) -> int:
        return 2 if self.compress_ratio == 4 else 1

    def _compressed(self, options: CacheOptions, name: str, entry_bytes: int) -> LayerCache:
        spec = FullAttention(options.block_size, layout=f"{name} / {self.compress_ratio}")
        return _padded(spec, options.block_size // self.compress_ratio * entry_bytes, _pad(options))

    def _state(self, options: CacheOptions, head_dim: int) -> LayerCache:
        spec = SlidingWindow(STATE_BLOCKS[self.compress_ratio], self._overlap * self.compress_ratio, layout="state")
        return _page(spec, self._state_len(head_dim) * FLOAT32, _pad(options))


LATENT_BLOCK = 64
"""Tokens in a block of FlashMLA and of the sparse kernels (vLLM 0.32, v1/attention/backends/mla/)."""
COMPRESSED_BLOCK, WINDOW_BLOCK = 256, 64
"""vLLM 0.32: models/deepseek_v4, v1/attention/backends/mla/indexer.py and sparse_swa.py."""
STATE_BLOCKS = {4: 4, 128: 8}
"""The same, models/deepseek_v4/compressor.py: tokens in a block of what waits, by ratio."""


def _page(spec: FullAttention | SlidingWindow, entry_bytes: int, pad_bytes: int = 1) -> LayerCache:
    return _padded(spec, spec.block_size * entry_bytes, pad_bytes)


def _padded(spec: FullAttention | SlidingWindow, content_bytes: int, pad_bytes: int) -> LayerCache:
    return LayerCache(spec, content_bytes, div_ceil(content_bytes, pad_bytes) * pad_bytes, REPLICAS)


def _pad(options: CacheOptions) -> int:
    """What pages are padded to a multiple of, so that they are whole rows of the packed layout (vLLM 0.32)."""
    return 576 if options.dtype == "fp8_ds_mla" else 512


def _index_scan(index: Index, tokens_per_entry: int = 1) -> Scan:
    return Scan(index.macs, index.macs, index.entry_bytes, tokens_per_entry)

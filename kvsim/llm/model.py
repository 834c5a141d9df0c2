"""One language model: the layers of a file `models/llm/*.toml`, and what follows from them."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kvcore.spec import FullAttention
from kvcore.units import div_ceil
from kvsim.llm.cache import CacheOptions, LayerCache, LayerWork, State
from kvsim.llm.dtypes import KV_BYTES, WEIGHT_BITS, KVCacheDtype, WeightDtype
from kvsim.llm.feed_forward import Dense, Experts
from kvsim.llm.groups import KVGroup, Layers, Pages, kv_groups
from kvsim.llm.latent import Compressed, Latent
from kvsim.llm.layers import KINDS, AttentionLayers, GroupedQuery
from kvsim.llm.recurrent import DeltaRule, Mamba2, StateLayers
from kvsim.sourced import Sourced
from kvsim.toml import Count, PositiveCount, Table


class Architecture(Sourced):
    """What all layers share."""

    hidden_size: PositiveCount
    vocab_size: PositiveCount
    max_model_len: PositiveCount
    tied_embeddings: bool = False
    """One matrix is token embedding and output projection."""


class Weights(Sourced):
    """The checkpoint, as deployed."""

    attention_dtype: WeightDtype
    feed_forward_dtype: WeightDtype
    """Of dense layers, shared experts and routers."""
    expert_dtype: WeightDtype = "bf16"
    other_params: Count = 0
    """In bf16 on every rank: norms, biases, a vision tower."""
    published_params: PositiveCount
    """What the publisher says, to hold the layers against."""
    published_active_params: PositiveCount | None = None
    """Of them, those that a token passes."""


class KVCacheFormat(Sourced):
    """How K, V or latents are kept, unless the engine is told otherwise."""

    dtype: KVCacheDtype


class Matrices(NamedTuple):
    """Weights of one rank that lie together."""

    num_params: int
    dtype: WeightDtype

    @property
    def size_bytes(self) -> int:
        """In GPU memory."""
        return -int(-self.num_params * WEIGHT_BITS[self.dtype] // 8)


class ExpertWeights(NamedTuple):
    """The experts of one rank: in each of `num_layers`, `num_experts` of `each`; a token passes `per_token` of `of`."""

    num_layers: int
    num_experts: int
    each: Matrices
    per_token: int
    of: int

    @property
    def size_bytes(self) -> int:
        """In GPU memory."""
        return self.num_layers * self.num_experts * self.each.size_bytes

    @property
    def num_params(self) -> int:
        """All of them."""
        return self.num_layers * self.num_experts * self.each.num_params


class ExpertPlacement(Enum):
    """Which part of the experts a rank has."""

    CUT = "its share of each"
    WHOLE = "some of them, the most that a rank has"


class RankWeights(NamedTuple):
    """The weights of one rank."""

    attention: Matrices
    feed_forward: Matrices
    """Dense layers, shared experts, routers."""
    experts: tuple[ExpertWeights, ...]
    lm_head: Matrices
    """The output projection, its rows dealt out over the ranks."""
    embedding: Matrices
    """Looked up, not multiplied; none when it is tied to the output projection."""
    other: Matrices

    @property
    def size_bytes(self) -> int:
        """In GPU memory."""
        return sum(part.size_bytes for part in self._matrices) + sum(part.size_bytes for part in self.experts)

    @property
    def num_params(self) -> int:
        """All of them."""
        return sum(part.num_params for part in self._matrices) + sum(part.num_params for part in self.experts)

    @property
    def _matrices(self) -> tuple[Matrices, ...]:
        return (self.attention, self.feed_forward, self.lm_head, self.embedding, self.other)


def _kind_of(data: object) -> object:
    return data.get("kind") if isinstance(data, Mapping) else getattr(data, "kind", None)


def _attention_tag(data: object) -> str:
    kind = _kind_of(data)
    return f"<{kind}>" if kind in KINDS else "<gqa>"


Attention = Annotated[
    Annotated[GroupedQuery, Tag("<gqa>")]
    | Annotated[Latent, Tag("<mla>")]
    | Annotated[Compressed, Tag("<compressed>")]
    | Annotated[DeltaRule, Tag("<gdn>")]
    | Annotated[DeltaRule, Tag("<kda>")]
    | Annotated[Mamba2, Tag("<mamba2>")],
    Discriminator(_attention_tag),
]
FeedForward = Annotated[
    Annotated[Dense, Tag("<dense>")] | Annotated[Experts, Tag("<moe>")],
    Discriminator(lambda data: "<moe>" if _kind_of(data) == "moe" else "<dense>"),
]

_Layers = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class LlmModel(Table):
    """One language model. Attention layers are listed by kind, in the order in which the kinds first appear.

    `tensor_parallel_size`: ranks that heads and matrices are divided among. `data_parallel_size`: how often; experts
    are divided among all of these ranks. `kv_cache_dtype`: None is the model's own. An uneven division raises
    InvalidArgument.
    """

    name: str
    description: str
    architecture: Architecture
    attention: Annotated[tuple[Attention, ...], _Layers, Field(min_length=1)]
    feed_forward: Annotated[tuple[FeedForward, ...], _Layers, Field(min_length=1)]
    weights: Weights
    kv_cache: KVCacheFormat

    @model_validator(mode="after")
    def _complete(self) -> "LlmModel":
        layers = sum(layer.num_layers for layer in self.attention)
        if layers < sum(layer.num_layers for layer in self.feed_forward):
            raise ValueError(f"at most as many feed-forward layers as attention layers, {layers}")
        return self

    @property
    def num_layers(self) -> int:
        """Decoder layers; some may have no feed-forward layer behind attention."""
        return sum(layer.num_layers for layer in self.attention)

    # --- what is kept -------------------------------------------------------------------------------------------------

    def kv_groups(
        self, block_size: int, tensor_parallel_size: int = 1, kv_cache_dtype: KVCacheDtype | None = None
    ) -> tuple[KVGroup, ...]:
        """The KV cache groups as vLLM makes them, in its order, when asked for blocks of so many tokens.

        vLLM takes the block size that the model's kernels need, and blocks as long as a recurrent state is large.
        """
        options = CacheOptions(block_size, tensor_parallel_size, kv_cache_dtype or self.kv_cache.dtype)
        options = options._replace(block_size=self._block_size(options))
        side_by_side = any(isinstance(layer, Compressed) for layer in self.attention)
        return kv_groups(self._layer_caches(options), Pages.SIDE_BY_SIDE if side_by_side else Pages.EQUAL)

    def sequence_bytes(self, num_tokens: int, bits: int | None = None) -> int:
        """KV of a sequence by the published formula: elements of `bits` each, of all ranks, without blocks and scales.

        None: the bits of the model's own KV cache dtype.
        """
        bits = 8 * KV_BYTES[self.kv_cache.dtype] if bits is None else bits
        return sum(_kept_bits(layer, num_tokens, bits) for layer in self.attention) // 8

    def _block_size(self, options: CacheOptions) -> int:
        asked = max(layer.block_size(options.block_size) for layer in self.attention)
        states = [layer for layer in self.attention if isinstance(layer, StateLayers)]
        if not states:
            return asked
        token = options._replace(block_size=1)
        token_bytes = max(c.page_bytes for layer in self.attention for c in layer.caches(token) if _is_full(c))
        state_bytes = max(cache.page_bytes for layer in states for cache in layer.caches(token))
        step = max(asked, HYBRID_LATENT_STEP) if any(isinstance(layer, Latent) for layer in self.attention) else asked
        return step * div_ceil(state_bytes, step * token_bytes)

    def _layer_caches(self, options: CacheOptions) -> Layers:
        layers: Layers = {}
        for kind in self.attention:
            for cache in kind.caches(options):
                layers[cache] = layers.get(cache, 0) + kind.num_layers
        return layers

    # --- what is computed ---------------------------------------------------------------------------------------------

    def rank_weights(
        self,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_placement: ExpertPlacement = ExpertPlacement.CUT,
    ) -> RankWeights:
        """The weights of one rank, by how they are used."""
        tp, hidden, weights = tensor_parallel_size, self.architecture.hidden_size, self.weights
        attention = sum(layer.num_layers * layer.num_params(hidden, tp) for layer in self.attention)
        common = sum(layer.num_layers * layer.num_common_params(hidden, tp) for layer in self.feed_forward)
        experts = [layer for layer in self.feed_forward if isinstance(layer, Experts)]
        rows = Matrices(div_ceil(self.architecture.vocab_size, tp) * hidden, "bf16")
        return RankWeights(
            Matrices(attention, weights.attention_dtype),
            Matrices(common, weights.feed_forward_dtype),
            tuple(self._experts(e, tp * data_parallel_size, expert_placement) for e in experts),
            rows,
            rows._replace(num_params=0) if self.architecture.tied_embeddings else rows,
            Matrices(weights.other_params, "bf16"),
        )

    def work(self, tensor_parallel_size: int = 1, kv_cache_dtype: KVCacheDtype | None = None) -> tuple[LayerWork, ...]:
        """What each kind of attention layers does on one rank, beside its matrices."""
        dtype = kv_cache_dtype or self.kv_cache.dtype
        return tuple(layer.work(tensor_parallel_size, dtype) for layer in self.attention)

    @property
    def num_params(self) -> int:
        """All weights."""
        return self.rank_weights().num_params

    @property
    def num_active_params(self) -> int:
        """Weights that a token passes: matrix products, with `experts_per_token` experts, and the output projection."""
        whole = self.rank_weights()
        experts = sum(experts.num_layers * experts.per_token * experts.each.num_params for experts in whole.experts)
        return whole.attention.num_params + whole.feed_forward.num_params + whole.lm_head.num_params + experts

    def _experts(self, layer: Experts, num_ranks: int, placement: ExpertPlacement) -> ExpertWeights:
        size, here = layer.num_expert_params(self.architecture.hidden_size), layer.num_experts
        if placement is ExpertPlacement.CUT:
            size = div_ceil(size, num_ranks)
        else:
            here = div_ceil(here, num_ranks)
        each = Matrices(size, self.weights.expert_dtype)
        return ExpertWeights(layer.num_layers, here, each, layer.experts_per_token, layer.num_experts)


HYBRID_LATENT_STEP = 128
"""Blocks of latents beside a recurrent state are multiples of so many tokens (vLLM 0.32, platforms/interface.py)."""


def _kept_bits(layer: AttentionLayers, num_tokens: int, bits: int) -> int:
    """Of a sequence of so many tokens, in the layers of one kind."""
    each = 0
    for kept in layer.kept():
        if isinstance(kept, State):
            each += 8 * kept.size_bytes
            continue
        held_len = num_tokens if kept.window is None else min(num_tokens, kept.window)
        each += held_len // kept.tokens_per_entry * kept.num_elements * (kept.bits or bits)
    return layer.num_layers * each


def _is_full(cache: LayerCache) -> bool:
    return isinstance(cache.spec, FullAttention)

"""Step times of a model on the GPUs of one instance, from published peaks and utilisations alone.

    step = matrices + experts + attention + states + lm_head + collectives + overhead
    matrices     of attention, dense layers and shared experts: max(flops, bytes / bandwidth), all tokens together
    experts      the same, with the bytes of the experts that the batch can be expected to touch (`experts`)
    attention    max(flops of all pairs, bytes of what is kept), a kernel per prefill chunk; decodes straight in context
    states       of recurrent layers: max(flops, read and written once per request)
    lm_head      one row per request of the batch (the engine samples after every chunk and discards)
    collectives  over NVLink, with a latency each (`parallel`)
    overhead     launch latency of the small operators, a constant per step

Every constant has its source; none is fitted. docs/STEP_TIMES.md has the agreement with measured operators, and what
is not modelled.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.units import div_ceil
from kvsim.catalog import Device
from kvsim.clock import PS_PER_NS
from kvsim.cost.attention import ATTENTION_DTYPE, Attention
from kvsim.cost.experts import ExpertLayers
from kvsim.cost.parallel import ONE_GPU, Collectives, Parallel, busiest
from kvsim.cost.rates import Rates
from kvsim.cost.step_time import DecodeLine, PrefillChunk
from kvsim.llm.cache import LayerWork
from kvsim.llm.dtypes import KVCacheDtype, WeightDtype
from kvsim.llm.model import LlmModel, Matrices

# Operators of a decoder layer that only stream activations: two residual-add norms, rotary embedding, KV cache write,
# activation; of a mixture of experts beside them: choice, permutation and sum. Matrix products and attention have
# their own terms. Outside the layers: token embedding and final norm.
SMALL_OPS_PER_LAYER = 5
SMALL_OPS_PER_MIXTURE = 3
SMALL_OPS_OUTSIDE = 2


class Work(NamedTuple):
    """What one data parallel rank has of a step, and all of them together."""

    prefill_tokens: int
    decodes: int
    chunks: int
    all_prefill_tokens: int
    all_decodes: int


class Product(NamedTuple):
    """Matrices of one type that all tokens pass."""

    num_params: int
    dtype: WeightDtype
    read_ps: int


class Roofline:
    """`StepTimeModel` of `model` on GPUs of one kind.

    Each term is rounded up once, so that a step is some picoseconds above the formula; a decode's time per token of
    context is an integer of its own, at most 2 ps for each kind of attention layer too slow.
    """

    __slots__ = (
        "_attention",
        "_collectives",
        "_decode_base_ps",
        "_experts",
        "_lm_head",
        "_matrices",
        "_overhead_ps",
        "_parallel",
        "_rates",
        "_states",
    )

    def __init__(
        self,
        model: LlmModel,
        device: Device,
        parallel: Parallel = ONE_GPU,
        kv_cache_dtype: KVCacheDtype | None = None,
    ) -> None:
        """`kv_cache_dtype`: None is the model's own."""
        rates = Rates(device)
        weights = model.rank_weights(parallel.tensor, parallel.data, parallel.experts)
        work = model.work(parallel.tensor, kv_cache_dtype)
        self._rates = rates
        self._parallel = parallel
        self._matrices = _products((weights.attention, weights.feed_forward), rates)
        self._experts = [ExpertLayers(experts, rates) for experts in weights.experts]
        (self._lm_head,) = _products((weights.lm_head,), rates)
        self._attention = Attention(work, rates, parallel.data)
        self._states = [layers for layers in work if layers.state_bytes]
        self._collectives = Collectives(model, parallel, rates)
        num_mixtures = sum(experts.num_layers for experts in weights.experts)
        num_ops = SMALL_OPS_PER_LAYER * model.num_layers + SMALL_OPS_PER_MIXTURE * num_mixtures + SMALL_OPS_OUTSIDE
        self._overhead_ps = num_ops * device.kernels.small_op_latency_ns * PS_PER_NS
        self._decode_base_ps: dict[int, int] = {}

    def step_ps(self, chunks: Sequence[PrefillChunk], num_decodes: int, decode_context: int) -> int:
        """See `StepTimeModel.step_ps`."""
        if not chunks and not num_decodes:
            return 0
        if not chunks:
            base_ps, slope_ps, _ = self.decode_affine_ps(num_decodes, decode_context)
            return base_ps + slope_ps * decode_context
        attention_ps = self._chunks_ps(chunks)
        if num_decodes:
            base_ps, slope_ps, _ = self._attention.decode_line(num_decodes, decode_context)
            attention_ps += base_ps + slope_ps * decode_context
        return self._dense_ps(self._work(chunks, num_decodes)) + attention_ps

    def decode_affine_ps(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """See `StepTimeModel.decode_affine_ps`."""
        dense_ps = self._decode_base_ps.get(num_decodes)
        if dense_ps is None:
            dense_ps = self._decode_base_ps[num_decodes] = self._dense_ps(self._work((), num_decodes))
        base_ps, slope_ps, max_context = self._attention.decode_line(num_decodes, decode_context)
        return DecodeLine(dense_ps + base_ps, slope_ps, max_context)

    def _work(self, chunks: Sequence[PrefillChunk], num_decodes: int) -> Work:
        lengths = [new for _, new in chunks]
        total, ranks = sum(lengths), self._parallel.data
        if ranks == 1:
            return Work(total, num_decodes, len(chunks), total, num_decodes)
        own = busiest(total, max(lengths, default=0), ranks)
        return Work(own, div_ceil(num_decodes, ranks), div_ceil(len(chunks), ranks), total, num_decodes)

    def _chunks_ps(self, chunks: Sequence[PrefillChunk]) -> int:
        times_ps = [self._attention.chunk_ps(context, new) for context, new in chunks]
        return busiest(sum(times_ps), max(times_ps), self._parallel.data)

    def _dense_ps(self, work: Work) -> int:
        """All but attention; weights are read once for both phases."""
        tokens, decodes = work.prefill_tokens, work.decodes
        own, together = tokens + decodes, work.all_prefill_tokens + work.all_decodes
        total_ps = self._overhead_ps + self._product_ps(self._lm_head, work.chunks, decodes)
        for product in self._matrices:
            total_ps += self._product_ps(product, tokens, decodes)
        for experts in self._experts:
            total_ps += experts.step_ps(work.all_prefill_tokens, work.all_decodes)
        for layers in self._states:
            total_ps += self._states_ps(layers, work)
        return total_ps + self._collectives.step_ps(own, together)

    def _product_ps(self, product: Product, prefill_rows: int, decode_rows: int) -> int:
        num_params, dtype, read_ps = product
        macs_ps = self._rates.macs_ps(dtype, num_params * prefill_rows, num_params * decode_rows)
        return macs_ps if macs_ps > read_ps else read_ps

    def _states_ps(self, layers: LayerWork, work: Work) -> int:
        macs, requests = layers.num_layers * layers.state_macs, work.chunks + work.decodes
        macs_ps = self._rates.macs_ps(ATTENTION_DTYPE, macs * work.prefill_tokens, macs * work.decodes)
        return max(macs_ps, self._rates.read_ps(2 * layers.num_layers * layers.state_bytes * requests))


def _products(matrices: Sequence[Matrices], rates: Rates) -> list[Product]:
    """One for each type: what is bound by the same rates is bound together."""
    types = dict.fromkeys(each.dtype for each in matrices)
    return [_product([each for each in matrices if each.dtype == dtype], rates) for dtype in types]


def _product(matrices: Sequence[Matrices], rates: Rates) -> Product:
    num_params, size_bytes = (sum(each) for each in zip(*((m.num_params, m.size_bytes) for m in matrices), strict=True))
    return Product(num_params, matrices[0].dtype, rates.read_ps(size_bytes))

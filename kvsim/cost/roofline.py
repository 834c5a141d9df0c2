"""Step times of a dense grouped-query transformer on one GPU, from published peaks and utilisations alone.

    step = linear + attention + lm_head + overhead
    linear     max(flops at the phase's utilisation, weight bytes / bandwidth), all tokens of the batch together
    attention  a kernel per prefill chunk, max(flops, KV bytes / bandwidth), and one for all decodes, affine in context
    lm_head    one row per request of the batch (the engine samples after every chunk and discards), a matrix of its own
    overhead   launch latency of the small operators, a constant per step

Every constant comes from `models/`; none is fitted. Against aiconfigurator's measured operators for Llama-3.1-8B on
one H100 (vLLM database 0.24, one request or one decode batch per step) this model takes 0.80 to 1.56 of its prefill
times (median 1.48) and 0.90 to 1.17 of its decode times (median 1.08). Prefill is pessimistic because the published
utilisation of 45 % is: the measured kernels reach about 66 %.
Not modelled: several GPUs, host scheduling time (hidden by asynchronous scheduling), sampling.
"""

from collections.abc import Sequence

from kvcore.errors import require
from kvcore.units import div_ceil
from kvsim.catalog import Device, LlmModel
from kvsim.clock import PS_PER_NS, PS_PER_S
from kvsim.cost.step_time import DecodeLine, PrefillChunk
from kvsim.llm.layers import GroupedQuery

FLOPS_PER_MAC = 2
PERCENT = 100

# Operators of a decoder layer that only stream activations: two residual-add norms, rotary embedding, KV cache write,
# activation. Matrix products and attention have their own terms. Outside the layers: token embedding and final norm.
SMALL_OPS_PER_LAYER = 5
SMALL_OPS_OUTSIDE = 2


class Roofline:
    """`StepTimeModel` of `model` on one `device`.

    Each term is one exact rational rounded up once, so a step is at most 5 ps + 1 ps per chunk above the formula;
    the decode slope alone is an integer of its own: at most 1 ps per context token (2e-5 of it) too slow.
    """

    __slots__ = (
        "_attention_flops",
        "_decode_base_ps",
        "_decode_flops_per_s",
        "_decode_slope_ps",
        "_kv_bytes",
        "_lm_head_flops",
        "_lm_head_read_ps",
        "_linear_flops",
        "_memory_bytes_per_s",
        "_overhead_ps",
        "_prefill_flops_per_s",
        "_weights_read_ps",
    )

    def __init__(self, model: LlmModel, device: Device) -> None:
        kernels = device.kernels
        # Rates times PERCENT: utilisations are whole percents, so the scale keeps the rates integer.
        self._prefill_flops_per_s = device.compute.bf16_flops_per_s * kernels.prefill_flops_utilisation_percent
        self._decode_flops_per_s = device.compute.bf16_flops_per_s * kernels.decode_flops_utilisation_percent
        self._memory_bytes_per_s = device.memory.bandwidth_bytes_per_s * kernels.memory_utilisation_percent
        weights, scans = model.rank_weights(), [(w.num_layers, scan) for w in model.work() for scan in w.scans]
        dense = not weights.experts and weights.attention.dtype == weights.feed_forward.dtype == "bf16"
        plain = all(isinstance(layer, GroupedQuery) and layer.window is None for layer in model.attention)
        require(dense and plain, "model", model.name, "dense, in bf16, with full grouped-query attention")

        linear_params = weights.attention.num_params + weights.feed_forward.num_params
        self._linear_flops = FLOPS_PER_MAC * linear_params
        self._lm_head_flops = FLOPS_PER_MAC * weights.lm_head.num_params
        self._attention_flops = FLOPS_PER_MAC * sum(num_layers * scan.prefill_macs for num_layers, scan in scans)
        self._kv_bytes = sum(num_layers * scan.entry_bytes for num_layers, scan in scans)
        self._weights_read_ps = self._read_ps(weights.attention.size_bytes + weights.feed_forward.size_bytes)
        self._lm_head_read_ps = self._read_ps(weights.lm_head.size_bytes)
        self._decode_slope_ps = max(
            self._read_ps(self._kv_bytes),
            div_ceil(self._attention_flops * PERCENT * PS_PER_S, self._decode_flops_per_s),
        )
        num_small_ops = SMALL_OPS_PER_LAYER * model.num_layers + SMALL_OPS_OUTSIDE
        self._decode_base_ps: dict[int, int] = {}
        self._overhead_ps = num_small_ops * kernels.small_op_latency_ns * PS_PER_NS

    def step_ps(self, chunks: Sequence[PrefillChunk], num_decodes: int, decode_context: int) -> int:
        """See `StepTimeModel.step_ps`."""
        if not chunks and not num_decodes:
            return 0
        num_prefill_tokens = sum(new for _, new in chunks)
        attention = sum(self._chunk_attention_ps(context, new) for context, new in chunks)
        attention += self._decode_slope_ps * (decode_context + num_decodes)
        return self._dense_ps(num_prefill_tokens, len(chunks), num_decodes) + attention + self._overhead_ps

    def decode_affine_ps(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """See `StepTimeModel.decode_affine_ps`."""
        base_ps = self._decode_base_ps.get(num_decodes)
        if base_ps is None:
            base_ps = self._dense_ps(0, 0, num_decodes) + self._decode_slope_ps * num_decodes + self._overhead_ps
            self._decode_base_ps[num_decodes] = base_ps
        return DecodeLine(base_ps, self._decode_slope_ps, None)

    def _dense_ps(self, num_prefill_tokens: int, num_chunks: int, num_decodes: int) -> int:
        """Linear layers over all tokens, lm_head over a row per request; weights are read once for both phases."""
        linear = max(self._flops_ps(self._linear_flops, num_prefill_tokens, num_decodes), self._weights_read_ps)
        lm_head = max(self._flops_ps(self._lm_head_flops, num_chunks, num_decodes), self._lm_head_read_ps)
        return linear + lm_head

    def _chunk_attention_ps(self, context_len: int, num_new_tokens: int) -> int:
        """Token i of the chunk attends to context_len + i + 1 keys; the KV of context and chunk is read once."""
        num_pairs = num_new_tokens * context_len + num_new_tokens * (num_new_tokens + 1) // 2
        flops_ps = self._flops_ps(self._attention_flops, num_pairs, 0)
        return max(flops_ps, self._read_ps(self._kv_bytes * (context_len + num_new_tokens)))

    def _flops_ps(self, flops: int, num_prefill: int, num_decode: int) -> int:
        """Time of `flops` for each of num_prefill + num_decode units, at the utilisation of each one's phase."""
        work = num_prefill * self._decode_flops_per_s + num_decode * self._prefill_flops_per_s
        return div_ceil(flops * PERCENT * PS_PER_S * work, self._prefill_flops_per_s * self._decode_flops_per_s)

    def _read_ps(self, size_bytes: int) -> int:
        return div_ceil(size_bytes * PERCENT * PS_PER_S, self._memory_bytes_per_s)

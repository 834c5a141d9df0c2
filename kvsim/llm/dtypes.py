"""How many bytes an element takes: of weights, and of what attention keeps."""

from fractions import Fraction
from typing import Literal

WeightDtype = Literal["bf16", "fp8", "nvfp4", "mxfp4"]

KVCacheDtype = Literal["bfloat16", "fp8", "fp8_ds_mla"]
"""vLLM's `kv_cache_dtype`. `fp8_ds_mla` is its packed layout of latents, with scales and rotary part in full."""

KVCacheChoice = Literal["auto", "bfloat16", "fp8", "fp8_ds_mla"]
"""The same, or what the model's file says."""

WEIGHT_BITS: dict[WeightDtype, Fraction] = {
    "bf16": Fraction(16),
    "fp8": 8 + Fraction(32, 128 * 128),
    "nvfp4": 4 + Fraction(8, 16),
    "mxfp4": 4 + Fraction(8, 32),
}
"""Per parameter, scales included: float32 per 128 x 128 (DeepSeek's fp8), fp8 per 16 (NVFP4), e8m0 per 32 (MXFP4)."""

KV_BYTES: dict[KVCacheDtype, int] = {"bfloat16": 2, "fp8": 1, "fp8_ds_mla": 1}
"""Per element of K or V. Where the packed layout has no meaning it is plain fp8, as vLLM's name for the dtype is."""

STATE_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

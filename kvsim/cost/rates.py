"""What one GPU reaches: its published peaks at the utilisation of its kernels."""

from kvcore.units import div_ceil
from kvsim.catalog import Compute, Device
from kvsim.clock import PS_PER_S
from kvsim.llm.dtypes import WEIGHT_BITS, WeightDtype

FLOPS_PER_MAC = 2
PERCENT = 100


class Rates:
    """Times of work on one GPU, each an exact rational rounded up to picoseconds once."""

    __slots__ = ("_bytes", "_decode", "_flops", "_prefill", "_sent_bytes_per_s")

    def __init__(self, device: Device) -> None:
        kernels = device.kernels
        prefill, decode = kernels.prefill_flops_utilisation_percent, kernels.decode_flops_utilisation_percent
        # Of a phase's multiply-adds at the other's utilisation, over a rate at both: one division for two phases.
        self._prefill = FLOPS_PER_MAC * PERCENT * PS_PER_S * decode
        self._decode = FLOPS_PER_MAC * PERCENT * PS_PER_S * prefill
        self._flops = {dtype: peak_flops_per_s(device.compute, dtype) * prefill * decode for dtype in WEIGHT_BITS}
        # Utilisations are whole percents, so that the rate times PERCENT is an integer.
        self._bytes = device.memory.bandwidth_bytes_per_s * kernels.memory_utilisation_percent
        self._sent_bytes_per_s = device.network.nvlink_bytes_per_s

    def macs_ps(self, dtype: WeightDtype, prefill_macs: int, decode_macs: int) -> int:
        """Multiply-adds with weights of that type, at the utilisation of each phase."""
        return -((prefill_macs * self._prefill + decode_macs * self._decode) // -self._flops[dtype])

    def read_ps(self, size_bytes: int) -> int:
        """Bytes out of HBM."""
        return -(size_bytes * PERCENT * PS_PER_S // -self._bytes)

    def send_ps(self, size_bytes: int) -> int:
        """Bytes over NVLink, at its peak."""
        return div_ceil(size_bytes * PS_PER_S, self._sent_bytes_per_s)


def peak_flops_per_s(compute: Compute, dtype: WeightDtype) -> int:
    """Of products with weights of that type; where there are no units for it, they are unpacked into bf16."""
    narrow = {"bf16": None, "fp8": compute.fp8_flops_per_s}.get(dtype, compute.fp4_flops_per_s)
    return narrow or compute.bf16_flops_per_s

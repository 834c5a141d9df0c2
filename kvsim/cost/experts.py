"""Mixtures of experts: what their matrices take, for the experts that a batch can be expected to touch."""

from kvcore.units import div_ceil
from kvsim.cost.rates import Rates
from kvsim.llm.model import ExpertWeights

SURELY_ALL = 32
"""With so many choices per expert, the share that is expected to be left out is below exp(-32): all are touched."""


class ExpertLayers:
    """Times of one rank's experts. Tokens choose independently, every expert as likely as any other."""

    __slots__ = ("_rates", "_read_ps", "_weights")

    def __init__(self, weights: ExpertWeights, rates: Rates) -> None:
        self._weights = weights
        self._rates = rates
        self._read_ps: dict[int, int] = {}

    def step_ps(self, prefill_tokens: int, decode_tokens: int) -> int:
        """All tokens of the instance, of which the rank's experts get their share."""
        prefill_macs, decode_macs = self._macs(prefill_tokens), self._macs(decode_tokens)
        macs_ps = self._rates.macs_ps(self._weights.each.dtype, prefill_macs, decode_macs)
        return max(macs_ps, self.read_ps(prefill_tokens + decode_tokens))

    def read_ps(self, num_tokens: int) -> int:
        """The weights of the experts that are touched, read once."""
        if num_tokens * self._weights.per_token >= SURELY_ALL * self._weights.of:
            return self._rates.read_ps(self._weights.size_bytes)
        found = self._read_ps.get(num_tokens)
        if found is None:
            touched, of = touched_share(self._weights.per_token, self._weights.of, num_tokens)
            found = self._read_ps[num_tokens] = self._rates.read_ps(div_ceil(self._weights.size_bytes * touched, of))
        return found

    def _macs(self, num_tokens: int) -> int:
        weights = self._weights
        each = weights.num_layers * weights.each.num_params * weights.num_experts
        return div_ceil(num_tokens * weights.per_token * each, weights.of)


def touched_share(per_token: int, num_experts: int, num_tokens: int) -> tuple[int, int]:
    """Expected share of the experts that `num_tokens` tokens touch, as (numerator, denominator), exactly.

    A token leaves an expert out with probability 1 - per_token / num_experts.
    """
    whole = num_experts**num_tokens
    return whole - (num_experts - per_token) ** num_tokens, whole

"""How the GPUs of an instance share a model, and what they tell each other in a step."""

from typing import NamedTuple

from kvcore.units import div_ceil
from kvsim.clock import PS_PER_NS
from kvsim.cost.rates import Rates
from kvsim.llm.model import ExpertPlacement, LlmModel

COLLECTIVE_LATENCY_NS = 10_000
"""aiconfigurator 0.12.0 (PyPI), `p2p_latency` of every system file: 10 us."""
ACTIVATION_BYTES = 2
"""Activations travel in bf16."""


class Parallel(NamedTuple):
    """Tensor and data parallel sizes; experts are cut over all ranks, or lie on them whole."""

    tensor: int = 1
    data: int = 1
    experts: ExpertPlacement = ExpertPlacement.CUT

    @property
    def num_gpus(self) -> int:
        """Ranks of the instance."""
        return self.tensor * self.data


ONE_GPU = Parallel()


def busiest(total: int, largest: int, num_ranks: int) -> int:
    """What the busiest rank has, when parts of which one is the `largest` are dealt out as evenly as can be."""
    return max(largest, div_ceil(total, num_ranks))


class Collectives:
    """Times of one rank's part in the collectives of a step, all over NVLink.

    all-reduce       after attention and after the feed-forward of every layer, over the tensor parallel ranks
    all-to-all       where experts lie whole on data parallel ranks: each token's activations to its experts and back
    all-gather and reduce-scatter    where experts are cut over data parallel ranks: all tokens to all of them and back
    """

    __slots__ = ("_latency_ps", "_of_all_tokens", "_of_own_tokens", "_num_gpus", "_rates")

    def __init__(self, model: LlmModel, parallel: Parallel, rates: Rates) -> None:
        self._rates = rates
        self._num_gpus = parallel.num_gpus
        row_bytes = model.architecture.hidden_size * ACTIVATION_BYTES
        experts = model.rank_weights().experts if parallel.data > 1 else ()
        num_reduced = 2 * model.num_layers if parallel.tensor > 1 else 0
        num_exchanged = 2 * sum(each.num_layers for each in experts)
        self._latency_ps = (num_reduced + num_exchanged) * COLLECTIVE_LATENCY_NS * PS_PER_NS
        # Times the number of GPUs: a ring of n sends 2 (n - 1) / n of what it reduces, (n - 1) / n of what it gathers.
        self._of_own_tokens = num_reduced * 2 * (parallel.tensor - 1) * parallel.data * row_bytes
        self._of_all_tokens = 0
        if parallel.experts is ExpertPlacement.WHOLE:
            rows = sum(2 * each.num_layers * each.per_token for each in experts)
            self._of_own_tokens += div_ceil(rows * (parallel.num_gpus - 1) * row_bytes, parallel.tensor)
        else:
            self._of_all_tokens = num_exchanged * (parallel.data - 1) * parallel.tensor * row_bytes

    def step_ps(self, own_tokens: int, all_tokens: int) -> int:
        """Of a data parallel rank with `own_tokens` of the instance's `all_tokens`."""
        if self._num_gpus == 1:
            return 0
        size_bytes = own_tokens * self._of_own_tokens + all_tokens * self._of_all_tokens
        return self._latency_ps + self._rates.send_ps(div_ceil(size_bytes, self._num_gpus))

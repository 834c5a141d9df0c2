"""Feed-forward layers: dense, or a mixture of experts."""

from typing import Literal

from kvcore.units import div_ceil
from kvsim.sourced import Sourced
from kvsim.toml import Count, PositiveCount


class FeedForwardLayers(Sourced):
    """`num_layers` equal feed-forward layers."""

    num_layers: PositiveCount
    gated: bool = True
    """Whether there is a gate beside up and down."""

    @property
    def _num_matrices(self) -> int:
        return 3 if self.gated else 2


class Dense(FeedForwardLayers):
    """Every token passes all of it."""

    kind: Literal["dense"]
    intermediate_size: PositiveCount

    def num_common_params(self, hidden_size: int, tp: int) -> int:
        """Weights of one layer on one rank that every token passes."""
        return self._num_matrices * hidden_size * div_ceil(self.intermediate_size, tp)


class Experts(FeedForwardLayers):
    """A mixture of experts: every token passes the shared expert and `experts_per_token` of the others."""

    kind: Literal["moe"]
    num_experts: PositiveCount
    experts_per_token: PositiveCount
    expert_intermediate_size: PositiveCount
    shared_intermediate_size: Count = 0
    """Of all shared experts together."""
    expert_hidden_size: PositiveCount | None = None
    """What experts see, where it is projected down for them."""

    def num_common_params(self, hidden_size: int, tp: int) -> int:
        """Router, shared experts, and the projections around the experts, which every rank has."""
        projected = 0 if self.expert_hidden_size is None else 2 * hidden_size * self.expert_hidden_size
        shared = self._num_matrices * hidden_size * div_ceil(self.shared_intermediate_size, tp)
        return hidden_size * self.num_experts + shared + projected

    def num_expert_params(self, hidden_size: int) -> int:
        """Weights of one expert, whole."""
        return self._num_matrices * (self.expert_hidden_size or hidden_size) * self.expert_intermediate_size

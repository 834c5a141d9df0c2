"""The question every step-time model answers: how many picoseconds does this batch take?"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

PrefillChunk: TypeAlias = tuple[int, int]
"""(context_len, num_new_tokens): tokens whose KV is there already, tokens (> 0) computed in this step."""


class DecodeLine(NamedTuple):
    """What decode steps of a batch cost while their context lengths grow: base_ps + slope_ps * context, exactly."""

    base_ps: int
    slope_ps: int
    """Per token of context; below 0 where measured steps are."""
    max_context: int | None
    """The highest context that it holds for; None: any."""


class StepTimeModel(Protocol):
    """Step times in integer picoseconds, a pure function of the batch's shape.

    A batch holds prefill chunks and `num_decodes` requests that compute one token each; `decode_context` is the sum of
    those requests' context lengths before the step, so that each also reads the token it computes.
    """

    def step_ps(self, chunks: Sequence[PrefillChunk], num_decodes: int, decode_context: int) -> int:
        """Duration of one step; positive for a batch that holds anything, 0 for an empty one."""

    def decode_affine_ps(self, num_decodes: int, decode_context: int) -> DecodeLine:
        """The line with step_ps((), num_decodes, context) on it for every context from `decode_context` up to its end.

        It is what lets the engine jump over many decode steps in closed form. `num_decodes` is at least 1.
        """

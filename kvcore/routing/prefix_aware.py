"""Cached prefix against load: the KV router of NVIDIA Dynamo (lib/kv-router/src/scheduling/selector.rs, 2026)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcore.errors import require
from kvcore.routing.router import Arrival, Fact, Snapshot, least


@dataclass(frozen=True, slots=True)
class PrefixAware:
    """The smallest sum of prompt tokens to compute and of prompt tokens to decode over, if the request went there.

        cost = prefill_load_scale * (queued + prompt - overlap_score_credit * cached) + (prompts there + prompt)

    The source's cost function at temperature 0, with its names and defaults, in tokens instead of blocks, without its
    credits for other tiers. There a block that several requests share counts once; here it counts for each. Ties go
    round.
    """

    reads: ClassVar[frozenset[Fact]] = frozenset({Fact.LOAD, Fact.PREFIX})

    overlap_score_credit: float = 1.0
    """How much of a cached token counts as computed, in [0, 1]."""
    prefill_load_scale: float = 1.0
    """What a token to compute weighs against one to decode over."""

    def __post_init__(self) -> None:
        credit, scale = self.overlap_score_credit, self.prefill_load_scale
        require(0 <= credit <= 1, "overlap_score_credit", credit, "a share in [0, 1]")
        require(scale >= 0, "prefill_load_scale", scale, "at least 0")

    def choose(self, arrival: Arrival, snapshots: Sequence[Snapshot]) -> int:
        """See the class."""
        pairs = zip(snapshots, arrival.cached_lens, strict=True)
        return least([self._cost(arrival.prompt_len, *pair) for pair in pairs], arrival)

    def _cost(self, prompt_len: int, snapshot: Snapshot, cached_len: int) -> float:
        prefill = snapshot.num_queued_tokens + prompt_len - self.overlap_score_credit * cached_len
        return self.prefill_load_scale * prefill + snapshot.num_prompt_tokens + prompt_len

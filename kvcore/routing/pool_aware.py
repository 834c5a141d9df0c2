"""Local hit, pool or recompute, by estimated time: Algorithm 1 of Mooncake's Conductor (Qin et al., FAST 2025)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcore.errors import require
from kvcore.routing.router import Arrival, Fact, Snapshot, least


@dataclass(frozen=True, slots=True)
class PoolAware:
    """The smallest estimated time to first token: queue, then transfer from the pool, then prefill. Ties go round.

        queued           tokens to compute before it
        [0 ...... cached) on the instance     [cached ...... pool hit) transferred     [pool hit ...... prompt) computed

    Where transferring takes longer than computing, the instance's own prefix is all that counts: the paper has a ratio
    of the two lengths for this, kvcache_balancing_threshold, set by hand and not published. Its prefill times come
    from a fitted model, ours are linear in tokens; a transfer is thought to have the link for itself. The paper's
    decode instance, chosen by load alone, is the same instance here, and its load is not weighed.
    """

    reads: ClassVar[frozenset[Fact]] = frozenset({Fact.LOAD, Fact.PREFIX, Fact.POOL})

    prefill_ns_per_token: int
    transfer_ns_per_token: int

    def __post_init__(self) -> None:
        for name in ("prefill_ns_per_token", "transfer_ns_per_token"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")

    def choose(self, arrival: Arrival, snapshots: Sequence[Snapshot]) -> int:
        """See the class."""
        pairs = zip(snapshots, arrival.cached_lens, strict=True)
        return least([self._ttft_ns(arrival, *pair) for pair in pairs], arrival)

    def _ttft_ns(self, arrival: Arrival, snapshot: Snapshot, cached_len: int) -> int:
        missing_len = max(0, (arrival.pool_hit_len or 0) - cached_len)
        fetched_ns = missing_len * min(self.transfer_ns_per_token, self.prefill_ns_per_token)
        computed_len = snapshot.num_queued_tokens + arrival.prompt_len - cached_len - missing_len
        return fetched_ns + computed_len * self.prefill_ns_per_token

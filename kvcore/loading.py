"""Whether a hit in the pool is worth fetching."""

from dataclasses import dataclass
from typing import Protocol

from kvcore.costs import Costs
from kvcore.errors import require
from kvcore.group_runs import GroupRuns


class Loading(Protocol):
    """Weighs a load against computing the same tokens: a pure function of its arguments."""

    def worth(self, local_hit_len: int, hit_len: int, blocks: GroupRuns, waited_ns: int) -> bool:
        """Whether to offer tokens [local_hit_len, hit_len), for which `blocks` would be fetched.

        `waited_ns`: since the request was first considered. It is asked once for each answer of the pool; what it says
        is repeated as long as that holds (`PoolPolicy.offer_ttl_ns`).
        """


@dataclass(frozen=True, slots=True)
class LoadAlways:
    """Every hit is fetched: what vLLM's in-tree connector does."""

    def worth(self, local_hit_len: int, hit_len: int, blocks: GroupRuns, waited_ns: int) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True, slots=True)
class LoadCheaper:
    """A hit is fetched when that takes no longer than computing its tokens.

    Source: Jin et al., "Compute Or Load KV Cache? Why Not Both?", ICML 2025 (arXiv 2410.03065), whose loader does both
    at once from either end; an engine that resumes at one length can only choose. The costs know nothing of the queue:
    on a busy link a load takes longer, on a busy engine the computation does.
    """

    costs: Costs

    def worth(self, local_hit_len: int, hit_len: int, blocks: GroupRuns, waited_ns: int) -> bool:
        """Whether the load ends first."""
        return self.costs.fetch_ns(blocks) <= self.costs.prefill_ns(local_hit_len, hit_len)


@dataclass(frozen=True, slots=True)
class LoadInTime:
    """A hit is fetched when the load ends within `budget_ns` of the request's arrival, or before computing would.

    A load leaves the GPU to others, so one that is slower than computing is still welcome while it is in time. When it
    is not, computing may be; when neither is, what ends first is the lesser evil: in both cases only what is cheaper is
    fetched. After a preemption the request is as old as it is. The idea of a budget for the time to first token is from
    Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025, Algorithm 1, which refuses a request
    that cannot meet it. Arrival is when the scheduler first considered the request: what it waited in the queue behind
    others before is not known here, nor is the queue at the link, nor for how long it will compute after the hit.
    """

    costs: Costs
    budget_ns: int

    def __post_init__(self) -> None:
        require(self.budget_ns >= 0, "budget_ns", self.budget_ns, "at least 0; 0 loads only what is cheaper")

    def worth(self, local_hit_len: int, hit_len: int, blocks: GroupRuns, waited_ns: int) -> bool:
        """Whether the load is in time, or first."""
        fetch_ns = self.costs.fetch_ns(blocks)
        return waited_ns + fetch_ns <= self.budget_ns or fetch_ns <= self.costs.prefill_ns(local_hit_len, hit_len)

"""Which computed blocks are worth storing."""

from dataclasses import dataclass
from typing import Protocol

from kvcore.costs import Costs
from kvcore.errors import require
from kvcore.group_runs import GroupRuns, common
from kvcore.planner import Planner


class Admission(Protocol):
    """Chooses among the blocks that a later request could need: a pure function of its arguments."""

    def admit(self, blocks: GroupRuns, again: GroupRuns, sequence_len: int) -> GroupRuns:
        """The part of `blocks` to store.

        `again`: those whose content this engine has had before, and did not store. `sequence_len`: tokens of the
        prompt, or of what is computed where that is more. Blocks that are not admitted now are in `again` when they are
        touched next.
        """


@dataclass(frozen=True, slots=True)
class AdmitAll:
    """Every block is stored: what vLLM's in-tree connector does."""

    def admit(self, blocks: GroupRuns, again: GroupRuns, sequence_len: int) -> GroupRuns:
        """All of them."""
        return blocks


@dataclass(frozen=True, slots=True)
class AdmitNone:
    """Nothing is stored: for an engine that only loads, as the consumer of vLLM's KV transfer roles does."""

    def admit(self, blocks: GroupRuns, again: GroupRuns, sequence_len: int) -> GroupRuns:
        """None of them."""
        return ((),) * len(blocks)


@dataclass(frozen=True, slots=True)
class AdmitLater:
    """Nothing is stored for the time being: while writes are switched off. Unlike `AdmitNone` it is no role."""

    def admit(self, blocks: GroupRuns, again: GroupRuns, sequence_len: int) -> GroupRuns:
        """None of them now; all are in `again` when they are touched next."""
        return ((),) * len(blocks)


@dataclass(frozen=True, slots=True)
class AdmitSecondTouch:
    """A block is stored when its engine has had it before ("cache on second hit").

    Source: Maggs and Sitaraman, "Algorithmic Nuggets in Content Delivery", ACM SIGCOMM CCR 45(3), 2015, section on
    Bloom filters: three quarters of a CDN's objects are asked for once, and writing them is wasted. In place of the
    filter stands `kvcore.memory.Experience.unsaved`, which is exact, bounded and forgets. It is one engine's: a prompt
    that each of n engines has once is new to all of them, so that without affinity a session is stored late.
    """

    def admit(self, blocks: GroupRuns, again: GroupRuns, sequence_len: int) -> GroupRuns:
        """Those had before."""
        return common(blocks, again)


@dataclass(frozen=True, slots=True)
class AdmitCheaper:
    """A sequence is stored when fetching what its length needs takes no longer than computing it from nothing.

    Source: Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997: what an object is worth is what it
    costs to have it again. It goes by whole prefixes, not by blocks: with full attention a block is of use only with
    all before it, and a later block costs more to compute, so that block by block the dear tail of a prompt would be
    stored without its cheap head. The time that storing takes is not weighed, nor how likely the next use is. What was
    too short to be worth it is stored when a longer sequence touches it.
    """

    planner: Planner
    costs: Costs

    def __post_init__(self) -> None:
        expected = len(self.planner.nothing)
        require(len(self.costs.block_ns) == expected, "costs.block_ns", self.costs.block_ns, f"{expected} entries")

    def admit(self, blocks: GroupRuns, again: GroupRuns, sequence_len: int) -> GroupRuns:
        """All, or nothing."""
        fetch_ns = self.costs.fetch_ns(self.planner.held(sequence_len))
        return blocks if fetch_ns <= self.costs.prefill_ns(0, sequence_len) else self.planner.nothing

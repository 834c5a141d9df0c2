"""Round robin: the router of the published runs (vLLM blog "Serving Agentic Workloads at Scale", 2026-05-06)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcore.routing.router import Arrival, Fact, Snapshot


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each in turn, whatever they hold."""

    reads: ClassVar[frozenset[Fact]] = frozenset()

    def choose(self, arrival: Arrival, snapshots: Sequence[Snapshot]) -> int:
        """The arrival's number modulo the number of instances."""
        return arrival.number % len(snapshots)

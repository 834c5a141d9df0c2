"""Fewest requests: `DPLBAsyncMPClient` of vLLM 0.32 (vllm/v1/engine/core_client.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcore.routing.router import Arrival, Fact, Snapshot, least


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The instance with the fewest requests, waiting and running together; ties go round.

    The source adds a penalty on waiting requests where the KV cache is more than half full, which is left out.
    """

    reads: ClassVar[frozenset[Fact]] = frozenset({Fact.LOAD})

    def choose(self, arrival: Arrival, snapshots: Sequence[Snapshot]) -> int:
        """See the class."""
        return least([snapshot.num_waiting + snapshot.num_running for snapshot in snapshots], arrival)

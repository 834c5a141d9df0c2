"""What instances, links and memories did over time: what a picture of a run needs beside its events.

A row for each change, never for each token or block: a jump of many decode steps is one row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvsim.rows import Rows

POOL_MEMORY, POOL_SSD, HOST_MEMORY = "pool memory", "pool SSD", "host memory"
"""Kinds of memories."""

RecordFill: TypeAlias = Callable[[int, int], None]
"""(time_ps, used_bytes): how full a memory is from then on."""

RecordTransfer: TypeAlias = Callable[[int, int, int], None]
"""(start_ps, end_ps, size_bytes): a transfer is complete; it started when it began to share the link."""


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One direction of one instance's link of a kind ("pool get", "pool put", ...)."""

    kind: str
    instance: int
    bandwidth_bytes_per_s: int
    full_when_busy: bool = True
    """Whether any transfer alone takes all of it; a link of a route may wait for the others."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """A memory that is shared or reported as one, with what it had at first."""

    kind: str
    capacity_bytes: int


class Usage:
    """Tables; `link` and `memory` in them count in `links` and `memories`."""

    def __init__(self) -> None:
        self.steps = Rows(
            "start_ps", "end_ps", "instance", "num_steps", "num_running", "held_blocks", "computed_tokens"
        )
        """Of each instance, when it computed: steps taken as one, requests in the batch, blocks that requests held at
        the end, tokens computed in all."""
        self.transfers = Rows("link", "start_ps", "end_ps", "size_bytes")
        self.loads = Rows("time_ps", "request", "tier", "size_bytes")
        """What a load brought from a tier, which counts in `kvsim.links.parcel.TIERS`; a row for each, at its end."""
        self.fills = Rows("memory", "time_ps", "used_bytes")
        """How full a memory is from then on."""
        self.links: list[LinkInfo] = []
        self.memories: list[MemoryInfo] = []

    def record_link(self, info: LinkInfo) -> RecordTransfer:
        """A new link; what is returned is told of each of its transfers."""
        self.links.append(info)
        return partial(self.transfers.add, len(self.links) - 1)

    def record_memory(self, info: MemoryInfo) -> RecordFill:
        """A new memory; what is returned is told how full it is."""
        self.memories.append(info)
        return partial(self.fills.add, len(self.memories) - 1)

    def record_memories(self, info: MemoryInfo) -> RecordFill:
        """Several memories as one; what is returned is told (time_ps, change of the used bytes) by each of them."""
        return _Total(self.record_memory(info)).add


class _Total:
    """Adds up changes."""

    def __init__(self, record: RecordFill) -> None:
        self._record = record
        self._used_bytes = 0

    def add(self, time_ps: int, change_bytes: int) -> None:
        self._used_bytes += change_bytes
        self._record(time_ps, self._used_bytes)

"""What one cache of any capacity would have hit of what a run served: the bounds beside a simulated hit rate.

Unlike `kvsim hits`, which looks at the prompts that a trace records, a cache here also keeps what was generated, counts
in the engine's blocks, and leaves at least one token of each prompt to compute. Time is ignored: requests come in the
order of the trace, and what one of them used is there for the next.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kvsim.hits import CURVES, Accesses, HitTokens
from kvsim.workload.trace import Column, Trace

NUM_HALVINGS = 12
"""The curve goes from all distinct blocks down to one in 2**NUM_HALVINGS of them."""


@dataclass(frozen=True, slots=True)
class Point:
    """Prompt tokens that hit under a capacity."""

    capacity_blocks: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """Hit tokens over capacity: of LRU, and of the clairvoyant bound (Belady); both end at `infinite_hit_tokens`."""

    block_size: int
    prompt_tokens: int
    distinct_blocks: int
    infinite_hit_tokens: int
    lru: tuple[Point, ...]
    opt: tuple[Point, ...]

    def to_json(self) -> dict[str, object]:
        """In plain types."""
        return asdict(self)


def capacity_curve(trace: Trace, block_size: int, is_served: npt.NDArray[np.bool_]) -> CapacityCurve:
    """The curve of the requests that are served, in blocks of `block_size` tokens."""
    accesses = SequenceAccesses(trace, block_size, is_served)
    capacities_blocks = _capacities(accesses.num_blocks)
    return CapacityCurve(
        block_size=block_size,
        prompt_tokens=int(trace.input_len[is_served].sum()),
        distinct_blocks=accesses.num_blocks,
        infinite_hit_tokens=accesses.tokens(accesses.seen.blocks_within(accesses.num_blocks)).hit_tokens,
        lru=_points(accesses, "lru", capacities_blocks),
        opt=_points(accesses, "opt", capacities_blocks),
    )


def _capacities(num_blocks: int) -> list[int]:
    """Ascending, each once; two for each halving."""
    found = {round(num_blocks / 2 ** (step / 2)) for step in range(2 * NUM_HALVINGS + 1)}
    return sorted(found - {0})


def _points(accesses: Accesses, policy: str, capacities_blocks: Sequence[int]) -> tuple[Point, ...]:
    curve = zip(capacities_blocks, CURVES[policy](accesses, capacities_blocks), strict=True)
    return tuple(Point(capacity_blocks, accesses.tokens(blocks).hit_tokens) for capacity_blocks, blocks in curve)


class SequenceAccesses(Accesses):
    """The blocks that each served request uses, prompt and answer, as runs of blocks of `block_size` tokens."""

    def __init__(self, trace: Trace, block_size: int, is_served: npt.NDArray[np.bool_]) -> None:
        self.trace = trace
        self.block_size = block_size
        request = np.repeat(np.arange(trace.num_requests), np.diff(trace.segment_offset))
        after = trace.segment_offset[1:]  # where each request's answer comes
        request = np.insert(request, after, np.arange(trace.num_requests))
        stream = np.insert(trace.segment_stream, after, trace.output_stream)
        ends = np.insert(trace.segment_end, after, trace.input_len + trace.output_len) // block_size
        goes_on = np.zeros(len(request), dtype=np.bool_)
        goes_on[:-1] = (request[1:] == request[:-1]) & (stream[1:] == stream[:-1])
        request, stream, ends = (column[~goes_on & is_served[request]] for column in (request, stream, ends))
        starts = np.zeros_like(ends)
        starts[1:] = np.where(request[1:] == request[:-1], ends[:-1], 0)
        used = starts < ends
        self.request, self.stream = request[used], stream[used]
        self.start, self.end = starts[used], ends[used]

    def tokens(self, blocks: Column) -> HitTokens:
        """Tokens of the first blocks[i] blocks of each request i that lie in its prompt before the last token."""
        limit_blocks = (self.trace.input_len - 1) // self.block_size
        hit_len = np.minimum(blocks, limit_blocks) * self.block_size
        return HitTokens(int(hit_len.sum()), int(hit_len[self.trace.num_requests // 2 :].sum()))

"""The nouns of the house, in run form: ranges of blocks, and the streams that name their content."""

from typing import NewType, TypeAlias

GroupId = NewType("GroupId", int)
"""Index of a KV cache group in the model's list of groups."""

StreamId = NewType("StreamId", int)
"""Name of one lineage of content; see `Segment`."""

Run: TypeAlias = tuple[int, int]
"""Half-open range of block indices: (start, end) is [start, end)."""

Runs: TypeAlias = tuple[Run, ...]
"""Sorted, disjoint, non-empty, non-adjacent runs; `kvcore.runs` keeps them so."""

Segment: TypeAlias = tuple[StreamId, int, int]
"""(stream, start, end): blocks [start, end) of a sequence whose content is named by (stream, block index).

Two sequences hold the same content up to and including block k exactly when both name block k with the same
(stream, k). It is the run-length form of the engine's chained block hash: a sequence that leaves another one's
prefix names its first differing block with a new stream.
"""

Segments: TypeAlias = tuple[Segment, ...]
"""The segments of one sequence, in order, covering [0, n) without gap."""

"""What one layer keeps, cut into the engine's blocks."""

from dataclasses import dataclass
from typing import NamedTuple

from kvcore.spec import GroupSpec
from kvsim.llm.dtypes import KVCacheDtype


class CacheOptions(NamedTuple):
    """What the engine is told about its cache."""

    block_size: int
    """Tokens in a block of full attention."""
    tp: int
    """Ranks of tensor parallelism."""
    dtype: KVCacheDtype


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of a block, on one rank; layers with equal ones can share a block table.

    `content_bytes` is what a block (of a recurrent layer: the one state) holds, `page_bytes` what it takes in GPU
    memory. Of the ranks of an instance `num_shards` hold different bytes, the others hold replicas.
    """

    spec: GroupSpec
    content_bytes: int
    page_bytes: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Elements that one layer keeps, for all ranks: the formula that model cards and papers count bytes by.

    One entry of `num_elements` per `tokens_per_entry` tokens, of the last `window` tokens (None: of all).
    """

    num_elements: int
    tokens_per_entry: int = 1
    window: int | None = None
    bits: int | None = None
    """Of one element, where it does not follow the dtype of the KV cache."""


@dataclass(frozen=True, slots=True)
class State:
    """The recurrent state of one layer and sequence, for all ranks."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Scan:
    """A pass of one layer over what it keeps, on one rank, for every query token.

    The query meets an entry for each `tokens_per_entry` tokens up to its own, at most `max_entries` of them (a window,
    or the top k of an index), with so many multiply-adds for each; entries are read from memory.
    """

    prefill_macs: int
    decode_macs: int
    entry_bytes: int
    tokens_per_entry: int = 1
    max_entries: int | None = None


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What the layers of one kind do beside their matrices, on one rank; all but `num_layers` is of one layer."""

    num_layers: int
    scans: tuple[Scan, ...]
    state_macs: int = 0
    """Multiply-adds per token on a recurrent state."""
    state_bytes: int = 0
    """Of a recurrent state, read and written once per sequence and step."""

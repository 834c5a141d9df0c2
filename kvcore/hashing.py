"""Chained block hashes, byte for byte those of vLLM's prefix cache (v1/core/kv_cache_utils.py of vLLM 0.32).

    h[-1] = H(seed);  h[k] = H((h[k-1], tokens of block k, extra keys of block k))

so one hash names a block together with everything before it. All inputs are arguments: no environment is read.
"""

import hashlib
import pickle
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TypeAlias

import cbor2

from kvcore.errors import require
from kvcore.keys import BlockHash

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed when PYTHONHASHSEED is not set; a set PYTHONHASHSEED is the seed, as text."""

ExtraKey: TypeAlias = tuple[str, str] | tuple[str, bytes] | tuple[str, str, str] | tuple[str, str, int]
"""A tag ("lora", "mm", "cache_salt", "prompt_embeds") and what it tags."""


class HashAlgorithm(Enum):
    """What H is; the values are vLLM's names of its `prefix_caching_hash_algo`."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter a request runs with."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MultiModal:
    """One image, sound or video: its placeholder is tokens [offset, offset + length)."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Embeddings given in place of prompt tokens: row i is `rows[i * row_size_bytes : (i + 1) * row_size_bytes]`."""

    rows: bytes
    row_size_bytes: int


@dataclass(frozen=True, slots=True)
class Extras:
    """What besides its tokens decides a request's KV. An empty salt is no salt.

    Raises InvalidArgument unless `items` are in order of offset and do not overlap.
    """

    lora: Lora | None = None
    items: tuple[MultiModal, ...] = ()
    salt: str = ""
    embeds: PromptEmbeds | None = None

    def __post_init__(self) -> None:
        for left, right in pairwise(self.items):
            require(left.offset + left.length <= right.offset, "items", (left, right), "sorted, without overlap")


NO_EXTRAS = Extras()


def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    *,
    algorithm: HashAlgorithm = HashAlgorithm.SHA256,
    seed: str = DEFAULT_SEED,
    extras: Extras = NO_EXTRAS,
    hashed: Sequence[BlockHash] = (),
) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens` that follow the first `len(hashed)` blocks, whose hashes are `hashed`.

    Appending the result to `hashed` as tokens arrive gives what hashing everything at once gives. `tokens` are all
    tokens of the sequence, as plain ints (a NumPy integer pickles differently). Each block of `block_size` tokens
    counts once it is full. Raises InvalidArgument for `block_size` < 1.
    """
    require(block_size >= 1, "block_size", block_size, ">= 1")
    first, end = len(hashed) * block_size, len(tokens) // block_size * block_size
    if first >= end:
        return []
    digest = _DIGEST[algorithm]
    parent = hashed[-1] if hashed else none_hash(algorithm, seed)
    fresh = tuple(tokens[first:end])
    plain = extras == NO_EXTRAS
    hashes: list[BlockHash] = []
    for start in range(0, end - first, block_size):
        block = fresh[start : start + block_size]
        keys = None if plain else extra_keys(extras, first + start, first + start + block_size)
        parent = digest((parent, block, keys))
        hashes.append(parent)
    return hashes


def none_hash(algorithm: HashAlgorithm, seed: str = DEFAULT_SEED) -> BlockHash:
    """The parent of every first block."""
    return _DIGEST[algorithm](seed)


def extra_keys(extras: Extras, start: int, end: int) -> tuple[ExtraKey, ...] | None:
    """The tagged extra keys of the block of tokens [start, end), in vLLM's order; None when there are none.

    An item counts in every block it touches, with its offset from the block's start (negative when it began
    earlier). The salt is in the first block only: the chain carries it on.
    """
    keys: list[ExtraKey] = []
    if extras.lora is not None:
        keys.append(("lora", _copy(extras.lora.name), _copy(extras.lora.path)))
    if extras.items:
        keys.extend(("mm", _copy(item.identifier), item.offset - start) for item in _items_in(extras.items, start, end))
    if extras.salt and start == 0:
        keys.append(("cache_salt", _copy(extras.salt)))
    if extras.embeds is not None:
        keys.append(("prompt_embeds", _embeds_digest(extras.embeds, start, end)))
    return tuple(keys) or None


def _items_in(items: tuple[MultiModal, ...], start: int, end: int) -> tuple[MultiModal, ...]:
    lo = bisect_left(items, start + 1, key=lambda item: item.offset + item.length)
    hi = bisect_left(items, end, lo, key=lambda item: item.offset)
    return items[lo:hi]


def _embeds_digest(embeds: PromptEmbeds, start: int, end: int) -> bytes:
    # Past the prompt the slice is short or empty; the tokens alone tell such blocks apart.
    size = embeds.row_size_bytes
    return hashlib.sha256(embeds.rows[start * size : end * size]).digest()


def _copy(text: str) -> str:
    # Pickle writes the second mention of one object as a reference. Only if no two parts are the same object does
    # a hash depend on values alone, as in an engine that received its request as a message.
    return (text + " ")[:-1]


def _sha256(value: object) -> BlockHash:
    return BlockHash(hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest())


def _sha256_cbor(value: object) -> BlockHash:
    return BlockHash(hashlib.sha256(cbor2.dumps(value, canonical=True)).digest())


_DIGEST = {HashAlgorithm.SHA256: _sha256, HashAlgorithm.SHA256_CBOR: _sha256_cbor}

"""Chained block hashes, byte for byte those of vLLM's prefix cache (v1/core/kv_cache_utils.py of vLLM 0.32).

    h[-1] = H(seed);  h[k] = H((h[k-1], tokens of block k, extra keys of block k))

so one hash names a block together with everything before it. All inputs are arguments: no environment is read.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from typing import TypeAlias

import cbor2

from kvcore.errors import InvalidArgument, require
from kvcore.keys import BlockHash
from kvcore.types import Run
from kvcore.units import div_ceil

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed when PYTHONHASHSEED is not set; a set PYTHONHASHSEED is the seed, as text.

Not with xxHash, which can be made to collide: there every vLLM process without PYTHONHASHSEED has a seed of its own.
"""

ExtraKey: TypeAlias = tuple[str, str] | tuple[str, bytes] | tuple[str, str, str] | tuple[str, str, int]
"""A tag ("lora", "mm", "cache_salt", "prompt_embeds") and what it tags."""


class HashAlgorithm(Enum):
    """What H is; the values are vLLM's names of its `prefix_caching_hash_algo`. Two need the package xxhash."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


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
    lookahead_tokens: int = 0,
) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens` that follow the first `len(hashed)` blocks, whose hashes are `hashed`.

    Appending the result to `hashed` as tokens arrive gives what hashing everything at once gives. `tokens` are all
    tokens of the sequence, as plain ints (a NumPy integer pickles differently). Each block of `block_size` tokens
    counts once it is full. `lookahead_tokens`: a hash covers that many tokens after its block too, and waits for them;
    vLLM 0.33 does so with a draft head and no connector, and then drops nothing of a hit. Raises InvalidArgument for
    `block_size` < 1, and for an algorithm whose package is not installed.
    """
    require(block_size >= 1, "block_size", block_size, ">= 1")
    run = first, end = len(hashed), (len(tokens) - lookahead_tokens) // block_size
    if first >= end:
        return []
    digest = _digest(algorithm)
    parent = hashed[-1] if hashed else none_hash(algorithm, seed)
    fresh = tuple(tokens[first * block_size : end * block_size + lookahead_tokens])
    hashes: list[BlockHash] = []
    start = 0
    for keys in extra_keys(extras, block_size, run, lookahead_tokens):
        stop = start + block_size
        covered = (keys, *fresh[stop : stop + lookahead_tokens]) if lookahead_tokens else keys
        parent = digest((parent, fresh[start:stop], covered))
        hashes.append(parent)
        start = stop
    return hashes


def none_hash(algorithm: HashAlgorithm, seed: str = DEFAULT_SEED) -> BlockHash:
    """The parent of every first block."""
    return _digest(algorithm)(seed)


def extra_keys(
    extras: Extras, block_size: int, run: Run, lookahead_tokens: int = 0
) -> list[tuple[ExtraKey, ...] | None]:
    """Per block of `run`, its tagged extra keys in vLLM's order, or None when it has none.

    The adapter is in every block. An item is in each block that it touches, or the lookahead after it, with its offset
    from the block's start (negative when it began earlier). The salt is in block 0 only: the chain carries it on.
    """
    first, end = run
    if extras is NO_EXTRAS or extras == NO_EXTRAS:
        return [None] * (end - first)
    lora: list[ExtraKey] = [("lora", _copy(extras.lora.name), _copy(extras.lora.path))] if extras.lora else []
    keys = [lora.copy() for _ in range(first, end)]
    for item in extras.items:
        identifier, item_end = _copy(item.identifier), div_ceil(item.offset + item.length, block_size)
        for block in range(max(first, (item.offset - lookahead_tokens) // block_size), min(end, item_end)):
            keys[block - first].append(("mm", identifier, item.offset - block * block_size))
    if extras.salt and first == 0 < end:
        keys[0].append(("cache_salt", _copy(extras.salt)))
    if extras.embeds is not None:
        for block in range(first, end):
            keys[block - first].append(
                ("prompt_embeds", _embeds_digest(extras.embeds, block_size, block, lookahead_tokens))
            )
    return [tuple(block_keys) or None for block_keys in keys]


def _embeds_digest(embeds: PromptEmbeds, block_size: int, block: int, lookahead_tokens: int) -> bytes:
    # Past the prompt the slice is short or empty; the tokens alone tell such blocks apart.
    first, end = block * block_size, (block + 1) * block_size + lookahead_tokens
    return hashlib.sha256(embeds.rows[first * embeds.row_size_bytes : end * embeds.row_size_bytes]).digest()


def _copy(text: str) -> str:
    # Pickle writes the second mention of one object as a reference. Only if no two parts are the same object does
    # a hash depend on values alone, as in an engine that received its request as a message.
    return (text + " ")[:-1]


@cache
def _digest(algorithm: HashAlgorithm) -> Callable[[object], BlockHash]:
    match algorithm:
        case HashAlgorithm.SHA256:
            return _sha256
        case HashAlgorithm.SHA256_CBOR:
            return _sha256_cbor
    try:
        from xxhash import xxh3_128_digest as xxh3
    except ImportError:
        fix = "sha256 or sha256_cbor, or the package xxhash to be installed (pip install 'kvtwin[xxhash]')"
        raise InvalidArgument("algorithm", algorithm.value, fix) from None
    return partial(_xxh3 if algorithm is HashAlgorithm.XXHASH else _xxh3_cbor, xxh3)


def _sha256(value: object) -> BlockHash:
    return BlockHash(hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest())


def _sha256_cbor(value: object) -> BlockHash:
    return BlockHash(hashlib.sha256(cbor2.dumps(value, canonical=True)).digest())


def _xxh3(xxh3: Callable[[bytes], bytes], value: object) -> BlockHash:
    return BlockHash(xxh3(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)))


def _xxh3_cbor(xxh3: Callable[[bytes], bytes], value: object) -> BlockHash:
    return BlockHash(xxh3(cbor2.dumps(value, canonical=True)))

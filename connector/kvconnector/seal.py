"""What vouches for an object's content: a trailer behind its bytes, over them and over the object's name.

    object    | piece of the block | piece | ... | trailer |           trailer    | tag, 8 bytes | digest, 24 bytes |

The trailers of a call lie in memory of their own, so that the KV cache stays as the engine made it. Bytes are read
where they lie: they must be in this process's memory, and final.
"""

import ctypes
import hashlib
import hmac
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnector.config import ConnectorConfig, Integrity
from kvconnector.store import Pieces, PoolStore
from kvcore.errors import InvalidArgument, require
from kvcore.keys import BlockKey, format_key
from kvcore.ports import StoreOutcome
from kvcore.spec import ModelSpec

TRAILER_BYTES = 32
DIGEST_BYTES = 24

OBJECTS_PER_CALL = 256
"""More objects in one call are cut: the first byte waits until all of a call's have been read."""

_LOST = {StoreOutcome.TIMEOUT, StoreOutcome.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Seal:
    """Makes trailers. Two seals of one `identity` make the same ones; the identity does not tell the secret.

    `tag` says which kind of trailer it is, `start` is a hash that has seen nothing yet but its key.
    """

    identity: str
    tag: bytes
    start: Any

    def trailer(self, name: bytes, pieces: Pieces) -> bytes:
        """For the object `name` whose bytes are the pieces, one after the other. Takes time for each byte."""
        digest = self.start.copy()
        digest.update(len(name).to_bytes(4, "big") + name)
        for address, size_bytes in pieces:
            digest.update((ctypes.c_char * size_bytes).from_address(address))
        return self.tag + bytes(digest.digest()).ljust(DIGEST_BYTES, b"\0")


def checksum() -> Seal:
    """Against damage: XXH3 of 128 bits, which anybody can make, on purpose too."""
    try:
        from xxhash import xxh3_128
    except ImportError:
        fix = "\"keyed\", or the package xxhash to be installed (pip install 'kvtwin[xxhash]')"
        raise InvalidArgument("integrity", Integrity.CHECKSUM.value, fix) from None
    return Seal("xxh3_128", b"kvtwin1c", xxh3_128())


def keyed(secret: bytes) -> Seal:
    """Against damage, and against whoever can write to the pool and does not know the secret: keyed BLAKE2b."""
    key = hashlib.blake2b(secret).digest()
    fingerprint = hashlib.blake2b(key=key, digest_size=8, person=b"kvtwin identity").hexdigest()
    start = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES, person=b"kvtwin trailer")
    return Seal(f"blake2b {fingerprint}", b"kvtwin1k", start)


def seal_of(config: ConnectorConfig) -> Seal | None:
    """The seal that the settings ask for."""
    match config.integrity:
        case Integrity.NONE:
            return None
        case Integrity.CHECKSUM:
            return checksum()
        case Integrity.KEYED:
            return keyed(config.integrity_secret)


def require_final_blocks(integrity: Integrity, model: ModelSpec) -> None:
    """Raises InvalidArgument for a model whose blocks the engine may still write when they are stored."""
    if integrity is Integrity.NONE:
        return
    fix = 'set integrity to "none"'
    whole = f"hits that end with blocks: this model's may end inside one, which is stored while it fills; {fix}"
    require(not model.splits_blocks, "integrity", integrity.value, whole)
    drafts = f"no draft head, which writes the last entry of a block again while the block is stored; {fix}"
    require(not model.eagle_groups, "integrity", integrity.value, drafts)


class SealedStore:
    """A `KVStore[Pieces]` whose objects end with a trailer; a get whose trailer does not fit is BAD_CONTENT.

    Memory is registered through it as with the store that it is made of, which stays the caller's to close.
    """

    def __init__(self, store: PoolStore, seal: Seal) -> None:
        self._store = store
        self._seal = seal
        self._written, self._read = _Trailers(), _Trailers()
        for trailers in (self._written, self._read):
            store.register(trailers.address, OBJECTS_PER_CALL * TRAILER_BYTES)

    def register(self, address: int, size_bytes: int) -> None:
        """See `PoolStore`."""
        self._store.register(address, size_bytes)

    def unregister(self, address: int) -> None:
        """See `PoolStore`."""
        self._store.unregister(address)

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """OK for each key that has an object, whatever is in it."""
        return self._store.exists(keys, deadline_ns)

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """See `KVStore`."""
        return self._store.remove(keys, deadline_ns)

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Store each key's pieces and their trailer."""

        def put(keys: Sequence[BlockKey], buffers: Sequence[Pieces]) -> list[StoreOutcome]:
            for slot, (key, pieces) in enumerate(zip(keys, buffers, strict=True)):
                self._written[slot] = self._trailer(key, pieces)
            return self._store.put(keys, self._written.behind(buffers), deadline_ns)

        with self._written.lock:
            return _in_calls(keys, buffers, put)

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Fill each key's pieces; whatever is not OK may hold any bytes afterwards."""

        def get(keys: Sequence[BlockKey], buffers: Sequence[Pieces]) -> list[StoreOutcome]:
            outcomes = self._store.get(keys, self._read.behind(buffers), deadline_ns)
            for slot, (key, pieces) in enumerate(zip(keys, buffers, strict=True)):
                if outcomes[slot] is StoreOutcome.OK and not self._fits(self._read[slot], key, pieces):
                    outcomes[slot] = StoreOutcome.BAD_CONTENT
            return outcomes

        with self._read.lock:
            return _in_calls(keys, buffers, get)

    def _trailer(self, key: BlockKey, pieces: Pieces) -> bytes:
        return self._seal.trailer(format_key(key).encode(), pieces)

    def _fits(self, trailer: bytes, key: BlockKey, pieces: Pieces) -> bool:
        # In a time that does not tell a forger how much of it was right.
        return hmac.compare_digest(trailer, self._trailer(key, pieces))


class _Trailers:
    """Those of one call, in memory of their own; whoever has the `lock` uses them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._memory = ctypes.create_string_buffer(OBJECTS_PER_CALL * TRAILER_BYTES)
        self.address = ctypes.addressof(self._memory)

    def __getitem__(self, slot: int) -> bytes:
        return ctypes.string_at(self._at(slot), TRAILER_BYTES)

    def __setitem__(self, slot: int, trailer: bytes) -> None:
        ctypes.memmove(self._at(slot), trailer, TRAILER_BYTES)

    def behind(self, buffers: Sequence[Pieces]) -> list[Pieces]:
        """Each value's pieces, and its trailer as one more."""
        return [[*pieces, (self._at(slot), TRAILER_BYTES)] for slot, pieces in enumerate(buffers)]

    def _at(self, slot: int) -> int:
        return self.address + slot * TRAILER_BYTES


def _in_calls(
    keys: Sequence[BlockKey],
    buffers: Sequence[Pieces],
    move: Callable[[Sequence[BlockKey], Sequence[Pieces]], list[StoreOutcome]],
) -> list[StoreOutcome]:
    """None begins after one that ran out of time or lost the pool."""
    require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")
    outcomes: list[StoreOutcome] = []
    for start in range(0, len(keys), OBJECTS_PER_CALL):
        if outcomes and outcomes[-1] in _LOST:
            return outcomes + outcomes[-1:] * (len(keys) - len(outcomes))
        part = slice(start, start + OBJECTS_PER_CALL)
        outcomes += move(keys[part], buffers[part])
    return outcomes

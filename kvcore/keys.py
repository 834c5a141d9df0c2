"""Names of blocks in a shared pool: a typed key, its text form, and the namespace that keeps foreign bytes apart."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, NewType, TypeAlias

from kvcore.errors import InvalidArgument, require
from kvcore.group_runs import GroupRuns
from kvcore.runs import normalize
from kvcore.types import GroupId, Run, Runs

BlockHash = NewType("BlockHash", bytes)
"""Digest of a block's tokens and of everything before them; see `kvcore.hashing`."""

Namespace = NewType("Namespace", str)
"""Writers and readers whose bytes mean the same; made by `namespace_digest`. ASCII letters and digits only."""

NamespaceField: TypeAlias = "str | int | bool | Sequence[NamespaceField] | None"

_TEXT_FORM = re.compile(r"([0-9A-Za-z]+)-g(0|[1-9][0-9]*)-r(0|[1-9][0-9]*)-((?:[0-9a-f]{2})+)")


# A tuple, not a dataclass: a lookup makes and hashes one per block, and a tuple does both in C.
class BlockKey(NamedTuple):
    """One object of the pool: the shard `rank` of the block `block_hash` of cache group `group`.

    `rank` is 0 wherever all ranks hold the same bytes.
    """

    namespace: Namespace
    group: GroupId
    rank: int
    block_hash: BlockHash


def format_key(key: BlockKey) -> str:
    """The key as ASCII letters, digits and dashes: `NAMESPACE-gGROUP-rRANK-HASH`, about 90 characters for SHA-256.

    Different keys give different texts. Raises InvalidArgument when a part cannot be written so.
    """
    namespace, group, rank, block_hash = key
    if not block_hash:
        raise InvalidArgument("block_hash", block_hash, "at least one byte")
    return _prefix(namespace, group, rank) + block_hash.hex()


@lru_cache(maxsize=4_096)
def _prefix(namespace: str, group: int, rank: int) -> str:
    """The keys of one lookup share a few of these."""
    require(namespace.isascii() and namespace.isalnum(), "namespace", namespace, "ASCII letters and digits")
    require(group >= 0 and rank >= 0, "(group, rank)", (group, rank), "both >= 0")
    return f"{namespace}-g{group}-r{rank}-"


def parse_key(text: str) -> BlockKey:
    """The key whose `format_key` is `text`; raises InvalidArgument for any other text."""
    match = _TEXT_FORM.fullmatch(text)
    if match is None:
        raise InvalidArgument("text", text, "NAMESPACE-gGROUP-rRANK-HASH as format_key writes it")
    namespace, group, rank, digest = match.groups()
    return BlockKey(Namespace(namespace), GroupId(int(group)), int(rank), BlockHash(bytes.fromhex(digest)))


HashesOf: TypeAlias = Callable[[int, Run], Sequence[BlockHash]]
"""(index in `GroupRuns`, run) -> the hash of each of its blocks."""


Shards: TypeAlias = Sequence[tuple[int, int]]
"""Per index of `GroupRuns`: (group that names the objects, shards of each)."""


def shard_keys(namespace: Namespace, shards: Shards, hashes_of: HashesOf, blocks: GroupRuns) -> list[BlockKey]:
    """Every shard of every block, in order: by index, block, rank."""
    return [
        BlockKey(namespace, GroupId(group), rank, block_hash)
        for index, ((group, num_shards), runs) in enumerate(zip(shards, blocks, strict=True))
        for run in runs
        for block_hash in hashes_of(index, run)
        for rank in range(num_shards)
    ]


def whole_blocks(shards: Shards, blocks: GroupRuns, present: Sequence[bool]) -> GroupRuns:
    """The blocks all of whose shards are `present`, which has one entry per `shard_keys`."""
    found: list[Runs] = []
    position = 0
    for (_, num_shards), runs in zip(shards, blocks, strict=True):
        whole: list[Run] = []
        for start, end in runs:
            stop = position + (end - start) * num_shards
            whole.extend(_whole_runs(start, end, num_shards, present[position:stop]))
            position = stop
        found.append(normalize(whole))
    return tuple(found)


def _whole_runs(start: int, end: int, num_shards: int, present: Sequence[bool]) -> Iterable[Run]:
    if all(present):
        return ((start, end),)
    whole = (all(present[at : at + num_shards]) for at in range(0, len(present), num_shards))
    return [(block, block + 1) for block, there in zip(range(start, end), whole, strict=True) if there]


def namespace_digest(fields: Mapping[str, NamespaceField]) -> Namespace:
    """16 hexadecimal digits that name everything two processes must agree on before one may read the other's bytes.

    Equal fields give equal digests in any order and any process. The text that is hashed is injective: a changed
    value, a changed type (1, True, "1", None) and a changed nesting all show. Lists and tuples count as the same.
    """
    require(fields, "fields", fields, "at least one field")
    for name, value in fields.items():
        require(isinstance(name, str), "field name", name, "a str")
        _require_plain(name, value)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return Namespace(hashlib.sha256(text.encode()).hexdigest()[:16])


def _require_plain(name: str, value: object) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _require_plain(name, item)
        return
    plain = value is None or isinstance(value, str | int)
    require(plain, f"fields[{name!r}]", value, "str, int, bool, None or a list of them")

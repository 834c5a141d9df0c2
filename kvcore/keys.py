"""Names of blocks in a shared pool: a typed key, its text form, and the namespace that keeps foreign bytes apart."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NewType, TypeAlias

from kvcore.errors import InvalidArgument, require
from kvcore.types import GroupId

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
    require(namespace.isascii() and namespace.isalnum(), "namespace", namespace, "ASCII letters and digits")
    require(group >= 0 and rank >= 0, "(group, rank)", (group, rank), "both >= 0")
    require(block_hash, "block_hash", block_hash, "at least one byte")
    return f"{namespace}-g{group}-r{rank}-{block_hash.hex()}"


def parse_key(text: str) -> BlockKey:
    """The key whose `format_key` is `text`; raises InvalidArgument for any other text."""
    match = _TEXT_FORM.fullmatch(text)
    if match is None:
        raise InvalidArgument("text", text, "NAMESPACE-gGROUP-rRANK-HASH as format_key writes it")
    namespace, group, rank, digest = match.groups()
    return BlockKey(Namespace(namespace), GroupId(int(group)), int(rank), BlockHash(bytes.fromhex(digest)))


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

"""`python -m kvconnector.namespaces`: which namespaces a pool holds, and the removal of one that is of no use any more.

    list                  each namespace, with its objects and their bytes
    remove NAMESPACE      its objects, and nobody else's

What somebody has just asked for is leased by the master and stays, so that nothing is removed while it is read.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

from kvconnector.config import KeyNames, read_config
from kvconnector.link import mooncake_library, setup
from kvcore.errors import InvalidArgument
from kvcore.keys import parse_key

ADMIN_PORT = 9003
"""The master's `--metrics_port`, unless set."""

HTTP_TIMEOUT_S = 60.0
KEYS_PER_CALL = 1_000

LEASE_PATIENCE_S = 30.0
"""How long leased objects are tried again; a lease is 10 s unless the master's `--default_kv_lease_ttl` is set."""

RETRY_S = 1.0

_LEASED = -706
"""Mooncake's code (mooncake-store/include/types.h)."""

DONE, IN_USE, REFUSED = 0, 1, 2
"""Exit codes: as asked; objects are left, because somebody uses them; nothing was done."""

_IN_TREE_FORM = re.compile(r"(.+)@(tp_rank:\d+@pcp\d+@dcp\d+@pp_rank:\d+@group:\d+)@[0-9a-f]+", re.DOTALL)


class Place(NamedTuple):
    """Where an object belongs; the objects of one `part` (group and shard) have one size.

    The namespace of a key of vLLM's format is `PREFIX@MODEL`, or `MODEL` without a prefix.
    """

    namespace: str
    key_format: KeyNames
    part: str


def place_of(name: str) -> Place | None:
    """Where the object of this name belongs; None when it is of neither key format."""
    match = _IN_TREE_FORM.fullmatch(name)
    if match is not None:
        return Place(match[1], KeyNames.VLLM, match[2])
    try:
        key = parse_key(name)
    except InvalidArgument:
        return None
    return Place(key.namespace, KeyNames.KVTWIN, f"{key.group} {key.rank}")


@dataclass(slots=True)
class Content:
    """What a pool holds: objects by place, a name for each, and how many objects are of neither key format."""

    counts: Counter[Place] = field(default_factory=Counter)
    examples: dict[Place, str] = field(default_factory=dict)
    num_others: int = 0

    def num_objects(self, namespace: str) -> int:
        """Objects of the namespace."""
        return sum(count for place, count in self.counts.items() if place.namespace == namespace)


def content_of(names: Iterable[str]) -> Content:
    """What the pool holds whose objects have these names."""
    content = Content()
    for name in names:
        place = place_of(name)
        if place is None:
            content.num_others += 1
            continue
        content.counts[place] += 1
        content.examples.setdefault(place, name)
    return content


class Admin:
    """The master's HTTP side, at HOST:PORT."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    def names(self) -> Iterator[str]:
        """Of all objects."""
        with urlopen(f"{self._url}/get_all_keys", timeout=HTTP_TIMEOUT_S) as answer:
            for line in answer:
                if name := line.decode(errors="replace").rstrip("\n"):
                    yield name

    def size_bytes(self, name: str) -> int | None:
        """What an object takes of the pool's memory; None when it is gone or not in memory. The master leases it."""
        try:
            with urlopen(f"{self._url}/query_key?key={quote(name, safe='@:')}", timeout=HTTP_TIMEOUT_S) as answer:
                return sum(int(replica["size_"]) for replica in json.load(answer)["data"])
        except (URLError, LookupError, TypeError, ValueError):
            return None


def rows(content: Content, size_of: Callable[[str], int | None]) -> list[tuple[str, str, str, str]]:
    """(namespace, key format, objects, bytes) of each namespace as text, the largest first.

    Of each group and shard one object is measured.
    """
    names = sorted({place[:2] for place in content.counts}, key=lambda name: -content.num_objects(name[0]))
    made = [
        (namespace, key_format.value, f"{content.num_objects(namespace):,}", _size(content, namespace, size_of))
        for namespace, key_format in names
    ]
    return made + ([("(others)", "", f"{content.num_others:,}", "")] if content.num_others else [])


def _size(content: Content, namespace: str, size_of: Callable[[str], int | None]) -> str:
    total_bytes = 0
    for place, count in content.counts.items():
        if place.namespace == namespace:
            size_bytes = size_of(content.examples[place])
            if size_bytes is None:
                return "?"
            total_bytes += count * size_bytes
    return f"{total_bytes:,}"


def remove(client: Any, names: Sequence[str], patience_s: float) -> list[str]:
    """Remove the objects, those that are leased once they are not, and return those that were leased all the time."""
    deadline_s = time.monotonic() + patience_s
    left = list(names)
    while left := _remove_once(client, left):
        if time.monotonic() >= deadline_s:
            break
        time.sleep(RETRY_S)
    return left


def _remove_once(client: Any, names: Sequence[str]) -> list[str]:
    leased: list[str] = []
    for start in range(0, len(names), KEYS_PER_CALL):
        part = names[start : start + KEYS_PER_CALL]
        codes = client.batch_remove(part, False)
        leased += [name for name, code in zip(part, codes, strict=True) if code == _LEASED]
    return leased


def _list(admin: Admin) -> int:
    table = [("namespace", "key format", "objects", "bytes"), *rows(content_of(admin.names()), admin.size_bytes)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for namespace, key_format, *numbers in table:
        cells = (namespace.ljust(widths[0]), key_format.ljust(widths[1]), *map(str.rjust, numbers, widths[2:]))
        print("  ".join(cells).rstrip())
    return DONE


def _remove(admin: Admin, namespace: str, is_sure: Callable[[str], bool]) -> int:
    names = _names_in(admin, namespace)
    if not names:
        print(f"{namespace} has no object in this pool: see `list`", file=sys.stderr)
        return REFUSED
    print(f"{namespace}: {len(names):,} objects. An engine that uses it says so in its first line: it would recompute.")
    if not is_sure(namespace):
        print("nothing was removed", file=sys.stderr)
        return REFUSED
    pool = read_config({}, "kv_both").pool.lookup_only()
    client = mooncake_library().MooncakeDistributedStore()
    if code := setup(client, replace(pool, local_hostname=pool.local_hostname or "localhost")):
        print(f"the master {pool.master_server_address} does not let us in (code {code})", file=sys.stderr)
        return REFUSED
    try:
        remove(client, names, LEASE_PATIENCE_S)
    finally:
        client.close()
    left = len(_names_in(admin, namespace))
    print(f"{len(names) - left:,} objects removed")
    if left:
        print(f"{left:,} are left, or new: somebody uses {namespace}. Stop it, and call this again", file=sys.stderr)
    return IN_USE if left else DONE


def _names_in(admin: Admin, namespace: str) -> list[str]:
    places = ((name, place_of(name)) for name in admin.names())
    return [name for name, place in places if place is not None and place.namespace == namespace]


def _asked(namespace: str) -> bool:
    """Whether whoever sits there types the namespace once more."""
    try:
        return input("To remove them for everybody, type the namespace: ") == namespace
    except EOFError:
        return False


def _admin_address(given: str | None) -> str:
    if given is not None:
        return given
    host = read_config({}, "kv_both").pool.master_server_address.rpartition(":")[0]
    return f"{host}:{ADMIN_PORT}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvconnector.namespaces", description=__doc__.splitlines()[0])
    parser.add_argument("--admin", metavar="HOST:PORT", help=f"the master's HTTP side; its host, port {ADMIN_PORT}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what is in the pool")
    removal = commands.add_parser("remove", help="remove what is in a namespace")
    removal.add_argument("namespace")
    removal.add_argument("--yes", action="store_true", help="without asking")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Where the store is, is read as an engine reads it: MOONCAKE_CONFIG_PATH, MOONCAKE_MASTER."""
    asked = _arguments(arguments)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake tells how it joins the store, in 15 lines
    try:
        admin = Admin(_admin_address(asked.admin))
        if asked.command == "list":
            return _list(admin)
        return _remove(admin, asked.namespace, (lambda _: True) if asked.yes else _asked)
    except (InvalidArgument, URLError) as error:
        print(error, file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())

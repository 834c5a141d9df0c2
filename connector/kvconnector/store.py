"""The pool behind `kvcore.ports.KVStore`: a client of Mooncake's store that waits for nobody.

Whatever goes wrong is an outcome. The master may be missing at the start, vanish and come back: each costs misses.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from kvconnector.keys import format_group
from kvconnector.lane import Lane
from kvconnector.link import LOST, Link, mooncake_library
from kvconnector.pool_config import PoolConfig
from kvcore.errors import require
from kvcore.keys import BlockKey, format_key
from kvcore.ports import Clock, KVStore, StoreOutcome
from kvcore.units import NS_PER_MS, NS_PER_S, align_up

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

Pieces: TypeAlias = Sequence[tuple[int, int]]
"""(address, size in bytes) of one value's pieces, in order, all inside ranges given to `MooncakeStore.register`."""

TCP_PIECES_PER_CALL = 128
"""Mooncake's TCP transport queues 2,048 pieces for a peer; more are refused, or stuck for a minute (0.3.13).

A peer that is frozen holds up a call of so many for 23 s, of half as many for 11 s, and of twice as many until Mooncake
gives it up; half as many take 8 % longer to load when all are well, and four times as many 15 % less.
"""

PIECES_PER_CALL = 4_096

ABANDONED_NS = 55 * NS_PER_S
"""A transfer that fails after 60 s was given up by Mooncake, whose transport may still move its bytes later."""

DOUBTFUL_NS = 100 * NS_PER_MS
"""What took longer to read must still be there: in less no master is started anew and gives its memory to others."""

SILENCE_NS = 2 * NS_PER_S
"""A holder that says nothing costs a call this long or longer (see `kvconnector.link`), one that is gone a second."""

_PAGE_BYTES = 4_096
_PADDING_BYTES = 2 * _PAGE_BYTES
"""Who holds objects on SSD reads each into whole pages, and two more."""

_NOBODY_S_KEY = "kvtwin-probe"

_Transfer: TypeAlias = Callable[[slice, Any], list[StoreOutcome]]
"""Given a part of the keys and Mooncake's client: one outcome per key of the part."""

# Mooncake's error codes (mooncake-store/include/types.h); what is not here counts as unavailable.
_NO_SPACE, _BAD_PARAMETERS, _TRANSFER_FAILED, _RPC_FAILED, _RPC_TIMEOUT = -200, -600, -800, -900, -901
_OUTCOME_OF_CODE = {
    _NO_SPACE: StoreOutcome.NO_SPACE,
    _BAD_PARAMETERS: StoreOutcome.BAD_LENGTH,
    -703: StoreOutcome.MISSING,  # its writer has not finished
    -704: StoreOutcome.MISSING,
    -707: StoreOutcome.MISSING,  # the lease ran out while its bytes were read
    _RPC_TIMEOUT: StoreOutcome.TIMEOUT,
    **dict.fromkeys((-1100, -1101, -1102), StoreOutcome.MISSING),  # it was on a disk, whose file is gone or unreadable
    **dict.fromkeys((-1700, -1701), StoreOutcome.NO_SPACE),  # its tenant may have no more, or nothing
}


class PoolStore(KVStore[Pieces], Protocol):
    """A store that moves bytes from and to the engine's own memory."""

    def register(self, address: int, size_bytes: int) -> None:
        """Let `get` and `put` use this memory; it must live until it is unregistered, or as long as the store."""

    def unregister(self, address: int) -> None:
        """The registered memory that begins there is taken away; no `get` or `put` of it may be under way."""


class MooncakeStore:
    """A `PoolStore`. One per process and use; its methods may be called from any thread.

    `text` names an object; `group` what is leased and evicted together, where the settings want that. `library` is
    `mooncake.store`, or what stands in for it. Raises InvalidArgument for a setting that the library does not know.

    `exists` and `remove` return at their deadline. `get` and `put` touch the caller's memory, so each returns only when
    Mooncake is done with it: they are cut into calls, none begins after the deadline or after one that has waited in
    vain, and Mooncake's own timeouts bound the one that runs. Where they cannot, the client is closed: nothing else
    stops it. Whatever becomes of one call, the outcomes of the others are their own.
    """

    def __init__(
        self,
        config: PoolConfig,
        clock: Clock,
        library: Any = None,
        text: Callable[[BlockKey], str] = format_key,
        group: Callable[[BlockKey], str] = format_group,
    ) -> None:
        self.counts: Counter[tuple[str, StoreOutcome]] = Counter()
        """Keys by operation and outcome."""
        self._clock = clock
        self._text = text
        self._group = group
        self._library = library or mooncake_library()
        self._replication = config.replication
        self._pieces_per_call = TCP_PIECES_PER_CALL if config.protocol == "tcp" else PIECES_PER_CALL
        self._bytes_per_call = config.transfer_bytes
        self._link = Link(config, clock, self._library)
        self._lane = Lane("kvtwin-ask", clock)
        self._counting = threading.Lock()

    def join(self, deadline_ns: int) -> bool:
        """Connect now rather than with the first call, whose deadline is short; False when that did not succeed yet."""
        return bool(self._lane.call(lambda: self._link.usable_client() is not None, deadline_ns))

    def answers(self, deadline_ns: int) -> bool:
        """Whether the master answers a question; connects first where that has not succeeded yet."""
        outcomes = self._lane.call(lambda: self._link.run(1, partial(_exist, [_NOBODY_S_KEY])), deadline_ns)
        return outcomes is not None and not LOST & set(outcomes)

    def register(self, address: int, size_bytes: int) -> None:
        """See `PoolStore`."""
        self._link.register(address, size_bytes)

    def unregister(self, address: int) -> None:
        """See `PoolStore`."""
        self._link.unregister(address)

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """OK for each key that a get would find now, and its lease is renewed."""
        return self._count("exists", self._ask(keys, deadline_ns, _exist))

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """Forget each key, leased or not."""
        return self._count("remove", self._ask(keys, deadline_ns, _remove))

    def remove_like(self, pattern: str) -> StoreOutcome:
        """Forget what is named like this regular expression and leased to nobody; waits for the master."""
        removed = self._link.run(1, lambda client: [_moved(min(0, client.remove_by_regex(pattern)))])
        return self._count("remove_like", removed)[0]

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Fill each key's pieces; whatever is not OK may hold any bytes afterwards."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")
        names, sizes_bytes = self._names(keys), _sizes_bytes(buffers)

        def get(part: slice, client: Any) -> list[StoreOutcome]:
            begun_ns = self._clock.now_ns()
            codes = client.batch_get_into_multi_buffers(names[part], *_addresses_and_sizes(buffers[part]))
            got = _got(client, names[part], codes, sizes_bytes[part])
            return got if self._clock.now_ns() - begun_ns < DOUBTFUL_NS else _confirmed(names[part], client, got)

        return self._count("get", self._move(buffers, sizes_bytes, deadline_ns, get))

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Store each key's pieces; a key that is there already keeps its bytes and costs no transfer."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")
        names = self._names(keys)

        def put(part: slice, client: Any) -> list[StoreOutcome]:
            where = _addresses_and_sizes(buffers[part])
            codes = client.batch_put_from_multi_buffers(names[part], *where, *self._replicate(keys[part]))
            return [_moved(code) for code in codes]

        return self._count("put", self._move(buffers, _sizes_bytes(buffers), deadline_ns, put))

    def close(self) -> None:
        """Leave the store, unless a call hangs: the client must not be taken away from under it."""
        if not self._lane.hangs:
            self._link.close()

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [self._text(key) for key in keys]

    def _replicate(self, keys: Sequence[BlockKey]) -> list[Any]:
        """What a put of these keys is told, if anything."""
        if self._replication.is_default:
            return []
        groups = [self._group(key) for key in keys] if self._replication.grouped else []
        return [self._replication.config(self._library, groups)]

    def _ask(
        self, keys: Sequence[BlockKey], deadline_ns: int, call: Callable[[list[str], Any], list[StoreOutcome]]
    ) -> list[StoreOutcome]:
        names = self._names(keys)
        outcomes = None
        if self._clock.now_ns() < deadline_ns:
            outcomes = self._lane.call(lambda: self._link.run(len(names), partial(call, names)), deadline_ns)
        return [StoreOutcome.TIMEOUT] * len(keys) if outcomes is None else outcomes

    def _move(
        self, buffers: Sequence[Pieces], sizes_bytes: Sequence[int], deadline_ns: int, transfer: _Transfer
    ) -> list[StoreOutcome]:
        outcomes: list[StoreOutcome] = []
        for part in _parts(buffers, sizes_bytes, self._pieces_per_call, self._bytes_per_call):
            started_ns = self._clock.now_ns()
            if started_ns >= deadline_ns:
                return outcomes + [StoreOutcome.TIMEOUT] * (len(buffers) - len(outcomes))
            moved = self._link.run(part.stop - part.start, partial(transfer, part))
            outcomes += moved
            if LOST & set(moved) and self._was_silent(moved, self._clock.now_ns() - started_ns):
                return outcomes + [StoreOutcome.UNAVAILABLE] * (len(buffers) - len(outcomes))
        return outcomes

    def _was_silent(self, moved: Sequence[StoreOutcome], took_ns: int) -> bool:
        """Whether a call that lost something has waited for it, as the next one would."""
        if took_ns >= ABANDONED_NS:
            logger.error("Mooncake gave up %d transfers that may still run: its client is closed", len(moved))
            self._link.leave()
        return took_ns >= SILENCE_NS

    def _count(self, operation: str, outcomes: list[StoreOutcome]) -> list[StoreOutcome]:
        with self._counting:
            self.counts.update((operation, outcome) for outcome in outcomes)
        return outcomes


def _sizes_bytes(buffers: Sequence[Pieces]) -> list[int]:
    return [sum([size for _, size in pieces]) for pieces in buffers]


def _addresses_and_sizes(buffers: Sequence[Pieces]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in pieces] for pieces in buffers]
    return addresses, [[size for _, size in pieces] for pieces in buffers]


def _exist(names: list[str], client: Any) -> list[StoreOutcome]:
    return [_existed(code) for code in client.batch_is_exist(names)]


def _remove(names: list[str], client: Any) -> list[StoreOutcome]:
    return [_moved(code) for code in client.batch_remove(names, True)]


def _existed(code: int) -> StoreOutcome:
    if code in (0, 1):
        return StoreOutcome.OK if code else StoreOutcome.MISSING
    return _OUTCOME_OF_CODE.get(code, StoreOutcome.UNAVAILABLE)


def _moved(code: int) -> StoreOutcome:
    return StoreOutcome.OK if code == 0 else _OUTCOME_OF_CODE.get(code, StoreOutcome.UNAVAILABLE)


def _got(client: Any, names: list[str], codes: list[int], sizes_bytes: list[int]) -> list[StoreOutcome]:
    outcomes: list[StoreOutcome] = []
    for name, code, size_bytes in zip(names, codes, sizes_bytes, strict=True):
        if code >= 0:
            outcomes.append(StoreOutcome.OK if code == size_bytes else StoreOutcome.BAD_LENGTH)
        elif code == _TRANSFER_FAILED and StoreOutcome.UNAVAILABLE not in outcomes:
            # Its holder is gone, or its length is another. The master is asked once: it may be gone, too.
            stored_bytes = client.get_size(name)
            outcomes.append(StoreOutcome.BAD_LENGTH if 0 <= stored_bytes != size_bytes else StoreOutcome.UNAVAILABLE)
        else:
            outcomes.append(_OUTCOME_OF_CODE.get(code, StoreOutcome.UNAVAILABLE))
    return outcomes


def _confirmed(names: list[str], client: Any, outcomes: list[StoreOutcome]) -> list[StoreOutcome]:
    """Mooncake refuses what it read beyond a lease. Who removes by force heeds none, and a new master knows none."""
    now = _exist(names, client) if StoreOutcome.OK in outcomes else outcomes
    return [there if got is StoreOutcome.OK else got for got, there in zip(outcomes, now, strict=True)]


def _parts(buffers: Sequence[Pieces], sizes_bytes: Sequence[int], max_pieces: int, max_bytes: int) -> Iterator[slice]:
    """Consecutive slices of at most `max_pieces` pieces and `max_bytes` with padding, or of one buffer."""
    start, num_pieces, total_bytes = 0, 0, 0
    for index, (pieces, size_bytes) in enumerate(zip(buffers, sizes_bytes, strict=True)):
        padded_bytes = align_up(size_bytes, _PAGE_BYTES) + _PADDING_BYTES
        too_much = num_pieces + len(pieces) > max_pieces or total_bytes + padded_bytes > max_bytes
        if index > start and too_much:
            yield slice(start, index)
            start, num_pieces, total_bytes = index, 0, 0
        num_pieces += len(pieces)
        total_bytes += padded_bytes
    if start < len(buffers):
        yield slice(start, len(buffers))

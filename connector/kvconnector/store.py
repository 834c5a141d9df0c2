"""The pool behind `kvcore.ports.KVStore`: a client of Mooncake's store that waits for nobody.

Whatever goes wrong is an outcome. The master may be missing at the start, vanish and come back: each costs misses.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from kvconnector.config import PoolConfig
from kvconnector.lane import Lane
from kvconnector.link import LOST, ClientCall, Link, mooncake_client
from kvcore.errors import require
from kvcore.keys import BlockKey, format_key
from kvcore.ports import Clock, KVStore, StoreOutcome
from kvcore.units import NS_PER_MS, NS_PER_S

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

Pieces: TypeAlias = Sequence[tuple[int, int]]
"""(address, size in bytes) of one value's pieces, in order, all inside ranges given to `MooncakeStore.register`."""

TCP_PIECES_PER_CALL = 64
"""Mooncake's TCP transport queues 2,048 pieces for a peer; more are refused, or stuck for a minute (0.3.13)."""

PIECES_PER_CALL = 4_096

DOUBTFUL_NS = 100 * NS_PER_MS
"""What took longer to read must still be there: in less no master is started anew and gives its memory to others."""

ABANDONED_NS = 55 * NS_PER_S
"""A transfer that fails after 60 s was given up by Mooncake, whose transport may still move its bytes later."""

_Transfer: TypeAlias = Callable[[Any, list[str], Sequence[Pieces]], list[StoreOutcome]]
"""Given Mooncake's client, and the keys' names and pieces: one outcome per name."""

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
        """Let `get` and `put` use this memory; it must live as long as the store."""


class MooncakeStore:
    """A `PoolStore`. One per process and use; its methods may be called from any thread. `text` names an object.

    `exists` and `remove` return at their deadline. `get` and `put` touch the caller's memory, so each returns only when
    Mooncake is done with it: they are cut into calls, none begins after the deadline or after one that lost the pool,
    and Mooncake's own timeouts bound the one that runs. Where they cannot, the client is closed: nothing else stops it.
    """

    def __init__(
        self,
        config: PoolConfig,
        clock: Clock,
        new_client: Callable[[], Any] | None = None,
        text: Callable[[BlockKey], str] = format_key,
    ) -> None:
        self.counts: Counter[tuple[str, StoreOutcome]] = Counter()
        """Keys by operation and outcome."""
        self._clock = clock
        self._text = text
        self._pieces_per_call = TCP_PIECES_PER_CALL if config.protocol == "tcp" else PIECES_PER_CALL
        self._link = Link(config, clock, new_client or mooncake_client())
        self._lane = Lane("kvtwin-ask", clock)
        self._counting = threading.Lock()

    def join(self, deadline_ns: int) -> bool:
        """Connect now rather than with the first call, whose deadline is short; False when that did not succeed yet."""
        return bool(self._lane.call(lambda: self._link.usable_client() is not None, deadline_ns))

    def answers(self, deadline_ns: int) -> bool:
        """Whether the master answers a question; connects first where that has not succeeded yet."""
        outcomes = self._lane.call(lambda: self._link.run([_NOBODY_S_KEY], _exist), deadline_ns)
        return outcomes is not None and not LOST & set(outcomes)

    def register(self, address: int, size_bytes: int) -> None:
        """See `PoolStore`."""
        self._link.register(address, size_bytes)

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """OK for each key that a get would find now, and its lease is renewed."""
        return self._count("exists", self._ask(keys, deadline_ns, _exist))

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """Forget each key, leased or not."""

        def remove(client: Any, names: list[str]) -> list[StoreOutcome]:
            return [_moved(code) for code in client.batch_remove(names, True)]

        return self._count("remove", self._ask(keys, deadline_ns, remove))

    def remove_like(self, pattern: str) -> StoreOutcome:
        """Forget what is named like this regular expression and leased to nobody; waits for the master."""
        removed = self._link.run([pattern], lambda client, names: [_moved(min(0, client.remove_by_regex(pattern)))])
        return self._count("remove_like", removed)[0]

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Fill each key's pieces; whatever is not OK may hold any bytes afterwards."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")

        def get(client: Any, names: list[str], buffers: Sequence[Pieces]) -> list[StoreOutcome]:
            begun_ns = self._clock.now_ns()
            codes = client.batch_get_into_multi_buffers(names, *_addresses_and_sizes(buffers))
            got = _got(client, names, codes, [sum(size for _, size in pieces) for pieces in buffers])
            return got if self._clock.now_ns() - begun_ns < DOUBTFUL_NS else _confirmed(client, names, got)

        return self._count("get", self._move(keys, buffers, deadline_ns, get))

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Store each key's pieces; a key that is there already keeps its bytes and costs no transfer."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")

        def put(client: Any, names: list[str], buffers: Sequence[Pieces]) -> list[StoreOutcome]:
            return [_moved(code) for code in client.batch_put_from_multi_buffers(names, *_addresses_and_sizes(buffers))]

        return self._count("put", self._move(keys, buffers, deadline_ns, put))

    def close(self) -> None:
        """Leave the store, unless a call hangs: the client must not be taken away from under it."""
        if not self._lane.hangs:
            self._link.close()

    def _ask(self, keys: Sequence[BlockKey], deadline_ns: int, call: ClientCall) -> list[StoreOutcome]:
        names = [self._text(key) for key in keys]
        outcomes = None
        if self._clock.now_ns() < deadline_ns:
            outcomes = self._lane.call(lambda: self._link.run(names, call), deadline_ns)
        return [StoreOutcome.TIMEOUT] * len(keys) if outcomes is None else outcomes

    def _move(
        self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int, transfer: _Transfer
    ) -> list[StoreOutcome]:
        names = [self._text(key) for key in keys]
        outcomes: list[StoreOutcome] = []
        for part in _parts(buffers, self._pieces_per_call):
            if self._clock.now_ns() >= deadline_ns:
                return outcomes + [StoreOutcome.TIMEOUT] * (len(keys) - len(outcomes))
            moved = self._transfer(names[part], buffers[part], transfer)
            outcomes += moved
            if LOST & set(moved):
                return outcomes + [StoreOutcome.UNAVAILABLE] * (len(keys) - len(outcomes))
        return outcomes

    def _transfer(self, names: list[str], buffers: Sequence[Pieces], transfer: _Transfer) -> list[StoreOutcome]:
        started_ns = self._clock.now_ns()
        outcomes = self._link.run(names, lambda client, names: transfer(client, names, buffers))
        if LOST & set(outcomes) and self._clock.now_ns() - started_ns >= ABANDONED_NS:
            logger.error("Mooncake gave up %d transfers that may still run: its client is closed", len(names))
            self._link.leave()
        return outcomes

    def _count(self, operation: str, outcomes: list[StoreOutcome]) -> list[StoreOutcome]:
        with self._counting:
            self.counts.update((operation, outcome) for outcome in outcomes)
        return outcomes


_NOBODY_S_KEY = "kvtwin-probe"


def _addresses_and_sizes(buffers: Sequence[Pieces]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in pieces] for pieces in buffers]
    return addresses, [[size for _, size in pieces] for pieces in buffers]


def _exist(client: Any, names: list[str]) -> list[StoreOutcome]:
    return [_existed(code) for code in client.batch_is_exist(names)]


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


def _confirmed(client: Any, names: list[str], outcomes: list[StoreOutcome]) -> list[StoreOutcome]:
    """Mooncake refuses what it read beyond a lease. Who removes by force heeds none, and a new master knows none."""
    now = _exist(client, names) if StoreOutcome.OK in outcomes else outcomes
    return [there if got is StoreOutcome.OK else got for got, there in zip(outcomes, now, strict=True)]


def _parts(buffers: Sequence[Pieces], max_pieces: int) -> Iterator[slice]:
    """Consecutive slices of at most `max_pieces` pieces, or of one buffer."""
    start, num_pieces = 0, 0
    for index, pieces in enumerate(buffers):
        if index > start and num_pieces + len(pieces) > max_pieces:
            yield slice(start, index)
            start, num_pieces = index, 0
        num_pieces += len(pieces)
    if start < len(buffers):
        yield slice(start, len(buffers))

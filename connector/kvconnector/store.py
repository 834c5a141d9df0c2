"""The pool behind `kvcore.ports.KVStore`: a client of Mooncake's store that waits for nobody.

Whatever goes wrong is an outcome. The master may be missing at the start, vanish and come back: each costs misses.
"""

import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from kvconnector.config import PoolConfig
from kvconnector.lane import Lane
from kvcore.errors import InvalidArgument, require
from kvcore.keys import BlockKey, format_key
from kvcore.ports import Clock, KVStore, StoreOutcome
from kvcore.units import NS_PER_MS, NS_PER_S

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

Pieces: TypeAlias = Sequence[tuple[int, int]]
"""(address, size in bytes) of one value's pieces, in order, all inside ranges given to `MooncakeStore.register`."""

RETRY_NS = 500 * NS_PER_MS
"""How long an unreachable master is left alone."""

PROBE_TIMEOUT_S = 0.2

TCP_PIECES_PER_CALL = 64
"""Mooncake's TCP transport queues 2,048 pieces for a peer; more are refused, or stuck for a minute (0.3.13)."""

PIECES_PER_CALL = 4_096

ABANDONED_NS = 55 * NS_PER_S
"""A transfer that fails after 60 s was given up by Mooncake, whose transport may still move its bytes later."""

# Read by Mooncake when a client is made. `setup` holds the interpreter lock, and would retry for 90 s. A holder that
# says nothing is given up after 30 s a piece, 4 pieces at a time; with these a call on one takes 9 s.
_MOONCAKE_SETTINGS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}

_ClientCall: TypeAlias = Callable[[Any, list[str]], list[StoreOutcome]]
"""Given Mooncake's client and the keys' names: one outcome per name."""

_Transfer: TypeAlias = Callable[[Any, list[str], Sequence[Pieces]], list[StoreOutcome]]
"""The same for a call that reads or writes the keys' pieces."""

# Mooncake's error codes (mooncake-store/include/types.h); what is not here counts as unavailable.
_NO_SPACE, _BAD_PARAMETERS, _TRANSFER_FAILED, _RPC_FAILED, _RPC_TIMEOUT = -200, -600, -800, -900, -901
_OUTCOME_OF_CODE = {
    _NO_SPACE: StoreOutcome.NO_SPACE,
    _BAD_PARAMETERS: StoreOutcome.BAD_LENGTH,
    -703: StoreOutcome.MISSING,  # its writer has not finished
    -704: StoreOutcome.MISSING,
    -707: StoreOutcome.MISSING,  # the lease ran out while its bytes were read
    _RPC_TIMEOUT: StoreOutcome.TIMEOUT,
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
        self._link = _Link(config, clock, new_client or mooncake_client())
        self._lane = Lane("kvtwin-ask", clock)
        self._counting = threading.Lock()

    def join(self, deadline_ns: int) -> bool:
        """Connect now rather than with the first call, whose deadline is short; False when that did not succeed yet."""
        return bool(self._lane.call(lambda: self._link.usable_client() is not None, deadline_ns))

    def answers(self, deadline_ns: int) -> bool:
        """Whether the master answers a question; connects first where that has not succeeded yet."""
        outcomes = self._lane.call(lambda: self._link.run([_NOBODY_S_KEY], _exist), deadline_ns)
        return outcomes is not None and not _LOST & set(outcomes)

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

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Fill each key's pieces; whatever is not OK may hold any bytes afterwards."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")

        def get(client: Any, names: list[str], buffers: Sequence[Pieces]) -> list[StoreOutcome]:
            codes = client.batch_get_into_multi_buffers(names, *_addresses_and_sizes(buffers))
            return _got(client, names, codes, [sum(size for _, size in pieces) for pieces in buffers])

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

    def _ask(self, keys: Sequence[BlockKey], deadline_ns: int, call: _ClientCall) -> list[StoreOutcome]:
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
            if _LOST & set(moved):
                return outcomes + [StoreOutcome.UNAVAILABLE] * (len(keys) - len(outcomes))
        return outcomes

    def _transfer(self, names: list[str], buffers: Sequence[Pieces], transfer: _Transfer) -> list[StoreOutcome]:
        started_ns = self._clock.now_ns()
        outcomes = self._link.run(names, lambda client, names: transfer(client, names, buffers))
        if _LOST & set(outcomes) and self._clock.now_ns() - started_ns >= ABANDONED_NS:
            logger.error("Mooncake gave up %d transfers that may still run: its client is closed", len(names))
            self._link.leave()
        return outcomes

    def _count(self, operation: str, outcomes: list[StoreOutcome]) -> list[StoreOutcome]:
        with self._counting:
            self.counts.update((operation, outcome) for outcome in outcomes)
        return outcomes


class _Link:
    """The connection: made on first use, probed before use when the last call failed, made anew after `leave`."""

    def __init__(self, config: PoolConfig, clock: Clock, new_client: Callable[[], Any]) -> None:
        self._config = config
        self._clock = clock
        self._new_client = new_client
        self._lock = threading.Condition()
        self._num_calls = 0
        self._leaving = False
        self._ranges: list[tuple[int, int]] = []
        self._client: Any = None
        self._suspect = False
        self._retry_at_ns: int | None = None

    def register(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._ranges.append((address, size_bytes))
            if self._client is not None:
                self._register(self._client, address, size_bytes)

    def run(self, names: list[str], call: _ClientCall) -> list[StoreOutcome]:
        """The call's outcomes; UNAVAILABLE for every name without a master, or when the call raises."""
        if not names:
            return []
        outcomes: list[StoreOutcome] = []
        try:
            with self._calling() as client:
                if client is not None:
                    outcomes = call(client, names)
        except Exception:
            logger.exception("Mooncake call failed")
        if len(outcomes) != len(names):
            outcomes = [StoreOutcome.UNAVAILABLE] * len(names)
        if _LOST & set(outcomes):
            self._suspect = True
        return outcomes

    def leave(self) -> None:
        """Close the client when no call is in it; a segment it lent goes with it. The next call makes another one."""
        with self._lock:
            self._leaving = True
            self._lock.wait_for(lambda: not self._num_calls)
            client, self._client, self._leaving = self._client, None, False
        if client is not None:
            client.close()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            self._retry_at_ns = _NEVER_NS
        if client is not None:
            client.close()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Any | None]:
        with self._lock:
            client = self.usable_client()
            self._num_calls += 1
        try:
            yield client
        finally:
            with self._lock:
                self._num_calls -= 1
                self._lock.notify_all()

    def usable_client(self) -> Any | None:
        """Mooncake's client, or None while the master does not answer."""
        with self._lock:
            if self._leaving:
                return None
            if self._client is not None and not self._suspect:
                return self._client
            if self._retry_at_ns is not None and self._clock.now_ns() < self._retry_at_ns:
                return None
            if not _answers(self._config.master_server_address) or not self._connect():
                self._postpone()
                return None
            if self._retry_at_ns is not None:
                logger.info("Mooncake master %s answers again", self._config.master_server_address)
            self._suspect, self._retry_at_ns = False, None
            return self._client

    def _postpone(self) -> None:
        if self._retry_at_ns is None:
            logger.warning(
                "Mooncake master %s does not answer: no hits until it does", self._config.master_server_address
            )
        self._retry_at_ns = self._clock.now_ns() + RETRY_NS

    def _connect(self) -> bool:
        if self._client is not None:
            return True
        client = self._new_client()
        code = setup(client, self._config)
        if code != 0:
            logger.warning("Mooncake setup failed with code %d", code)
            return False
        self._client = client
        for address, size_bytes in self._ranges:
            self._register(client, address, size_bytes)
        return True

    def _register(self, client: Any, address: int, size_bytes: int) -> None:
        code = client.register_buffer(address, size_bytes)
        if code != 0:
            logger.error(
                "Mooncake cannot register %d bytes of KV cache (code %d): transfers will fail", size_bytes, code
            )


_LOST = {StoreOutcome.UNAVAILABLE, StoreOutcome.TIMEOUT}
_NOBODY_S_KEY = "kvtwin-probe"
_NEVER_NS = 1 << 62


def setup(client: Any, config: PoolConfig) -> int:
    """Have Mooncake's client join the store; its code, 0 when that succeeded."""
    for name, value in {**_MOONCAKE_SETTINGS, "MC_RPC_TIMEOUT_MS": str(config.rpc_timeout_ms)}.items():
        os.environ.setdefault(name, value)
    tenant = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
    code: int = client.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_bytes,
        config.local_buffer_bytes,
        config.protocol,
        config.device_name,
        config.master_server_address,
        **tenant,
    )
    return code


def mooncake_client() -> Callable[[], Any]:
    """Makes clients of Mooncake's, which have yet to join. Raises InvalidArgument where there is no Mooncake."""
    try:
        from mooncake.store import MooncakeDistributedStore  # late: it loads RDMA libraries
    except ImportError as error:
        expected = f"Mooncake, which cannot be imported ({error}): pip install 'kvtwin[connector]', and libibverbs1"
        raise InvalidArgument("kv_connector", "KVTwinConnector", expected) from error
    new_client: Callable[[], Any] = MooncakeDistributedStore
    return new_client


def _answers(address: str) -> bool:
    """Whether somebody alive serves HOST:PORT: it closes a connection that does not speak its protocol.

    Without this a call to a dead master takes 4 s, and `setup` holds the interpreter lock as long. An address of
    another form (a cluster of masters) is believed.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as connection:
            connection.sendall(bytes(64))
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True


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

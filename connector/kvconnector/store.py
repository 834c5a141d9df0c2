"""The pool behind `kvcore.ports.KVStore`: a client of Mooncake's store that waits for nobody.

Whatever goes wrong is an outcome. The master may be missing at the start, vanish and come back: each costs misses.
"""

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvconnector.config import PoolConfig
from kvconnector.lane import Lane
from kvcore.errors import require
from kvcore.keys import BlockKey, format_key
from kvcore.ports import Clock, StoreOutcome
from kvcore.units import NS_PER_MS

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

Pieces: TypeAlias = Sequence[tuple[int, int]]
"""(address, size in bytes) of one value's pieces, in order, all inside ranges given to `MooncakeStore.register`."""

RETRY_NS = 500 * NS_PER_MS
"""How long an unreachable master is left alone."""

PROBE_TIMEOUT_S = 0.2

_ClientCall: TypeAlias = Callable[[Any, list[str]], list[StoreOutcome]]
"""Given Mooncake's client and the keys' names: one outcome per name."""

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


class MooncakeStore:
    """A `KVStore[Pieces]`. One per process and use; its methods may be called from any thread.

    `exists` and `remove` return at their deadline. `get` and `put` touch the caller's memory, so a call that has begun
    returns only when Mooncake is done with it (its own timeouts bound that, see `PoolConfig.rpc_timeout_ms`).
    """

    def __init__(self, config: PoolConfig, clock: Clock, new_client: Callable[[], Any] | None = None) -> None:
        self.counts: Counter[tuple[str, StoreOutcome]] = Counter()
        """Keys by operation and outcome."""
        self._clock = clock
        self._link = _Link(config, clock, new_client or _mooncake_client)
        self._lane = Lane("kvtwin-ask", clock)
        self._counting = threading.Lock()

    def join(self, deadline_ns: int) -> bool:
        """Connect now rather than with the first call, whose deadline is short; False when that did not succeed yet."""
        return bool(self._lane.call(lambda: self._link.usable_client() is not None, deadline_ns))

    def register(self, address: int, size_bytes: int) -> None:
        """Let `get` and `put` use this memory; it must live as long as the store."""
        self._link.register(address, size_bytes)

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """OK for each key that a get would find now, and its lease is renewed."""

        def exists(client: Any, names: list[str]) -> list[StoreOutcome]:
            return [_existed(code) for code in client.batch_is_exist(names)]

        return self._count("exists", self._ask(keys, deadline_ns, exists))

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """Forget each key, leased or not."""

        def remove(client: Any, names: list[str]) -> list[StoreOutcome]:
            return [_moved(code) for code in client.batch_remove(names, True)]

        return self._count("remove", self._ask(keys, deadline_ns, remove))

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Fill each key's pieces; whatever is not OK may hold any bytes afterwards."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")
        sizes_bytes = [sum(size for _, size in pieces) for pieces in buffers]

        def get(client: Any, names: list[str]) -> list[StoreOutcome]:
            codes = client.batch_get_into_multi_buffers(names, *_addresses_and_sizes(buffers))
            return [_got(client, *each) for each in zip(names, codes, sizes_bytes, strict=True)]

        return self._count("get", self._move(keys, deadline_ns, get))

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """Store each key's pieces; a key that is there already keeps its bytes and costs no transfer."""
        require(len(keys) == len(buffers), "len(buffers)", len(buffers), f"one per key, {len(keys)}")

        def put(client: Any, names: list[str]) -> list[StoreOutcome]:
            return [_moved(code) for code in client.batch_put_from_multi_buffers(names, *_addresses_and_sizes(buffers))]

        return self._count("put", self._move(keys, deadline_ns, put))

    def close(self) -> None:
        """Leave the store, unless a call hangs: the client must not be taken away from under it."""
        if not self._lane.hangs:
            self._link.close()

    def _ask(self, keys: Sequence[BlockKey], deadline_ns: int, call: _ClientCall) -> list[StoreOutcome]:
        names = [format_key(key) for key in keys]
        outcomes = None
        if self._clock.now_ns() < deadline_ns:
            outcomes = self._lane.call(lambda: self._link.run(names, call), deadline_ns)
        return [StoreOutcome.TIMEOUT] * len(keys) if outcomes is None else outcomes

    def _move(self, keys: Sequence[BlockKey], deadline_ns: int, call: _ClientCall) -> list[StoreOutcome]:
        names = [format_key(key) for key in keys]
        if self._clock.now_ns() >= deadline_ns:
            return [StoreOutcome.TIMEOUT] * len(keys)
        return self._link.run(names, call)

    def _count(self, operation: str, outcomes: list[StoreOutcome]) -> list[StoreOutcome]:
        with self._counting:
            self.counts.update((operation, outcome) for outcome in outcomes)
        return outcomes


class _Link:
    """The connection: made on first use, probed before use when the last call failed."""

    def __init__(self, config: PoolConfig, clock: Clock, new_client: Callable[[], Any]) -> None:
        self._config = config
        self._clock = clock
        self._new_client = new_client
        self._lock = threading.Lock()
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
        try:
            client = self.usable_client()
            outcomes = call(client, names) if client is not None else []
        except Exception:
            logger.exception("Mooncake call failed")
            outcomes = []
        if len(outcomes) != len(names):
            outcomes = [StoreOutcome.UNAVAILABLE] * len(names)
        if _LOST & set(outcomes):
            self._suspect = True
        return outcomes

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            self._retry_at_ns = _NEVER_NS
        if client is not None:
            client.close()

    def usable_client(self) -> Any | None:
        """Mooncake's client, or None while the master does not answer."""
        with self._lock:
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
        config = self._config
        # Mooncake reads these once. `setup` holds the interpreter lock, and would retry for 90 s.
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(config.rpc_timeout_ms))
        client = self._new_client()
        tenant = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
        code = client.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_bytes,
            config.local_buffer_bytes,
            config.protocol,
            config.device_name,
            config.master_server_address,
            **tenant,
        )
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
_NEVER_NS = 1 << 62


def _mooncake_client() -> Any:
    from mooncake.store import MooncakeDistributedStore  # late: it loads RDMA libraries

    return MooncakeDistributedStore()


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


def _existed(code: int) -> StoreOutcome:
    if code in (0, 1):
        return StoreOutcome.OK if code else StoreOutcome.MISSING
    return _OUTCOME_OF_CODE.get(code, StoreOutcome.UNAVAILABLE)


def _moved(code: int) -> StoreOutcome:
    return StoreOutcome.OK if code == 0 else _OUTCOME_OF_CODE.get(code, StoreOutcome.UNAVAILABLE)


def _got(client: Any, name: str, code: int, size_bytes: int) -> StoreOutcome:
    if code >= 0:
        return StoreOutcome.OK if code == size_bytes else StoreOutcome.BAD_LENGTH
    if code == _TRANSFER_FAILED:  # its holder is gone, or its length is another
        stored_bytes = client.get_size(name)
        return StoreOutcome.BAD_LENGTH if 0 <= stored_bytes != size_bytes else StoreOutcome.UNAVAILABLE
    return _OUTCOME_OF_CODE.get(code, StoreOutcome.UNAVAILABLE)

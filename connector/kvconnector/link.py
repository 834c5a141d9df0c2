"""The connection to the pool: made when it is first used, probed when it failed, and made anew."""

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from kvconnector.pool_config import PoolConfig
from kvcore.errors import InvalidArgument, require
from kvcore.ports import Clock, StoreOutcome
from kvcore.units import NS_PER_MS

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

RETRY_NS = 500 * NS_PER_MS
"""How long an unreachable master is left alone."""

PROBE_TIMEOUT_S = 0.2

LOST = frozenset((StoreOutcome.UNAVAILABLE, StoreOutcome.TIMEOUT))
"""What a key ends with when nobody has answered for it."""

ClientCall: TypeAlias = Callable[[Any], list[StoreOutcome]]
"""Given Mooncake's client: one outcome per key."""

# Read by Mooncake when a client is made. `setup` holds the interpreter lock, and would retry for 90 s. A holder that
# says nothing is given up after 30 s a piece, 4 pieces at a time; with these after 3 s, 16 at a time.
_MOONCAKE_SETTINGS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}

_set: dict[str, str] = {}
"""What this process has set of them itself."""

_NEVER_NS = 1 << 62


class Link:
    """One client of Mooncake's: probed before use when the last call failed, made anew after `leave`.

    `library` is `mooncake.store`, or what stands in for it. Raises InvalidArgument for a setting that it does not know.
    """

    def __init__(self, config: PoolConfig, clock: Clock, library: Any) -> None:
        _require_known(config, library)
        self._folder = _own_folder(config.ssd_path)
        self._config = config
        self._clock = clock
        self._new_client: Callable[[], Any] = library.MooncakeDistributedStore
        self._lock = threading.Condition()
        self._num_calls = 0
        self._leaving = False
        self._ranges: list[tuple[int, int]] = []
        self._client: Any = None
        self._suspect = False
        self._retry_at_ns: int | None = None

    def register(self, address: int, size_bytes: int) -> None:
        """Let calls use this memory, now and whenever the client is made."""
        with self._lock:
            self._ranges.append((address, size_bytes))
            if self._client is not None:
                self._register(self._client, address, size_bytes)

    def unregister(self, address: int) -> None:
        """The memory that begins there is taken away: no call may use it any more."""
        with self._lock:
            self._ranges = [known for known in self._ranges if known[0] != address]
            code = 0 if self._client is None else self._client.unregister_buffer(address)
        if code != 0:
            logger.warning("Mooncake cannot unregister a KV cache (code %d)", code)

    def run(self, num_keys: int, call: ClientCall) -> list[StoreOutcome]:
        """The call's outcomes; UNAVAILABLE for each of its keys without a master, or when the call raises."""
        if not num_keys:
            return []
        outcomes: list[StoreOutcome] = []
        try:
            with self._calling() as client:
                if client is not None:
                    outcomes = call(client)
        except Exception:
            logger.exception("Mooncake call failed")
        if len(outcomes) != num_keys:
            outcomes = [StoreOutcome.UNAVAILABLE] * num_keys
        if LOST & set(outcomes):
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
        """Leave for good."""
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


def setup(client: Any, config: PoolConfig) -> int:
    """Have Mooncake's client join the store; its code, 0 when that succeeded."""
    for name, value in {**_MOONCAKE_SETTINGS, "MC_RPC_TIMEOUT_MS": str(config.rpc_timeout_ms)}.items():
        if os.environ.get(name) in (None, _set.get(name)):  # the user's own stay
            os.environ[name] = _set[name] = value
    code: int = client.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_bytes,
        config.local_buffer_bytes,
        config.protocol,
        config.device_name,
        config.master_server_address,
        **_options(config),
    )
    return code


def mooncake_library() -> Any:
    """`mooncake.store`. Raises InvalidArgument where there is no Mooncake."""
    try:
        import mooncake.store  # late: it loads RDMA libraries
    except ImportError as error:
        expected = f"Mooncake, which cannot be imported ({error}): pip install 'kvtwin[connector]', and libibverbs1"
        raise InvalidArgument("kv_connector", "KVTwinConnector", expected) from error
    return mooncake.store


def _options(config: PoolConfig) -> dict[str, object]:
    """Of `setup`, beyond what every Mooncake has."""
    options: dict[str, object] = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
    ssd = {"enable_ssd_offload": True, "ssd_offload_path": config.ssd_path}
    return options | ssd if config.ssd_path else options


def _require_known(config: PoolConfig, library: Any) -> None:
    for option, value in _options(config).items():
        expected = f"a Mooncake whose setup takes {option}, as that of 0.3.13 does: upgrade it, or leave this out"
        # A bound function's arguments are in its docstring, and nowhere else.
        require(option in library.MooncakeDistributedStore.setup.__doc__, option, value, expected)
    config.replication.require_known_to(library)


def _own_folder(path: str) -> IO[str] | None:
    """Made, and this process's as long as what is returned is open. Only the last part of it is made: a disk that is
    not mounted shall be noticed, and not be written beside.
    """
    if not path:
        return None
    try:
        Path(path).mkdir(exist_ok=True)
        mark = os.fdopen(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o600), "w")
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return mark
    except OSError as error:
        expected = f"a folder that is there, and in which each worker has its own, no other engine's ({error})"
        raise InvalidArgument("ssd_offload_path", str(Path(path).parent), expected) from error


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

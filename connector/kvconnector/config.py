"""The connector's settings, read strictly: a misspelt key is an error that names its neighbours.

A value comes from `kv_connector_extra_config`, else from Mooncake's environment variable (or ours, for what must not be
in vLLM's log), else from the JSON file that MOONCAKE_CONFIG_PATH names, else from the default.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvcore.breaker import Tolerance
from kvcore.errors import InvalidArgument, require
from kvcore.plans import DEFAULT_STORING_SHARE, PoolPolicy
from kvcore.units import NS_PER_MS

PATIENCE = PoolPolicy()
"""The defaults that simulator and connector share."""

LOOKUP_DEADLINE_MS = PATIENCE.lookup_deadline_ns // NS_PER_MS
OFFER_TTL_MS = PATIENCE.offer_ttl_ns // NS_PER_MS

CONFIG_PATH_VARIABLE = "MOONCAKE_CONFIG_PATH"

_ENVIRONMENT = {
    "master_server_address": "MOONCAKE_MASTER",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "local_hostname": "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "record_key": "KVTWIN_RECORD_KEY",
}

# Settings of vLLM's MooncakeStoreConnector that change its keys and values.
_SHARDED_STORE_KEYS = ("enable_store_tp_lcm", "prefill_tp_sizes", "store_tp_size")
_SHARDED_STORE = (
    "leave this one out: objects that engines of different tensor parallel sizes share are not supported, and those "
    "that MooncakeStoreConnector made with it are not found"
)

MIN_SECRET_BYTES = 16

EnumT = TypeVar("EnumT", bound=Enum)

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_POWER_OF_1024 = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Role(Enum):
    """vLLM's kv_role: what this engine does with the pool unless `loads` and `stores` say otherwise."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"

    @property
    def loads(self) -> bool:
        """Whether it looks up and loads."""
        return self is not Role.PRODUCER

    @property
    def stores(self) -> bool:
        """Whether it stores what it computes."""
        return self is not Role.CONSUMER


class LoadFailure(Enum):
    """vLLM's kv_load_failure_policy: what becomes of a request whose load failed."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class KeyNames(Enum):
    """Whose keys and values: the connector's own, or those of vLLM's MooncakeStoreConnector."""

    KVTWIN = "kvtwin"
    VLLM = "vllm"


class Integrity(Enum):
    """What is verified of a loaded object beside its length: nothing, or its content, against whom."""

    NONE = "none"
    CHECKSUM = "checksum"
    KEYED = "keyed"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How to join the Mooncake store; the names and meanings are Mooncake's.

    An empty `local_hostname` is replaced by the engine's own address. `rpc_timeout_ms` bounds each call to the master.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str = ""
    global_segment_bytes: int = 0
    local_buffer_bytes: int = 64 << 20
    tenant_id: str = "default"
    rpc_timeout_ms: int = 5_000

    def lookup_only(self) -> "PoolConfig":
        """The same store for a client that moves no values."""
        return replace(self, global_segment_bytes=0, local_buffer_bytes=0)


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Everything a user can set. A job that has not begun by its deadline fails without touching a block.

    `offer_ttl_ms` must stay below the master's lease (`--default_kv_lease_ttl`, 5 s unless set). `model_id` names the
    weights in the key namespace (empty: the model's path and revision); `namespace` adds fields to it. Where the key
    format is vLLM's, `cache_prefix` is all that can be added. An engine that neither loads nor stores lends memory.
    Stores in flight pin at most `max_storing_share` of the engine's blocks. `record` is where the decision log goes
    (empty: none), `record_key` a secret that makes its ids. Where `integrity` is keyed, `integrity_secret` is what all
    engines that share know. `control_file` is what switches reads and writes at run time (empty: nothing), `breaker`
    what is put up with before the pool is not asked any more.
    """

    pool: PoolConfig
    role: Role = Role.BOTH
    loads: bool = True
    stores: bool = True
    on_load_failure: LoadFailure = LoadFailure.RECOMPUTE
    lookup_deadline_ms: int = LOOKUP_DEADLINE_MS
    load_deadline_ms: int = 10_000
    store_deadline_ms: int = 30_000
    offer_ttl_ms: int = OFFER_TTL_MS
    max_storing_share: float = DEFAULT_STORING_SHARE
    model_id: str = ""
    namespace: Mapping[str, str] = field(default_factory=dict)
    key_format: KeyNames = KeyNames.KVTWIN
    cache_prefix: str = ""
    integrity: Integrity = Integrity.NONE
    integrity_secret: bytes = field(default=b"", repr=False)
    record: str = ""
    record_key: str = field(default="", repr=False)
    control_file: str = ""
    breaker: Tolerance = field(default_factory=Tolerance)


def read_config(
    extra: Mapping[str, object], kv_role: str | None, environment: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """The settings for one engine; `environment` is the process's own unless given.

    Raises InvalidArgument naming the key, its value, what was expected and, for an unknown key, its near neighbours.
    """
    environment = os.environ if environment is None else environment
    source = _Source(extra, environment)
    pool = PoolConfig(
        master_server_address=source.text("master_server_address", ""),
        metadata_server=source.text("metadata_server", "P2PHANDSHAKE"),
        protocol=source.text("protocol", "tcp").lower(),
        device_name=source.text("device_name", ""),
        local_hostname=source.text("local_hostname", ""),
        global_segment_bytes=source.size_bytes("global_segment_size", 0),
        local_buffer_bytes=source.size_bytes("local_buffer_size", 64 << 20),
        tenant_id=source.text("tenant_id", "default"),
        rpc_timeout_ms=source.count("rpc_timeout_ms", 5_000, at_least=1),
    )
    role = _choice(Role, "kv_role", kv_role)
    lookup_deadline_ms = source.count("lookup_deadline_ms", LOOKUP_DEADLINE_MS, at_least=1)
    config = ConnectorConfig(
        pool=pool,
        role=role,
        loads=source.flag("loads", default=role.loads),
        stores=source.flag("stores", default=role.stores),
        on_load_failure=source.choice("on_load_failure", LoadFailure.RECOMPUTE),
        lookup_deadline_ms=lookup_deadline_ms,
        load_deadline_ms=source.count("load_deadline_ms", 10_000, at_least=1),
        store_deadline_ms=source.count("store_deadline_ms", 30_000, at_least=1),
        offer_ttl_ms=source.count("offer_ttl_ms", OFFER_TTL_MS, at_least=1),
        max_storing_share=source.share("max_storing_share", DEFAULT_STORING_SHARE),
        model_id=source.text("model_id", ""),
        namespace=source.texts("namespace"),
        key_format=source.choice("key_format", KeyNames.KVTWIN),
        cache_prefix=source.text("cache_prefix", ""),
        integrity=source.choice("integrity", Integrity.NONE),
        integrity_secret=_secret(source.text("integrity_secret", ""), environment),
        record=source.text("record", ""),
        record_key=source.text("record_key", ""),
        control_file=source.text("control_file", ""),
        breaker=_tolerance(source, lookup_deadline_ms),
    )
    source.refuse_unknown()
    _require_place_in_keys(config)
    _require_secret(config)
    require(
        pool.master_server_address,
        "master_server_address",
        pool.master_server_address,
        "HOST:PORT of the Mooncake master, in kv_connector_extra_config, in MOONCAKE_MASTER, or in the file that "
        "MOONCAKE_CONFIG_PATH names",
    )
    return config


class _Source:
    """Where values come from; remembers which keys were asked for, which are the known ones."""

    def __init__(self, extra: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self._extra = extra
        self._environment = environment
        self._file = _read_file(environment.get(CONFIG_PATH_VARIABLE))
        self._known: set[str] = set()

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        require(isinstance(value, str), key, value, "a string")
        return str(value)

    def choice(self, key: str, default: EnumT) -> EnumT:
        return _choice(type(default), key, self._value(key, default.value))

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise InvalidArgument(key, value, "true or false")
        return value

    def texts(self, key: str) -> Mapping[str, str]:
        value = self._value(key, {})
        valid = isinstance(value, Mapping) and all(isinstance(v, str) for pair in value.items() for v in pair)
        if not isinstance(value, Mapping) or not valid:
            raise InvalidArgument(key, value, "an object of strings")
        return dict(value)

    def count(self, key: str, default: int, at_least: int) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InvalidArgument(key, value, f"an integer >= {at_least}")
        return value

    def share(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise InvalidArgument(key, value, "a number above 0, at most 1")
        return float(value)

    def size_bytes(self, key: str, default_bytes: int) -> int:
        value = self._value(key, default_bytes)
        match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
        if match is None:
            raise InvalidArgument(key, value, 'bytes, or a text such as "64MB" or "4GiB" (powers of 1024)')
        number, unit = match.groups()
        return int(float(number) * 1024 ** _POWER_OF_1024[unit.lower()])

    def refuse_unknown(self) -> None:
        for key in self._extra:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(sorted(self._known))}"
                hint = _SHARDED_STORE if key in _SHARDED_STORE_KEYS else hint
                raise InvalidArgument("kv_connector_extra_config key", key, f"a known key; {hint}")

    def _value(self, key: str, default: object) -> object:
        self._known.add(key)
        if key in self._extra:
            return self._extra[key]
        variable = _ENVIRONMENT.get(key)
        if variable is None:
            return default
        # The file is Mooncake's: only its own settings are read from it, and more may be in it.
        return self._environment.get(variable, self._file.get(key, default))


def _read_file(path: str | None) -> Mapping[str, object]:
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(CONFIG_PATH_VARIABLE, path, f"a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise InvalidArgument(CONFIG_PATH_VARIABLE, path, "a file with one JSON object")
    return content


def _tolerance(source: _Source, lookup_deadline_ms: int) -> Tolerance:
    """A pool that has been silent for as long as a lookup may take is one that does not answer."""
    probe_ms = source.count("breaker_probe_ms", 1_000, at_least=1)
    return Tolerance(
        max_failures=source.count("breaker_failures", 3, at_least=1),
        min_silence_ns=lookup_deadline_ms * NS_PER_MS,
        first_probe_ns=probe_ms * NS_PER_MS,
        max_probe_ns=source.count("breaker_max_probe_ms", max(10_000, probe_ms), at_least=probe_ms) * NS_PER_MS,
    )


def _secret(where: str, environment: Mapping[str, str]) -> bytes:
    """What is at `where`, without white space around it; empty for an empty `where`."""
    kind, _, name = where.partition(":")
    if not where:
        return b""
    if kind == "env":
        require(name in environment, "integrity_secret", where, "an environment variable that is set")
        return environment[name].strip().encode()
    if kind != "file":
        # It may be the secret itself.
        raise InvalidArgument("integrity_secret", "(not shown)", '"file:PATH" or "env:VARIABLE", never the secret')
    try:
        return Path(name).read_bytes().strip()
    except OSError as error:
        raise InvalidArgument("integrity_secret", where, f"a readable file ({error})") from error


def _require_secret(config: ConnectorConfig) -> None:
    """Whoever can guess the secret can make objects."""
    size_bytes = len(config.integrity_secret)
    if config.integrity is Integrity.KEYED:
        expected = (
            f'"file:PATH" or "env:VARIABLE" with a secret of {MIN_SECRET_BYTES} bytes or more, for integrity "keyed"'
        )
        require(size_bytes >= MIN_SECRET_BYTES, "integrity_secret", f"{size_bytes} bytes", expected)
    else:
        expected = 'nothing but with integrity "keyed"'
        require(not size_bytes, "integrity_secret", f"{size_bytes} bytes", expected)


def _require_place_in_keys(config: ConnectorConfig) -> None:
    """What is set must be in the keys, or engines that differ in it would share blocks."""
    if config.key_format is KeyNames.VLLM:
        fix = 'nothing, as keys of key_format "vllm" have no place for it: set cache_prefix'
        require(not config.model_id, "model_id", config.model_id, fix)
        require(not config.namespace, "namespace", dict(config.namespace), fix)
        unsealed = '"none" with key_format "vllm", whose objects have no place for a trailer, or key_format "kvtwin"'
        require(config.integrity is Integrity.NONE, "integrity", config.integrity.value, unsealed)
    else:
        fix = 'nothing but with key_format "vllm": set namespace'
        require(not config.cache_prefix, "cache_prefix", config.cache_prefix, fix)


def _choice(kinds: type[EnumT], key: str, value: object) -> EnumT:
    try:
        return kinds(value)
    except ValueError:
        raise InvalidArgument(key, value, f"one of {', '.join(str(kind.value) for kind in kinds)}") from None

"""Everything a user can set: with which pool, which requests use it and how, and what is seen of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvconnector.policies import Policies, read_policies
from kvconnector.pool_config import PoolConfig, read_pool, require_master
from kvconnector.settings import Settings, choice
from kvcore.breaker import Tolerance
from kvcore.errors import InvalidArgument, require
from kvcore.plans import DEFAULT_STORING_SHARE, PoolPolicy
from kvcore.units import NS_PER_MS

PATIENCE = PoolPolicy()
"""The defaults that simulator and connector share."""

LOOKUP_DEADLINE_MS = PATIENCE.lookup_deadline_ns // NS_PER_MS
OFFER_TTL_MS = PATIENCE.offer_ttl_ns // NS_PER_MS

MIN_SECRET_BYTES = 16


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
class ConnectorConfig:
    """Everything a user can set. A job that has not begun by its deadline fails without touching a block.

    `offer_ttl_ms` must stay below the master's lease (`--default_kv_lease_ttl`, 5 s unless set). `model_id` names the
    weights in the key namespace (empty: the model's path and revision); `namespace` adds fields to it. Where the key
    format is vLLM's, `cache_prefix` is all that can be added. An engine that neither loads nor stores lends memory.
    Stores in flight pin at most `max_storing_share` of the engine's blocks; `policies` say what is stored and loaded.
    `record` is where the decision log goes (empty: none), `record_key` a secret that makes its ids. Where `integrity`
    is keyed, `integrity_secret` is what all engines that share know. `control_file` is what switches reads and writes
    at run time (empty: nothing), `breaker` what is put up with before the pool is not asked any more.
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
    policies: Policies = field(default_factory=Policies)
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
    settings = Settings(extra, environment)
    role = choice(Role, "kv_role", kv_role)
    lookup_deadline_ms = settings.count("lookup_deadline_ms", LOOKUP_DEADLINE_MS, at_least=1)
    config = ConnectorConfig(
        pool=read_pool(settings),
        role=role,
        loads=settings.flag("loads", default=role.loads),
        stores=settings.flag("stores", default=role.stores),
        on_load_failure=settings.choice("on_load_failure", LoadFailure.RECOMPUTE),
        lookup_deadline_ms=lookup_deadline_ms,
        load_deadline_ms=settings.count("load_deadline_ms", 10_000, at_least=1),
        store_deadline_ms=settings.count("store_deadline_ms", 30_000, at_least=1),
        offer_ttl_ms=settings.count("offer_ttl_ms", OFFER_TTL_MS, at_least=1),
        max_storing_share=settings.share("max_storing_share", DEFAULT_STORING_SHARE),
        policies=read_policies(settings),
        model_id=settings.text("model_id", ""),
        namespace=settings.texts("namespace"),
        key_format=settings.choice("key_format", KeyNames.KVTWIN),
        cache_prefix=settings.text("cache_prefix", ""),
        integrity=settings.choice("integrity", Integrity.NONE),
        integrity_secret=_secret(settings.text("integrity_secret", ""), environment),
        record=settings.text("record", ""),
        record_key=settings.text("record_key", ""),
        control_file=settings.text("control_file", ""),
        breaker=_tolerance(settings, lookup_deadline_ms),
    )
    loads_async = settings.flag("load_async", default=True)
    settings.refuse_unknown()
    expected = "true, or nothing: vLLM takes blocks that a failed synchronous load left unwritten for hits of its own"
    require(loads_async, "load_async", loads_async, expected)
    require_master(config.pool)
    _require_place_in_keys(config)
    _require_secret(config)
    return config


def _tolerance(settings: Settings, lookup_deadline_ms: int) -> Tolerance:
    """A pool that has been silent for as long as a lookup may take is one that does not answer."""
    probe_ms = settings.count("breaker_probe_ms", 1_000, at_least=1)
    return Tolerance(
        max_failures=settings.count("breaker_failures", 3, at_least=1),
        min_silence_ns=lookup_deadline_ms * NS_PER_MS,
        first_probe_ns=probe_ms * NS_PER_MS,
        max_probe_ns=settings.count("breaker_max_probe_ms", max(10_000, probe_ms), at_least=probe_ms) * NS_PER_MS,
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

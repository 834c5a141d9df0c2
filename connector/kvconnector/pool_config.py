"""How to join the Mooncake store, and how bytes go to it; names and meanings are Mooncake's."""

from dataclasses import dataclass, field, replace
from enum import Enum

from kvconnector.replication import Replication, read_replication
from kvconnector.settings import Settings, choice
from kvcore.errors import require

EMBEDDED_SEGMENT_BYTES = 4 << 30
"""What a worker lends in mode "embedded" when nobody says how much; MooncakeStoreConnector's default."""


class Mode(Enum):
    """Who holds the objects: the engines' own workers, or processes of the store."""

    EMBEDDED = "embedded"
    STANDALONE = "standalone-store"


class MemoryPool(Enum):
    """What allocates the KV cache on a GPU: vLLM, or an allocator of Mooncake's."""

    NONE = ""
    NVLINK = "nvlink"
    BAREX = "barex"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One client of the store.

    An empty `local_hostname` is replaced by the engine's own address. `device_name` has commas between several.
    `ssd_path`: where the objects in the memory that this client lends go when it is full (empty: nowhere).
    `transfer_bytes`: what a call moves at most, unless one object is more. It must fit what holders of objects on SSD
    read into (1280 MB unless set), and the time that a lease lasts. `rpc_timeout_ms` bounds each call to the master.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str = ""
    global_segment_bytes: int = 0
    local_buffer_bytes: int = 64 << 20
    ssd_path: str = ""
    tenant_id: str = "default"
    replication: Replication = field(default_factory=Replication)
    memory_pool: MemoryPool = MemoryPool.NONE
    transfer_bytes: int = 256 << 20
    rpc_timeout_ms: int = 5_000

    def lookup_only(self) -> "PoolConfig":
        """The same store for a client that moves no values."""
        return replace(self, global_segment_bytes=0, local_buffer_bytes=0, ssd_path="")

    def of_worker(self, name: str) -> "PoolConfig":
        """The same for one of several on a host, each of which needs a folder of its own."""
        return replace(self, ssd_path=f"{self.ssd_path}/{name}") if self.ssd_path else self


def read_pool(settings: Settings) -> PoolConfig:
    """The client of each worker. Raises InvalidArgument naming the key, its value and what was expected."""
    global_segment_bytes = _segment_bytes(settings)
    return PoolConfig(
        master_server_address=settings.text("master_server_address", ""),
        metadata_server=settings.text("metadata_server", "P2PHANDSHAKE"),
        protocol=settings.text("protocol", "tcp").lower(),
        device_name=",".join(settings.names("device_name")),
        local_hostname=settings.text("local_hostname", ""),
        global_segment_bytes=global_segment_bytes,
        local_buffer_bytes=settings.size_bytes("local_buffer_size", 64 << 20),
        ssd_path=_ssd_path(settings, global_segment_bytes),
        tenant_id=settings.text("tenant_id", "default").strip() or "default",
        replication=read_replication(settings),
        memory_pool=choice(MemoryPool, "custom_mem_pool", settings.text("custom_mem_pool", "").lower()),
        transfer_bytes=settings.size_bytes("transfer_size", 256 << 20),
        rpc_timeout_ms=settings.count("rpc_timeout_ms", 5_000, at_least=1),
    )


def require_master(pool: PoolConfig) -> None:
    """Raises InvalidArgument when nobody has said where the master is."""
    expected = (
        "HOST:PORT of the Mooncake master, in kv_connector_extra_config, in MOONCAKE_MASTER, or in the file that "
        "MOONCAKE_CONFIG_PATH names"
    )
    require(pool.master_server_address, "master_server_address", pool.master_server_address, expected)


def _segment_bytes(settings: Settings) -> int:
    """Follows from the mode, if that is set, and must agree with it."""
    mode = settings.value("mode")
    if mode is None:
        return settings.size_bytes("global_segment_size", 0)
    if choice(Mode, "mode", mode) is Mode.STANDALONE:
        size_bytes = settings.size_bytes("global_segment_size", 0)
        expected = '0 with mode "standalone-store", in which others lend memory; or set mode to "embedded"'
        require(size_bytes == 0, "global_segment_size", size_bytes, expected)
        return 0
    size_bytes = settings.size_bytes("global_segment_size", EMBEDDED_SEGMENT_BYTES)
    expected = 'more than 0 with mode "embedded", in which each worker lends memory; or set mode to "standalone-store"'
    require(size_bytes > 0, "global_segment_size", size_bytes, expected)
    return size_bytes


def _ssd_path(settings: Settings, global_segment_bytes: int) -> str:
    """Empty unless wanted: Mooncake's variable for the path may be set for other reasons."""
    path = settings.text("ssd_offload_path", "").rstrip("/")
    if not settings.flag("enable_ssd_offload", default=False):
        return ""
    expected = "false where global_segment_size is 0: what others lend is theirs to offload"
    require(global_segment_bytes, "enable_ssd_offload", True, expected)
    require(path, "ssd_offload_path", path, "a folder of this host, with enable_ssd_offload")
    return path

"""The paths between the memories of a scenario: the tables `[link]` or `[network]`, and `[host]` and `[nvme]`."""

from fractions import Fraction

from kvsim.toml import Count, PositiveCount, PositiveRatio, Table


class LinkConfig(Table):
    """The path between one instance and the pool, per direction; concurrent transfers share it equally."""

    latency_us: Count = 10
    """Point-to-point latency of aiconfigurator 0.12.0 (p2p_latency of its system files)."""
    bandwidth_bytes_per_s: PositiveCount = 9_878_424_780
    """9.2 GiB/s, a vLLM instance's measured get from the Mooncake store (public notes of fork ivanium/vllm, PR 5, April
    2026). The NIC's line rate is 50e9 per H100; the bare transfer engine has reached 23.75e9 per 400 Gb/s NIC."""
    load_threads: PositiveCount | None = None
    """How many loads of an instance are under way at once, the others wait; without it as many as there are."""
    store_threads: PositiveCount | None = None
    """The same for stores."""


class NetworkConfig(Table):
    """The way from the pool piece by piece, instead of `[link]`: see docs/LINKS.md."""

    latency_us: Count = 10
    """Once per transfer. Point-to-point latency of aiconfigurator 0.12.0 (p2p_latency of its system files)."""
    nics: PositiveCount | None = None
    """NICs of an instance, whose bandwidths add up; by default one for each of its GPUs."""
    nic_bytes_per_s: PositiveCount | None = None
    """Line rate of one, per direction; by default that of the device."""
    nic_efficiency: PositiveRatio = 0.98
    """Payload in what is on the wire: 4,096 bytes in 4,178 of RoCE v2, with 14 Ethernet, 20 IPv4, 8 UDP, 12 BTH, 8 CRC
    and 20 preamble and gap. An MTU of 4,096 is the transfer engine's default."""
    nic_gpu_bytes_per_s: PositiveCount | None = None
    """Of one NIC with GPU memory, where that is less: 15e9 without PCIe relaxed ordering, which is off by default in
    the transfer engine (MC_IB_PCI_RELAXED_ORDERING=0; its guide has 15 and 47 GB/s on 400 Gb/s NICs)."""
    slice_bytes: PositiveCount = 65_536
    """The longest request to a NIC: `slice_size` of Mooncake's transfer engine. Each rides one NIC."""
    fabric_bytes_per_s: PositiveCount | None = None
    """What the switches pass between all instances together; without it they are never in the way."""
    gpudirect: bool = True
    """Whether NICs reach GPU memory; otherwise bytes are staged in host memory, chunk by chunk."""
    staging_chunk_bytes: PositiveCount = 524_288
    """UCX_RNDV_FRAG_SIZE of host memory, UCX's default. The last chunk goes its second half of the way alone."""
    object_ns: Count = 1_000
    """Time of the thread that asks where an object lies: what one key more costs in `pool.lookup_per_key_ns`."""
    request_ns: Count = 322
    """Time of a rank's thread to post one request, while others move: 207,360 took 66.9 ms (Mooncake's tebench guide,
    4.4)."""
    pieces_per_block: PositiveCount | None = None
    """Contiguous pieces of a rank's GPU memory that a block lies in; by default one for each layer. A request each."""
    load_threads: PositiveCount = 1
    """Of an instance, each with one load at a time (ranks work side by side): VLLM_MOONCAKE_LOAD_RECV_THREADS."""
    store_threads: PositiveCount = 1
    """vLLM's store connector has one sending thread."""


class HostConfig(Table):
    """An instance's own host memory, and the link between it and the GPUs."""

    cpu_bytes_to_use: Count = 0
    """Of its private cache, alone or in front of the pool: as in vLLM's OffloadingConnector, least recently used goes.
    0: there is none."""
    keeps_loaded: bool = True
    """Whether what was loaded from the pool is kept there too, as LMCache's local CPU backend does; otherwise only what
    the instance stores."""
    latency_us: Count = 10
    """Once per transfer that goes no farther; the point-to-point latency of aiconfigurator 0.12.0."""
    link_bytes_per_s: PositiveCount | None = None
    """Of one GPU, per direction; by default that of the device. Those of an instance's GPUs add up."""
    link_efficiency: PositiveRatio = 0.91
    """Payload in what is on the link: 256 bytes in a packet of 280 (PCIe; Intel's AN 708: 20 to 28 bytes around it)."""


class DriveConfig(Table):
    """NVMe drives of an instance, of which any may serve any transfer; reads and writes share their time."""

    drives: PositiveCount = 1
    read_bytes_per_s: PositiveCount = 7_000_000_000
    """Of one drive: Samsung PM1733, as in the benchmark of Mooncake's SSD offload."""
    write_bytes_per_s: PositiveCount = 3_800_000_000
    """The same drive (announcement of PM1733 and PM1735, September 2019)."""
    read_iops: PositiveCount = 1_450_000
    """The same announcement: commands per second of one drive, when they are short."""
    write_iops: PositiveCount = 260_000
    command_bytes: PositiveCount = 131_072
    """The longest command: a longer piece takes several. Linux's `max_sectors_kb` of an NVMe drive is at least this."""


def share_of(bytes_per_s: int, share: float) -> int:
    """The decimal the user wrote, exactly; at least 1."""
    return max(1, int(bytes_per_s * Fraction(str(share))))

"""The link model beside published measurements: every constant is sourced, none is fitted to what it is compared with.

`link_points()` computes all of them, each by moving its bytes over simulated links. docs/LINKS.md discusses them.
"""

from dataclasses import dataclass

from kvsim.clock import PS_PER_S, PS_PER_US, Clock, nothing
from kvsim.config.links import HostConfig, LinkConfig, NetworkConfig
from kvsim.links.fair_link import FairLink
from kvsim.links.machines import Hardware, network_paths
from kvsim.links.parcel import HOST, Parcel, Site, Tier

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """One published number and the model's answer, in the same `unit` ("GB/s", "GiB/s" or "s")."""

    name: str
    unit: str
    measured: float
    modelled: float
    source: str

    @property
    def ratio(self) -> float:
        """Modelled over measured."""
        return self.modelled / self.measured


def link_points() -> tuple[LinkPoint, ...]:
    """Every point of the document, in its order; takes some milliseconds."""
    return (*_wires(), *_transfer_engine(), *_mooncake_connector(), *_host_and_store())


# --- wires ------------------------------------------------------------------------------------------------------------


def _wires() -> tuple[LinkPoint, ...]:
    nic = _rate(NetworkConfig(nics=1, nic_bytes_per_s=NIC_400G, request_ns=0), WIDE_HOST, BULK)
    host = _rate(NetworkConfig(request_ns=0), HostConfig(link_bytes_per_s=PCIE_5), BULK, HOST)
    return (
        LinkPoint("one 400 Gb/s NIC", "GB/s", 47.0, nic / 1e9, "Mooncake, guide to GPUDirect RDMA bandwidth"),
        LinkPoint("host to GPU, PCIe 5.0 x16, H20", "GB/s", 54.4, host / 1e9, H20),
        LinkPoint("host to GPU, PCIe 5.0 x16", "GB/s", 55.63, host / 1e9, "NVIDIA's blog on nvbandwidth"),
    )


H20 = "gahow/agentic-kvc, exp_a_tier_latency, May 2026: one H20, Qwen3-Coder-30B-A3B, vLLM 0.18.1"
FAR = Site(Tier.REMOTE, 1)
NIC_200G, NIC_400G, PCIE_5 = 25_000_000_000, 50_000_000_000, 64_000_000_000
WIDE_HOST = HostConfig(link_bytes_per_s=10**15)
"""Memory to memory: no GPU on the way."""
BULK = Parcel(40_000_000_000, 1, 1)
"""The 40 GB of Mooncake's benchmark."""


def _transfer_engine() -> tuple[LinkPoint, ...]:
    """By one thread; the benchmark has 12 unless told otherwise, whose posting is no bound."""
    four = _rate(NetworkConfig(nics=4, nic_bytes_per_s=NIC_200G), WIDE_HOST, BULK)
    eight = NetworkConfig(nics=8, nic_bytes_per_s=NIC_400G)
    one, twelve = (_rate(eight, WIDE_HOST, BULK, num_ranks=ranks) for ranks in (1, 12))
    source = "Mooncake's README, transfer engine, 40 GB"
    return (
        LinkPoint("transfer engine, 4 x 200 Gb/s", "GB/s", 87.0, four / 1e9, source),
        LinkPoint("transfer engine, 8 x 400 Gb/s, one thread posts", "GB/s", 190.0, one / 1e9, source),
        LinkPoint("transfer engine, 8 x 400 Gb/s, twelve post", "GB/s", 190.0, twelve / 1e9, source),
    )


# --- prefill to decode, Qwen3-8B on 8 H800 ----------------------------------------------------------------------------

CONNECTOR_POINTS = (
    (128, 36.53),
    (256, 60.78),
    (512, 78.73),
    (1_024, 95.23),
    (2_048, 112.88),
    (4_096, 119.00),
    (8_192, 127.57),
    (16_384, 137.09),
    (32_768, 142.25),
)
"""(prompt tokens, GiB/s); the source says GB, and its sizes and times give GiB."""
QWEN3_8B_LAYERS, QWEN3_8B_BLOCK_BYTES = 36, 16 * 147_456
"""Blocks of 16 tokens; K and V of a layer are two pieces, as FlashAttention keeps them."""


def _mooncake_connector() -> list[LinkPoint]:
    """Neighbouring blocks are one piece at best, and each for itself at worst; the source does not say which."""
    network = NetworkConfig(nics=8, nic_bytes_per_s=NIC_200G)
    points = []
    for name, joined in (("joined", True), ("single", False)):
        for num_tokens, measured in CONNECTOR_POINTS:
            blocks = num_tokens // 16
            pieces = 2 * QWEN3_8B_LAYERS * (1 if joined else blocks)
            parcel = Parcel(blocks * QWEN3_8B_BLOCK_BYTES, 0, pieces)
            modelled = _rate(network, HostConfig(link_bytes_per_s=PCIE_5), parcel, num_ranks=8) / GIB
            label = f"MooncakeConnector, 8 H800, {num_tokens:,} tokens, blocks {name}"
            points.append(LinkPoint(label, "GiB/s", measured, modelled, "Mooncake, vLLM PD performance"))
    return points


# --- from host memory and from the pool -------------------------------------------------------------------------------

H20_TOKENS, H20_BLOCK_TOKENS = 65_536, 16
H20_BYTES, H20_LAYERS = H20_TOKENS * 96 * 1024, 48
"""Qwen3-Coder-30B-A3B."""
H20_GPU_HIT_S = 0.111
"""Its time to the first token with all of 64k tokens in the GPU: what the others have beside the transfer."""
FAST = NetworkConfig(nic_bytes_per_s=NIC_400G)
STRICT = NetworkConfig(nic_bytes_per_s=NIC_400G, nic_gpu_bytes_per_s=15_000_000_000)
KIMI_TOKEN_BYTES, KIMI_LAYERS = 35_136, 61


def _host_and_store() -> tuple[LinkPoint, ...]:
    h20 = Parcel(H20_BYTES, H20_TOKENS // H20_BLOCK_TOKENS, H20_LAYERS * H20_TOKENS // H20_BLOCK_TOKENS)
    host_s = H20_BYTES / _rate(NetworkConfig(), HostConfig(link_bytes_per_s=PCIE_5), h20, HOST)
    store_s, strict_s = (
        H20_BYTES / _rate(config, HostConfig(link_bytes_per_s=PCIE_5), h20) for config in (FAST, STRICT)
    )
    measured_s = H20_BYTES / _link_rate(H20_BYTES)
    kimi = Parcel(70_016 * KIMI_TOKEN_BYTES, 1_094, 1_094 * KIMI_LAYERS)
    get = _rate(NetworkConfig(nic_bytes_per_s=2 * NIC_400G), WIDE_HOST, kimi)
    strict = _rate(NetworkConfig(nic_bytes_per_s=2 * NIC_400G, nic_gpu_bytes_per_s=15_000_000_000), WIDE_HOST, kimi)
    notes = "ivanium/vllm, PR 5: notes of April 2026"
    return (
        LinkPoint("64k tokens from host memory, TTFT", "s", 0.272, H20_GPU_HIT_S + host_s, H20),
        LinkPoint("64k tokens from a store, TTFT, [network]", "s", 0.97, H20_GPU_HIT_S + store_s, H20),
        LinkPoint("64k tokens from a store, TTFT, strict PCIe order", "s", 0.97, H20_GPU_HIT_S + strict_s, H20),
        LinkPoint("64k tokens from a store, TTFT, [link]", "s", 0.97, H20_GPU_HIT_S + measured_s, H20),
        LinkPoint("pool get, GB200, [network]", "GiB/s", 9.2, get / GIB, notes),
        LinkPoint("pool get, GB200, strict PCIe order", "GiB/s", 9.2, strict / GIB, notes),
    )


# --- moving -----------------------------------------------------------------------------------------------------------


def _rate(network: NetworkConfig, host: HostConfig, parcel: Parcel, site: Site = FAR, num_ranks: int = 1) -> float:
    """Bytes per second of one transfer from `site`, its thread's work included."""
    clock = Clock()
    path = network_paths(clock, Hardware(2, num_ranks, num_ranks, NIC_400G, PCIE_5), network, host)[0]
    thread_ps = path.thread_ps(site, parcel)
    path.fetch(site, parcel, nothing)
    clock.run()
    return parcel.size_bytes * PS_PER_S / (thread_ps + clock.now_ps)


def _link_rate(size_bytes: int) -> float:
    """The same over `[link]` as it is by default."""
    clock, config = Clock(), LinkConfig()
    FairLink(clock, config.latency_us * PS_PER_US, config.bandwidth_bytes_per_s).transfer(size_bytes, nothing)
    clock.run()
    return size_bytes * PS_PER_S / clock.now_ps

"""The paths between the memories of a scenario: the table `[link]`."""

from kvsim.toml import Count, PositiveCount, Table


class LinkConfig(Table):
    """The path between one instance and the pool, per direction; concurrent transfers share it equally."""

    latency_us: Count = 10
    """Point-to-point latency of aiconfigurator 0.12.0 (p2p_latency of its system files)."""
    bandwidth_bytes_per_s: PositiveCount = 9_878_424_780
    """9.2 GiB/s, a vLLM instance's measured get from the Mooncake store (public notes of fork ivanium/vllm, PR 5, April
    2026). The NIC's line rate is 50e9 per H100; the bare transfer engine has reached 23.75e9 per 400 Gb/s NIC."""

"""What carries the bytes of a scenario: its instances' paths and threads, and what they cost who is alone on them."""

from kvcore.units import NS_PER_S, div_ceil
from kvsim.clock import PS_PER_NS, PS_PER_S, PS_PER_US, Clock
from kvsim.config.links import DriveConfig, LinkConfig, NetworkConfig
from kvsim.links.drive import Drive
from kvsim.links.fair_link import FairLink
from kvsim.links.machines import Hardware, host_bytes_per_s, make_drive, network_paths, rates
from kvsim.links.parcel import LOCAL, POOL, Packing, Parcel, Site, num_requests
from kvsim.links.paths import HostPath, LinkPath, Path
from kvsim.links.threads import IoThreads
from kvsim.scenario import Scenario


def make_paths(scenario: Scenario, clock: Clock) -> tuple[Path, ...]:
    """One for each instance."""
    nvme = _nvme(scenario)
    if scenario.network is not None:
        return network_paths(clock, hardware(scenario), scenario.network, scenario.host, nvme)
    indices = range(scenario.cluster.instances)
    if scenario.link is None:
        return tuple(_host_path(scenario, clock) for _ in indices)
    drives = () if nvme is None else tuple(make_drive(clock, nvme) for _ in indices)
    return tuple(_link_path(scenario, scenario.link, clock, drives, index) for index in indices)


def make_threads(scenario: Scenario, clock: Clock) -> tuple[IoThreads, IoThreads]:
    """Those of one instance that load, and those that store."""
    config, num_ranks = scenario.link or scenario.network, scenario.engine.data_parallel_size

    def threads(of_a_rank: int | None) -> IoThreads:
        return IoThreads(clock, None if of_a_rank is None else of_a_rank * num_ranks)

    if config is None:
        return threads(None), threads(None)
    return threads(config.load_threads), threads(config.store_threads)


def hardware(scenario: Scenario) -> Hardware:
    """What the scenario's instances have where its tables do not say otherwise."""
    line, host, engine = scenario.gpu.network, scenario.gpu.host, scenario.engine
    return Hardware(
        scenario.cluster.instances,
        engine.num_gpus,
        engine.tensor_parallel_size,
        line.nic_bytes_per_s,
        line.pcie_bytes_per_s if host is None else host.c2c_bytes_per_s // host.gpus_per_cpu,
    )


def put_sites(scenario: Scenario) -> tuple[tuple[Site, int], ...]:
    """Where stores of an instance go, and their weights: to all segments alike, or to its own, as if it had room."""
    pool, num_others = scenario.pool, scenario.cluster.instances - 1
    if pool is None:
        return ()
    if scenario.network is None:
        return ((POOL, 1),)
    own_first = pool.preferred_segment == "own" or pool.allocation_strategy == "local_first"
    return ((LOCAL, 1),) if own_first or not num_others else ((LOCAL, 1), (POOL, num_others))


def asks_where(scenario: Scenario) -> bool:
    """Whether it matters where in the pool something lies."""
    return scenario.network is not None or _nvme(scenario) is not None


def packing(scenario: Scenario) -> Packing:
    """What blocks weigh. Over `[link]` replicas are moved once, for its bandwidth was measured with what was loaded."""
    groups, network = scenario.kv_groups, scenario.network
    if network is None:
        return Packing(scenario.block_bytes, (1,) * len(groups), (1,) * len(groups))
    pieces = tuple(network.pieces_per_block or group.num_layers for group in groups)
    num_ranks = scenario.engine.tensor_parallel_size
    return Packing(scenario.block_bytes, pieces, tuple(num_ranks // group.num_shards for group in groups))


# --- alone on the way: what decisions go by ---------------------------------------------------------------------------


def alone_latency_ns(scenario: Scenario) -> int:
    """What a load from the pool (without one: from host memory) takes once, beside its blocks."""
    return (scenario.link or scenario.network or scenario.host).latency_us * PS_PER_US // PS_PER_NS


def alone_block_ns(scenario: Scenario, group: int) -> int:
    """What a block of the group more takes, in a load of many."""
    looking_up_ns = 0 if scenario.network is None else scenario.network.object_ns
    size_bytes = _block(scenario, group).size_bytes
    return looking_up_ns + div_ceil(size_bytes * NS_PER_S, alone_bytes_per_s(scenario, group))


def alone_bytes_per_s(scenario: Scenario, group: int = 0) -> int:
    """What a load of many blocks of the group gets: the narrowest of what it crosses, or as fast as it is posted."""
    network = scenario.network
    if network is None:
        own = host_bytes_per_s(hardware(scenario), scenario.host)
        return own if scenario.link is None else scenario.link.bandwidth_bytes_per_s
    each, engine = rates(hardware(scenario), network, scenario.host), scenario.engine
    own = min(each.nics, each.host) * engine.tensor_parallel_size // engine.num_gpus
    passes = [own, network.fabric_bytes_per_s, _posted_bytes_per_s(scenario, network, group)]
    return max(1, min(rate for rate in passes if rate is not None))


def _posted_bytes_per_s(scenario: Scenario, network: NetworkConfig, group: int) -> int | None:
    block, num_ranks = _block(scenario, group), scenario.engine.tensor_parallel_size
    posting_ps = num_requests(block, network.slice_bytes, num_ranks) * network.request_ns * PS_PER_NS
    return max(1, block.size_bytes * PS_PER_S // posting_ps) if posting_ps else None


def _nvme(scenario: Scenario) -> DriveConfig | None:
    """The drives, if the pool has a disk."""
    if scenario.pool is None or not scenario.pool.enable_offload:
        return None
    return DriveConfig() if scenario.nvme is None else scenario.nvme


def _block(scenario: Scenario, group: int) -> Parcel:
    """One of the group."""
    return packing(scenario).loaded(tuple(((0, int(index == group)),) for index in range(len(scenario.kv_groups))))


def _link_path(scenario: Scenario, link: LinkConfig, clock: Clock, drives: tuple[Drive, ...], index: int) -> LinkPath:
    def to_pool() -> FairLink:
        return FairLink(clock, link.latency_us * PS_PER_US, link.bandwidth_bytes_per_s)

    host = _host_path(scenario, clock) if scenario.host.cpu_bytes_to_use else None
    return LinkPath(to_pool(), to_pool(), host, drives, index)


def _host_path(scenario: Scenario, clock: Clock) -> HostPath:
    latency_ps, rate = scenario.host.latency_us * PS_PER_US, host_bytes_per_s(hardware(scenario), scenario.host)
    return HostPath(FairLink(clock, latency_ps, rate), FairLink(clock, latency_ps, rate))

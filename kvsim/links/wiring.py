"""What carries the bytes of a scenario: its instances' paths and threads, as `[link]` or `[network]` and others say."""

from kvcore.units import NS_PER_S, div_ceil
from kvsim.clock import PS_PER_NS, PS_PER_US, Clock
from kvsim.config.links import DriveConfig, LinkConfig, NetworkConfig, share_of
from kvsim.links.drive import Drive, Speed
from kvsim.links.fair_link import FairLink
from kvsim.links.network import Link, Network, Route
from kvsim.links.parcel import Packing
from kvsim.links.paths import Costs, LinkPath, NetworkPath, Node, Path
from kvsim.links.threads import IoThreads
from kvsim.scenario import Scenario


def make_paths(scenario: Scenario, clock: Clock) -> tuple[Path, ...]:
    """One for each instance of a scenario with a pool."""
    if scenario.network is None:
        assert scenario.link is not None
        return tuple(_link_path(scenario, scenario.link, clock) for _ in range(scenario.cluster.instances))
    return _network_paths(scenario, scenario.network, clock)


def make_threads(scenario: Scenario, clock: Clock) -> tuple[IoThreads, IoThreads]:
    """Those of one instance that load, and those that store."""
    config = scenario.link or scenario.network
    assert config is not None
    return IoThreads(clock, config.load_threads), IoThreads(clock, config.store_threads)


def packing(scenario: Scenario) -> Packing:
    """What blocks weigh, and how many pieces they are."""
    pieces = None if scenario.network is None else scenario.network.pieces_per_block
    groups = scenario.kv_groups
    return Packing(scenario.block_bytes, tuple(pieces or group.num_layers * group.num_shards for group in groups))


def alone_bytes_per_s(scenario: Scenario) -> int:
    """What a long transfer from the pool gets when it is alone: the narrowest of what it crosses."""
    network = scenario.network
    if network is None:
        assert scenario.link is not None
        return scenario.link.bandwidth_bytes_per_s
    on_the_way = [_nics(scenario, network) * _nic_rate(scenario, network), _host_rate(scenario)]
    return min(on_the_way if network.fabric_bytes_per_s is None else [*on_the_way, network.fabric_bytes_per_s])


def alone_latency_ns(scenario: Scenario) -> int:
    """What it takes beyond that, once."""
    config = scenario.link or scenario.network
    assert config is not None
    return config.latency_us * PS_PER_US // PS_PER_NS


def alone_block_ns(scenario: Scenario, group: int) -> int:
    """A block of the group among many: its bytes, and the time of the thread that moves it."""
    block_bytes = packing(scenario).block_bytes[group]
    return div_ceil(block_bytes * NS_PER_S, alone_bytes_per_s(scenario)) + _thread_ns(scenario, group)


def _thread_ns(scenario: Scenario, group: int) -> int:
    network = scenario.network
    if network is None:
        return 0
    packed = packing(scenario)
    slices = packed.block_pieces[group] * div_ceil(
        div_ceil(packed.block_bytes[group], packed.block_pieces[group]), network.slice_bytes
    )
    return network.object_ns + network.request_ns * slices


def _link_path(scenario: Scenario, link: LinkConfig, clock: Clock) -> LinkPath:
    host_latency_ps, host_rate = scenario.host.latency_us * PS_PER_US, _host_rate(scenario)

    def to_pool() -> FairLink:
        return FairLink(clock, link.latency_us * PS_PER_US, link.bandwidth_bytes_per_s)

    def to_host() -> FairLink:
        return FairLink(clock, host_latency_ps, host_rate)

    return LinkPath(to_pool(), to_pool(), to_host(), to_host())


def _network_paths(scenario: Scenario, config: NetworkConfig, clock: Clock) -> tuple[NetworkPath, ...]:
    network, indices = Network(clock), range(scenario.cluster.instances)
    nodes = tuple(_node(scenario, config, clock, index) for index in indices)
    switches = config.fabric_bytes_per_s
    fabric: Route = () if switches is None else (Link("switches", switches),)
    costs = _costs(scenario, config)
    return tuple(NetworkPath(clock, network, nodes, index, fabric, costs) for index in indices)


def _node(scenario: Scenario, config: NetworkConfig, clock: Clock, index: int) -> Node:
    nic_rate, host_rate = _nics(scenario, config) * _nic_rate(scenario, config), _host_rate(scenario)
    drive = None if scenario.nvme is None else make_drive(scenario.nvme, clock)
    return Node(
        Link(f"nics into {index}", nic_rate),
        Link(f"nics out of {index}", nic_rate),
        Link(f"host to gpu {index}", host_rate),
        Link(f"gpu to host {index}", host_rate),
        drive,
    )


def make_drive(config: DriveConfig, clock: Clock) -> Drive:
    """The drives of one instance."""
    reading = Speed(config.read_bytes_per_s, config.read_iops, config.command_bytes)
    writing = Speed(config.write_bytes_per_s, config.write_iops, config.command_bytes)
    return Drive(clock, config.drives, reading, writing)


def _costs(scenario: Scenario, config: NetworkConfig) -> Costs:
    return Costs(
        latency_ps=config.latency_us * PS_PER_US,
        host_latency_ps=scenario.host.latency_us * PS_PER_US,
        object_ps=config.object_ns * PS_PER_NS,
        request_ps=config.request_ns * PS_PER_NS,
        slice_bytes=config.slice_bytes,
        rail_bytes_per_s=_nic_rate(scenario, config),
        num_rails=_nics(scenario, config),
        staging_chunk_bytes=None if config.gpudirect else config.staging_chunk_bytes,
    )


def _nics(scenario: Scenario, config: NetworkConfig) -> int:
    return scenario.engine.num_gpus if config.nics is None else config.nics


def _nic_rate(scenario: Scenario, config: NetworkConfig) -> int:
    return config.nic_rate(scenario.gpu.network.nic_bytes_per_s)


def _host_rate(scenario: Scenario) -> int:
    host = scenario.host
    line_rate = scenario.gpu.network.pcie_bytes_per_s if host.link_bytes_per_s is None else host.link_bytes_per_s
    return scenario.engine.num_gpus * share_of(line_rate, host.link_efficiency)

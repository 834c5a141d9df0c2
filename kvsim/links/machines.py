"""Instances as links: what `[network]`, `[host]` and `[nvme]` make of a machine."""

from typing import NamedTuple

from kvsim.clock import PS_PER_NS, PS_PER_US, Clock
from kvsim.config.links import DriveConfig, HostConfig, NetworkConfig, share_of
from kvsim.links.drive import Drive, Speed
from kvsim.links.network import Link, Network, Route
from kvsim.links.paths import Between, Costs, NetworkPath, Node


class Hardware(NamedTuple):
    """Instances alike; line rates are of one GPU's NIC and host link, per direction, where no table says others."""

    num_instances: int
    num_gpus: int
    num_ranks: int
    """GPUs that hold a request: of a data-parallel instance only some."""
    nic_bytes_per_s: int
    host_bytes_per_s: int


class Rates(NamedTuple):
    """Payload per second of one instance, per direction."""

    nic: int
    """Of one of its NICs."""
    nics: int
    host: int


def rates(hardware: Hardware, network: NetworkConfig, host: HostConfig) -> Rates:
    """What the links carry."""
    line_rate = hardware.nic_bytes_per_s if network.nic_bytes_per_s is None else network.nic_bytes_per_s
    nic = share_of(line_rate, network.nic_efficiency)
    if network.gpudirect and network.nic_gpu_bytes_per_s is not None:
        nic = min(nic, network.nic_gpu_bytes_per_s)
    return Rates(nic, nic * num_nics(hardware, network), host_bytes_per_s(hardware, host))


def num_nics(hardware: Hardware, network: NetworkConfig) -> int:
    """Of one instance."""
    return hardware.num_gpus if network.nics is None else network.nics


def host_bytes_per_s(hardware: Hardware, host: HostConfig) -> int:
    """Payload between an instance's host memory and all its GPUs, per direction."""
    line_rate = hardware.host_bytes_per_s if host.link_bytes_per_s is None else host.link_bytes_per_s
    return hardware.num_gpus * share_of(line_rate, host.link_efficiency)


def network_paths(
    clock: Clock, hardware: Hardware, network: NetworkConfig, host: HostConfig, nvme: DriveConfig | None = None
) -> tuple[NetworkPath, ...]:
    """The path of each instance; they share one network."""
    shared, indices = Network(clock), range(hardware.num_instances)
    each = rates(hardware, network, host)
    nodes = tuple(_node(index, each, None if nvme is None else make_drive(clock, nvme)) for index in indices)
    switches = network.fabric_bytes_per_s
    fabric: Route = () if switches is None else (Link("switches", switches),)
    total = each.nics * hardware.num_instances
    between = Between(Link("NICs into all", total), Link("NICs out of all", total), fabric)
    costs = Costs(
        latency_ps=network.latency_us * PS_PER_US,
        host_latency_ps=host.latency_us * PS_PER_US,
        object_ps=network.object_ns * PS_PER_NS,
        request_ps=network.request_ns * PS_PER_NS,
        num_ranks=hardware.num_ranks,
        num_gpus=hardware.num_gpus,
        slice_bytes=network.slice_bytes,
        rail_bytes_per_s=each.nic,
        num_rails=num_nics(hardware, network),
        staging_chunk_bytes=None if network.gpudirect else network.staging_chunk_bytes,
    )
    return tuple(NetworkPath(clock, shared, nodes, index, between, costs) for index in indices)


def make_drive(clock: Clock, config: DriveConfig) -> Drive:
    """The drives of one instance."""
    reading = Speed(config.read_bytes_per_s, config.read_iops, config.command_bytes)
    writing = Speed(config.write_bytes_per_s, config.write_iops, config.command_bytes)
    return Drive(clock, config.drives, reading, writing)


def _node(index: int, each: Rates, drive: Drive | None) -> Node:
    return Node(
        Link(f"NICs into {index}", each.nics),
        Link(f"NICs out of {index}", each.nics),
        Link(f"host to GPU {index}", each.host),
        Link(f"GPU to host {index}", each.host),
        drive,
    )

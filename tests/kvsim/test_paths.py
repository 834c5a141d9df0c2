"""What a transfer takes: every cost by itself, from the tables of a scenario to the picosecond of its end."""

from types import SimpleNamespace

import pytest

from kvcore.spec import FullAttention
from kvsim.clock import PS_PER_NS, PS_PER_S, PS_PER_US, Clock
from kvsim.config.links import HostConfig, LinkConfig, NetworkConfig
from kvsim.links.drive import Drive, Speed
from kvsim.links.machines import Hardware, network_paths
from kvsim.links.parcel import HOST, POOL, Packing, Parcel, Site, Tier, divided, num_requests
from kvsim.links.threads import IoThreads
from kvsim.links.wiring import (
    alone_block_ns,
    alone_bytes_per_s,
    alone_latency_ns,
    hardware,
    make_paths,
    make_threads,
    packing,
)
from kvsim.llm.groups import KVGroup
from kvsim.scenario import load

GB = 10**9
BARE = {
    "network.latency_us": 0,
    "network.nics": 4,
    "network.nic_bytes_per_s": 10 * GB,
    "network.nic_efficiency": 1.0,
    "network.object_ns": 0,
    "network.request_ns": 0,
    "host.latency_us": 0,
    "host.link_bytes_per_s": 100 * GB,
    "host.link_efficiency": 1.0,
    "cluster.instances": 3,
}
"""A network in which everything but bandwidth is free: 40 GB/s of NICs, 100 GB/s to the host."""
TABLES = """
[scenario]
name = "network"
description = ""
[model]
name = "llama-3.1-8b"
[device]
name = "h100-sxm"
[cluster]
instances = 1
[pool]
segment_bytes_per_instance = 64e9
[network]
[workload]
generator = "agentic"
sessions = 6
turns = 4
common_len = 1_000
first_len = 2_000
turn_len = 512
output_len = 64
delay_s = 0.0
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "network.toml"
    path.write_text(TABLES)
    return lambda **settings: load(str(path), [f"{key}={value}" for key, value in settings.items()])


def bare(scenario, **settings):
    return scenario(**BARE | {key.replace("__", "."): value for key, value in settings.items()})


def ends(config, *moves):
    """End in ps of each (instance, "fetch" or "send", site, parcel), all begun at once."""
    clock = Clock()
    return ends_on(clock, make_paths(config, clock), *moves)


def ends_on(clock, paths, *moves):
    found = {}
    for number, (instance, direction, site, parcel) in enumerate(moves):
        done = lambda number=number: found.setdefault(number, clock.now_ps)  # noqa: E731
        getattr(paths[instance], direction)(site, parcel, done)
    clock.run()
    for path in paths:
        for _, link in path.links():
            link.audit()
            assert link.moved_bytes == link.entered_bytes
    return [found[number] for number in range(len(moves))]


def gigabyte(pieces=1_000_000):
    return Parcel(GB, 100, pieces)


def test_the_narrowest_of_what_is_crossed_says_how_long_it_takes(scenario):
    assert ends(bare(scenario), (0, "fetch", POOL, gigabyte())) == [PS_PER_S // 40]
    assert ends(bare(scenario, host__link_bytes_per_s=20 * GB), (0, "send", POOL, gigabyte())) == [PS_PER_S // 20]
    assert ends(bare(scenario, network__fabric_bytes_per_s=5 * GB), (0, "send", POOL, gigabyte())) == [PS_PER_S // 5]


def test_what_is_in_the_own_host_memory_crosses_no_nic(scenario):
    for site in (HOST, Site(Tier.LOCAL, 0), Site(Tier.REMOTE, 0)):
        assert ends(bare(scenario), (0, "fetch", site, gigabyte())) == [PS_PER_S // 100], site


def test_a_parcel_is_divided_without_a_rest():
    assert divided(Parcel(10, 3, 7), (1, 1, 1)) == [Parcel(3, 1, 2), Parcel(3, 1, 2), Parcel(4, 1, 3)]
    assert divided(Parcel(10, 3, 7), (0, 5)) == [Parcel(0, 0, 0), Parcel(10, 3, 7)]


def test_what_is_spread_over_all_others_shares_all_their_nics(scenario):
    """Which are enough for all that fetch, or that store; who does both at once gets half of each."""
    fetch, send = ([(instance, move, POOL, gigabyte()) for instance in range(3)] for move in ("fetch", "send"))
    assert ends(bare(scenario), *fetch) == ends(bare(scenario), *send) == [PS_PER_S // 40] * 3
    assert ends(bare(scenario), *fetch, *send) == [PS_PER_S // 20] * 6


def test_two_instances_that_read_from_one_share_its_nics(scenario):
    from_last = [(reader, "fetch", Site(Tier.REMOTE, 2), gigabyte()) for reader in (0, 1)]
    assert ends(bare(scenario), *from_last) == [PS_PER_S // 20] * 2
    from_two = [(0, "fetch", Site(Tier.REMOTE, 1), gigabyte()), (1, "fetch", Site(Tier.REMOTE, 2), gigabyte())]
    assert ends(bare(scenario), *from_two) == [PS_PER_S // 40] * 2
    into_one = [(0, "send", Site(Tier.REMOTE, 2), gigabyte()), (1, "send", Site(Tier.REMOTE, 2), gigabyte())]
    assert ends(bare(scenario), *into_one) == [PS_PER_S // 20] * 2


def test_directions_do_not_meet(scenario):
    both = [(0, move, Site(Tier.REMOTE, 1), gigabyte()) for move in ("fetch", "send")]
    assert ends(bare(scenario), *both) == [PS_PER_S // 40] * 2


def test_the_host_link_is_shared_by_what_comes_from_near_and_from_far(scenario):
    near, far = ends(
        bare(scenario, host__link_bytes_per_s=50 * GB), (0, "fetch", HOST, gigabyte()), (0, "fetch", POOL, gigabyte())
    )
    assert near == far == PS_PER_S // 25


def test_latency_is_once_for_a_transfer(scenario):
    settings = {"network__latency_us": 7, "host__latency_us": 3}
    for parcel in (Parcel(0, 0, 0), gigabyte()):
        far, near = (ends(bare(scenario, **settings), (0, "fetch", site, parcel)) for site in (POOL, HOST))
        assert far == [7 * PS_PER_US + parcel.size_bytes * PS_PER_S // (40 * GB)]
        assert near == [3 * PS_PER_US + parcel.size_bytes * PS_PER_S // (100 * GB)]


def test_few_requests_leave_rails_idle(scenario):
    """Four NICs; a slice rides one of them."""
    for num_slices_, rails in ((1, 1), (3, 3), (4, 4), (400, 4)):
        parcel = Parcel(num_slices_ * 65_536, 1, 1)
        measured = ends(bare(scenario), (0, "fetch", POOL, parcel))
        assert measured == [-(-parcel.size_bytes * PS_PER_S // (rails * 10 * GB))]


def test_a_request_is_never_longer_than_a_slice_and_pieces_are_not_joined():
    assert num_requests(Parcel(65_536, 1, 1), 65_536, 1) == 1
    assert num_requests(Parcel(65_537, 1, 1), 65_536, 1) == 2
    assert num_requests(Parcel(65_536, 1, 32), 65_536, 1) == 32
    assert num_requests(Parcel(3 * 65_536, 1, 2), 65_536, 1) == 4
    assert num_requests(Parcel(3 * 65_536, 1, 2), 65_536, 2) == 2, "each of two ranks has half of each piece"
    assert num_requests(Parcel(0, 0, 0), 65_536, 1) == 0


def test_a_transfer_is_no_faster_than_its_requests_are_posted(scenario):
    """Requests of 10,000 bytes, one each microsecond: 10 GB/s where the network has 40."""
    posted = {"network__request_ns": 1_000}
    for site in (POOL, HOST):
        assert ends(bare(scenario, **posted), (0, "fetch", site, gigabyte(100_000))) == [PS_PER_S // 10]
    both = [(0, "fetch", POOL, gigabyte(100_000))] * 2
    assert ends(bare(scenario, **posted), *both) == [PS_PER_S // 10] * 2, "of two threads, each posts its own"


def test_ranks_load_what_they_hold_and_store_it_once():
    """Two groups: each of four ranks has a shard of the first, and all of the second."""
    packing_of = Packing((4_000, 100), (32, 8), (1, 4))
    blocks = (((0, 3),), ((1, 2), (5, 6)))
    assert packing_of.loaded(blocks) == Parcel(3 * 4_000 + 2 * 100 * 4, 5, 3 * 32 + 2 * 8)
    assert packing_of.stored(blocks) == Parcel(3 * 4_000 + 2 * 100, 5, 3 * 32 + 2 * 8 // 4)


def test_a_request_has_the_links_of_the_ranks_that_hold_it():
    """One of eight data-parallel ranks: an eighth of NICs and host links, whoever else is idle."""
    network = NetworkConfig(latency_us=0, nic_efficiency=1.0, request_ns=0)
    host = HostConfig(latency_us=0, link_efficiency=1.0)
    for num_ranks, seconds in ((1, (10, 20)), (8, (80, 160))):
        hardware = Hardware(1, 8, num_ranks, 10 * GB, 20 * GB)
        for site, share in zip((POOL, HOST), seconds, strict=True):
            clock = Clock()
            paths = network_paths(clock, hardware, network, host)
            assert ends_on(clock, paths, (0, "fetch", site, gigabyte())) == [PS_PER_S // share]


def test_replicas_and_threads_come_from_the_engine():
    """A latent group on four ranks is whole on each of them; two such engines share an instance."""
    groups = (KVGroup(FullAttention(16), 61, 576, 576, 1), KVGroup(FullAttention(16), 30, 256, 256, 4))
    engine = SimpleNamespace(tensor_parallel_size=4, data_parallel_size=2)
    sizes = tuple(group.pool_bytes for group in groups)
    stub = SimpleNamespace(network=NetworkConfig(), link=None, kv_groups=groups, block_bytes=sizes, engine=engine)
    assert packing(stub) == Packing((576, 1_024), (61, 30), (4, 1))
    assert make_threads(stub, Clock())[0]._num_threads == 2
    stub.network, stub.link = None, LinkConfig()
    assert packing(stub).num_replicas == (1, 1)
    assert make_threads(stub, Clock())[0]._num_threads is None


def test_staging_costs_the_last_chunk_its_second_half(scenario):
    staged = {"network__gpudirect": "false", "network__staging_chunk_bytes": 1_000_000}
    direct, late = (ends(bare(scenario, **keys), (0, "fetch", POOL, gigabyte()))[0] for keys in ({}, staged))
    assert late - direct == 1_000_000 * PS_PER_S // (100 * GB)
    small = Parcel(1_000, 1, 1)
    direct, late = (ends(bare(scenario, **keys), (0, "fetch", POOL, small))[0] for keys in ({}, staged))
    assert late - direct == 1_000 * PS_PER_S // (100 * GB), "there is no more than one chunk"
    direct, late = (ends(bare(scenario, **keys), (0, "fetch", HOST, small))[0] for keys in ({}, staged))
    assert late == direct, "what is in host memory needs no staging"


def test_without_relaxed_ordering_a_nic_is_slow_with_gpu_memory_only(scenario):
    slow = {"network__nic_gpu_bytes_per_s": 5 * GB}
    assert ends(bare(scenario, **slow), (0, "fetch", POOL, gigabyte())) == [PS_PER_S // 20]
    staged = bare(scenario, network__gpudirect="false", network__staging_chunk_bytes=1, **slow)
    assert ends(staged, (0, "fetch", POOL, gigabyte()))[0] < PS_PER_S // 39


def test_a_thread_pays_for_each_object_it_looks_up(scenario):
    config = bare(scenario, network__object_ns=1_000)
    path = make_paths(config, Clock())[0]
    parcel = Parcel(64 * 65_536, 4, 64)
    assert path.thread_ps(POOL, parcel) == 4 * 1_000 * PS_PER_NS
    assert path.thread_ps(HOST, parcel) == 0, "nobody need be asked where it is"


def test_one_thread_takes_one_job_after_the_other():
    clock, ends_ps = Clock(), []

    def job(end):
        clock.after(10, lambda: (ends_ps.append(clock.now_ps), end()))

    for num_threads, expected in ((1, [10, 20, 30]), (2, [10, 10, 20]), (None, [10, 10, 10])):
        clock, ends_ps = Clock(), []
        threads = IoThreads(clock, num_threads)
        for _ in range(3):
            threads.run(job)
        clock.run()
        threads.audit()
        assert ends_ps == expected
        assert (threads.num_jobs, threads.waited_ps) == (3, sum(expected) - 30)


def test_a_thread_that_never_ends_its_job_is_noticed():
    threads = IoThreads(Clock(), 1)
    threads.run(lambda end: None)
    with pytest.raises(AssertionError):
        threads.audit()


def drive_ends(num_drives, *moves):
    clock, found = Clock(), []
    drive = Drive(clock, num_drives, Speed(8 * GB, 1_000_000, 131_072), Speed(4 * GB, 250_000, 131_072))
    for direction, size_bytes, num_pieces in moves:
        getattr(drive, direction)(size_bytes, num_pieces, lambda: found.append(clock.now_ps))
    clock.run()
    drive.audit()
    assert drive.moved_bytes == drive.entered_bytes == sum(size for _, size, _ in moves)
    return found


def test_a_drive_is_bound_by_bytes_or_by_commands():
    assert drive_ends(1, ("read", GB, 1_000)) == [PS_PER_S // 8]
    assert drive_ends(1, ("read", 4_096 * 10_000, 10_000)) == [PS_PER_S // 100], "4 KiB at a time: a million a second"
    assert drive_ends(4, ("write", GB, 1)) == [PS_PER_S // 16]


def test_readers_and_writers_share_a_drive():
    """Reading a gigabyte is an eighth of a second of the drive, writing half of one an eighth too."""
    assert drive_ends(1, ("read", GB, 1), ("write", GB // 2, 1)) == [PS_PER_S // 4] * 2


def test_what_is_on_disk_comes_through_the_drive_and_then_the_network(scenario):
    drives = {"pool__enable_offload": "true", "nvme__read_bytes_per_s": 8 * GB}
    own, far = (ends(bare(scenario, **drives), (0, "fetch", Site(Tier.DISK, owner), gigabyte())) for owner in (0, 1))
    assert own == [PS_PER_S // 8 + PS_PER_S // 100]
    assert far == [PS_PER_S // 8 + PS_PER_S // 40]


def test_defaults_come_from_the_device(scenario):
    config = scenario()
    h100 = config.gpu.network
    assert alone_bytes_per_s(config) == h100.nic_bytes_per_s * 98 // 100
    nics = {"network.nics": 8}
    assert alone_bytes_per_s(scenario(**nics)) == h100.pcie_bytes_per_s * 91 // 100
    assert alone_bytes_per_s(scenario(**nics, **{"network.fabric_bytes_per_s": 123})) == 123
    load_threads, store_threads = make_threads(config, Clock())
    assert packing(config) == Packing(config.block_bytes, (32,), (1,))
    assert (load_threads._num_threads, store_threads._num_threads) == (1, 1)
    assert make_threads(load("pool-16"), Clock())[0]._num_threads is None


def test_the_host_of_a_superchip_is_reached_over_its_c2c_link(scenario):
    """NVLink-C2C of a Grace CPU is of two GPUs; PCIe of the same board would be 64 GB/s."""
    config = scenario(**{"device.name": "gb200", "network.nics": 16, "network.request_ns": 0})
    assert hardware(config).host_bytes_per_s == 450 * GB // 2
    assert alone_bytes_per_s(config) == 450 * GB // 2 * 91 // 100
    assert hardware(scenario()).host_bytes_per_s == scenario().gpu.network.pcie_bytes_per_s == 64 * GB


@pytest.mark.parametrize("pieces", [1, 2, 500])
def test_what_decisions_think_a_block_costs_is_what_a_long_load_takes(scenario, pieces):
    config = scenario(**{"network.pieces_per_block": pieces})
    path, blocks = make_paths(config, Clock())[0], 5_000
    parcel = packing(config).loaded((((0, blocks),),))
    (carried_ps,) = ends(config, (0, "fetch", POOL, parcel))
    took_ns = (path.thread_ps(POOL, parcel) + carried_ps) / PS_PER_NS
    assert took_ns == pytest.approx(alone_latency_ns(config) + blocks * alone_block_ns(config, 0), rel=1e-3)

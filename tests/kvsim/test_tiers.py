"""Whole runs over the network and with a private cache: they cost time as the tables say, and change no answer."""

from collections import Counter

import pytest

from kvsim.events import Kind
from kvsim.invariants import InvariantBroken, check
from kvsim.links.parcel import LOCAL, POOL, TIERS, Parcel, Site, Tier
from kvsim.metrics import Events, measure
from kvsim.pool.client import sites_of
from kvsim.pool.sources import ReplicaType, Source
from kvsim.results import document
from kvsim.run import decisions_digest, simulation
from kvsim.scenario import load
from kvsim.toml import InvalidToml
from kvsim.workload.source import trace_of
from tests.kvsim.test_paths import TABLES, scenario  # noqa: F401

SMALL = {"cluster.instances": 3, "workload.sessions": 13, "workload.turns": 5, "engine.num_gpu_blocks": 700}


def finished(config):
    done = simulation(config, trace_of(config))
    done.run()
    assert check(done) == "ok"
    return done


def spelled(settings):
    return SMALL | {key.replace("__", "."): value for key, value in settings.items()}


@pytest.fixture
def run(scenario):  # noqa: F811
    """A finished run over the network."""
    return lambda **settings: finished(scenario(**spelled(settings)))


@pytest.fixture
def link_run(tmp_path):
    """The same over `[link]`."""
    path = tmp_path / "link.toml"
    path.write_text(TABLES.replace("[network]", "[link]"))
    return lambda **settings: finished(load(str(path), [f"{k}={value}" for k, value in spelled(settings).items()]))


def fetched(done):
    return {tier: sum(instance.client.loaded[tier].num_bytes for instance in done.instances) for tier in Tier}


def from_pool(done):
    return fetched(done)[Tier.LOCAL] + fetched(done)[Tier.REMOTE]


def ttft(done):
    return measure(done.log, 1).ttft_s.mean


@pytest.mark.parametrize("gpudirect", ["true", "false"])
def test_a_run_over_the_network_keeps_every_invariant(run, gpudirect):
    done = run(network__gpudirect=gpudirect, network__fabric_bytes_per_s=10**11)
    assert fetched(done)[Tier.REMOTE] > 0
    assert measure(done.log, 1).requests_completed == 13 * 5
    kinds = {kind for path in done.pool.paths for kind, _ in path.links()}
    own = {"NICs in", "NICs out", "host to GPU", "GPU to host"}
    assert kinds == own | {"all NICs in", "all NICs out", "switches"}


def test_a_share_of_the_pool_is_in_the_own_memory(run):
    """Of three instances a third; stores go there in the same parts."""
    done = run()
    assert 3 * fetched(done)[Tier.LOCAL] == pytest.approx(from_pool(done), rel=1e-3)
    stored = {tier: sum(instance.client.stored[tier].num_bytes for instance in done.instances) for tier in Tier}
    assert 3 * stored[Tier.LOCAL] == pytest.approx(stored[Tier.LOCAL] + stored[Tier.REMOTE], rel=1e-3)


def test_what_comes_from_few_is_told_apart_and_what_comes_from_many_is_not():
    memory, disk = (lambda client, kind=kind: Source(client, kind) for kind in ReplicaType)
    few = Counter({memory(3): 5, memory(0): 2, disk(1): 7})
    assert sites_of(few, 0) == {LOCAL: 2, Site(Tier.DISK, 1): 7, Site(Tier.REMOTE, 3): 5}
    many = Counter({memory(client): client + 1 for client in range(6)})
    assert sites_of(many, 2) == {POOL: 18, LOCAL: 3}
    assert sites_of(Counter(), 0) == {}


def test_a_run_is_repeatable(run):
    first, again = (run(host__cpu_bytes_to_use=10**9) for _ in range(2))
    assert first.log.digest() == again.log.digest()
    assert decisions_digest(first.decisions()) == decisions_digest(again.decisions())


def test_each_cost_makes_requests_wait_longer(run):
    """One session, one request at a time: nothing but the cost differs."""
    alone = {"workload__sessions": 1, "cluster__instances": 2}
    before = ttft(run(**alone))
    for dearer in (
        {"network__latency_us": 50_000},
        {"network__object_ns": 500_000},
        {"network__request_ns": 20_000},
        {"network__nic_bytes_per_s": 10**9},
        {"network__gpudirect": "false", "network__staging_chunk_bytes": 10**9},
        {"host__link_bytes_per_s": 10**9},
    ):
        assert ttft(run(**alone, **dearer)) > before, dearer


def test_loads_queue_for_the_thread(run):
    slow = {"network__nic_bytes_per_s": 10**9}
    one, many = run(**slow), run(**slow, network__load_threads=100)
    waits = [sum(means.load_threads.waited_ps for means in done.pool.means) for done in (one, many)]
    assert waits[0] > 0 == waits[1]


def test_a_link_may_have_threads_too(link_run):
    free, one = link_run(), link_run(link__load_threads=1, link__store_threads=1)
    assert free.log.digest() != one.log.digest()
    assert sum(means.load_threads.waited_ps for means in one.pool.means) > 0


@pytest.mark.parametrize("over", ["link_run", "run"])
def test_what_the_private_cache_has_is_not_asked_of_the_pool(request, over):
    """All of a session on one instance, whose GPU holds little."""
    done = request.getfixturevalue(over)(host__cpu_bytes_to_use=10**11, cluster__instances=1)
    assert fetched(done)[Tier.HOST] > 0 == from_pool(done)
    assert done.pool.store.counters.got == done.pool.store.counters.found == 0
    assert done.pool.store.counters.put > 0, "what is stored goes to both"


def test_the_private_cache_changes_when_and_not_what(link_run):
    without, with_cache = (link_run(cluster__instances=1, host__cpu_bytes_to_use=size) for size in (0, 10**11))
    assert ttft(with_cache) < ttft(without)
    assert measure(with_cache.log, 1).requests_completed == measure(without.log, 1).requests_completed


def test_a_small_private_cache_leaves_the_rest_to_the_pool(run):
    done = run(cluster__instances=1, host__cpu_bytes_to_use=4 * 10**9)
    assert fetched(done)[Tier.HOST] > 0 < from_pool(done)


def test_what_was_loaded_is_kept_if_that_is_wanted(run):
    keeps, forgets = (run(host__cpu_bytes_to_use=10**11, host__keeps_loaded=keeps) for keeps in ("true", "false"))
    assert fetched(keeps)[Tier.HOST] > fetched(forgets)[Tier.HOST]


def test_a_private_cache_loads_what_a_full_pool_refused(run):
    """Its blocks were stored as far as the request is concerned, and nowhere else."""
    full = {"pool__segment_bytes_per_instance": 10**7, "pool__lease_ttl_ms": 10**6, "cluster__instances": 1}
    done = run(**full, host__cpu_bytes_to_use=10**11)
    assert done.pool.store.counters.rejected > 0 < fetched(done)[Tier.HOST]


@pytest.mark.parametrize("over", ["link_run", "run"])
def test_what_memory_evicts_comes_from_disk_through_the_drives(request, over):
    small = {"pool__segment_bytes_per_instance": 10**9, "pool__lease_ttl_ms": 1, "pool__enable_offload": "true"}
    fast, slow = (request.getfixturevalue(over)(**small, nvme__read_bytes_per_s=rate) for rate in (10**11, 10**8))
    for done in (fast, slow):
        read_bytes = sum(link.read_bytes for path in done.pool.paths for kind, link in path.links() if kind == "NVMe")
        assert fetched(done)[Tier.DISK] == read_bytes > 0
        moved_bytes = sum(link.moved_bytes for path in done.pool.paths for kind, link in path.links() if kind == "NVMe")
        (block_bytes,) = done.scenario.block_bytes
        assert moved_bytes - read_bytes == done.pool.store.counters.offloaded * block_bytes > 0
    assert ttft(slow) > ttft(fast)


def test_stores_that_prefer_the_own_segment_cross_no_nic(run):
    done = run(pool__preferred_segment="own")
    assert all(instance.client.stored[Tier.REMOTE].num_bytes == 0 for instance in done.instances)


def test_loads_are_recorded_by_tier(run):
    done = run(cluster__instances=1, host__cpu_bytes_to_use=4 * 10**9)
    rows = done.log.usage.loads.columns()
    by_tier = {tier: rows["size_bytes"][rows["tier"] == TIERS.index(tier)].sum() for tier in Tier}
    assert by_tier == fetched(done)
    assert by_tier[Tier.LOCAL] > 0
    assert len(Events(done.log).of(Kind.LOADED).a) <= len(rows["tier"])


def test_private_caches_tell_how_full_they_are_together(run):
    done = run(host__cpu_bytes_to_use=10**9)
    usage = done.log.usage
    kinds = [info.kind for info in usage.memories]
    fills = usage.fills.columns()
    told = fills["used_bytes"][fills["memory"] == kinds.index("host memory")]
    assert told[-1] == sum(means.host.used_bytes for means in done.pool.means) > 0
    assert told.max() <= usage.memories[kinds.index("host memory")].capacity_bytes == 3 * 10**9


@pytest.mark.parametrize("settings", [{}, {"host__cpu_bytes_to_use": 4 * 10**9}, {"pool__preferred_segment": "own"}])
def test_a_jump_is_exact_over_the_network(scenario, settings):  # noqa: F811
    config = scenario(**spelled(settings | {"workload__output_len": 200, "network__nic_bytes_per_s": 10**9}))
    jumping, stepping = (simulation(config, trace_of(config), max_jump) for max_jump in (None, 1))
    jumping.run()
    stepping.run()
    assert jumping.clock.num_events < stepping.clock.num_events
    assert jumping.log.digest() == stepping.log.digest()


def test_bytes_that_no_tier_reports_are_noticed(run):
    done = run(host__cpu_bytes_to_use=10**9)
    done.instances[0].client.loaded[Tier.HOST].add(Parcel(1, 0, 0))
    with pytest.raises(InvariantBroken, match="invariant 4"):
        check(done)


def test_a_transfer_that_does_not_end_is_noticed(run):
    done = run()
    done.pool.paths[0].links()
    nics = next(link for kind, link in done.pool.paths[0].links() if kind == "NICs in")
    nics.entered_bytes += 1
    with pytest.raises(InvariantBroken, match="invariant 4"):
        check(done)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link.latency_us": 1}, r"expected one way to the pool beside \[pool\], \[link\] or \[network\], not both$"),
        ({"network.nics": 0}, r"network.nics = 0: expected greater than 0$"),
        ({"network.nic_efficiency": 1.5}, "network.nic_efficiency = 1.5: expected less than or equal to 1$"),
        ({"host.cpu_bytes": 1}, "host.cpu_bytes = 1: expected a known key; did you mean cpu_bytes_to_use"),
        ({"nvme.read_iops": -1}, "nvme.read_iops = -1: expected greater than 0$"),
        ({"nvme.drives": 2}, r"expected pool.enable_offload = true beside \[nvme\]$"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(scenario, settings, message):  # noqa: F811
    with pytest.raises(InvalidToml, match=message):
        scenario(**settings)


ALONE = [
    "cluster.instances=2",
    "engine.num_gpu_blocks=700",
    "workload.sessions=9",
    "workload.turns=4",
    "workload.common_len=1000",
    "workload.first_len=2000",
    "workload.turn_len=512",
    "workload.output_len=64",
]


def test_a_private_cache_may_be_alone():
    """As vLLM's OffloadingConnector is without a pool behind it: what the other instance has is computed again."""
    nothing, cache = (finished(load("nopool-16", [*ALONE, f"host.cpu_bytes_to_use={size}"])) for size in (0, 10**11))
    assert nothing.pool is None
    shared = finished(load("pool-16", [*ALONE, "host.cpu_bytes_to_use=1e11"]))
    hits = [measure(done.log, 2).hit_rate for done in (nothing, cache, shared)]
    assert hits[0] < hits[1] < hits[2]
    assert {tier for tier, num_bytes in fetched(cache).items() if num_bytes} == {Tier.HOST}
    told = document(cache, "fast", lambda: 0.0)
    assert told["pool"] is None and told["invariants"] == "ok"


def test_a_jump_is_exact_with_a_private_cache_alone():
    config = load("nopool-16", [*ALONE, "host.cpu_bytes_to_use=1.2e9", "workload.output_len=300"])
    jumping, stepping = (simulation(config, trace_of(config), max_jump) for max_jump in (None, 1))
    jumping.run()
    stepping.run()
    assert jumping.log.digest() == stepping.log.digest()
    assert fetched(jumping)[Tier.HOST] > 0 < jumping.pool.means[0].host.counters.evicted

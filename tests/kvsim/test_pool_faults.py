"""The pool's tiers and faults in a scenario."""

import pytest

from kvsim.invariants import check
from kvsim.pool.disks import DiskEviction, Offload, Unwritten
from kvsim.pool.memory import SegmentedMemory
from kvsim.pool.policy import make_store
from kvsim.results import document, scenario_toml
from kvsim.run import decisions_digest, simulation
from kvsim.scenario import load
from kvsim.toml import InvalidToml
from kvsim.workload.source import trace_of

CLUSTER = """
[scenario]
name = "tiers"
description = "four instances, a small pool"
[model]
name = "llama-3.1-8b"
[device]
name = "h100-sxm"
[cluster]
instances = 4
[pool]
segment_bytes_per_instance = 6e9
lease_ttl_ms = 100
[link]
[workload]
generator = "agentic"
sessions = 13
turns = 8
common_len = 2_000
first_len = 10_000
turn_len = 2_048
output_len = 100
delay_s = 0.5
"""
DISK = ["pool.enable_offload=true", "pool.offload_on_evict=true", "pool.disk_bytes_per_instance=20e9"]


def fault(kind, at_s, instance):
    return f'[[faults]]\nkind = "pool_client_{kind}"\nat_s = {at_s}\ninstance = {instance}\n'


@pytest.fixture
def scenario(tmp_path):
    def make(*settings, faults=""):
        path = tmp_path / "cluster.toml"
        path.write_text(CLUSTER + faults)
        return load(str(path), settings)

    return make


def finished(config):
    done = simulation(config, trace_of(config))
    done.run()
    assert check(done) == "ok"
    return done


def test_a_scenario_names_segments_and_disks_as_mooncake_does(scenario):
    config = scenario(*DISK, "pool.bucket_eviction_policy=fifo", "pool.offload_force_evict=true", "pool.replica_num=2")
    store = make_store(config, config.pool)
    assert (store.disks.offload, store.disks.unwritten) == (Offload.ON_EVICT, Unwritten.GOES)
    assert store.disks._eviction is DiskEviction.FIFO and store.disks.capacity_bytes == 4 * 20 * 10**9
    assert isinstance(store._memory, SegmentedMemory)
    plain = scenario()
    assert make_store(plain, plain.pool).disks is None
    assert not isinstance(make_store(plain, plain.pool)._memory, SegmentedMemory)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("pool.allocation_strategy=cxl", r"expected one of random, free_ratio_first, local_first"),
        ("pool.offload_on_evict=true", r"pool.offload_on_evict = True: expected false, or pool.enable_offload = true"),
        ("pool.offload_force_evict=true", r"pool.offload_force_evict = True: expected false, or pool.enable_offload"),
        ("pool.promotion_on_hit=true", r"pool.promotion_on_hit = True: expected false, or pool.enable_offload = true"),
        ("pool.replica_num=0", r"pool.replica_num = 0: expected greater than 0"),
    ],
)
def test_mistakes_are_told(scenario, settings, message):
    with pytest.raises(InvalidToml, match=message):
        scenario(settings)


def test_a_fault_is_of_an_instance_that_there_is(scenario):
    with pytest.raises(InvalidToml, match=r"expected faults.instance below 4 \(cluster.instances\), not 4"):
        scenario(faults=fault("dies", 1, 4))


def test_faults_are_written_with_the_scenario(scenario, tmp_path):
    config = scenario(faults=fault("dies", 1, 2) + fault("returns", 3, 2))
    again = tmp_path / "again.toml"
    again.write_text(scenario_toml(config))
    assert load(str(again)) == config and len(config.faults) == 2


def test_where_blocks_are_changes_nothing_when_the_link_does_not_ask(scenario):
    plain = finished(scenario())
    for strategy in ("free_ratio_first", "local_first"):
        other = finished(scenario(f"pool.allocation_strategy={strategy}"))
        assert decisions_digest(other.decisions()) == decisions_digest(plain.decisions())
        assert other.pool.store.counters == plain.pool.store.counters


def test_a_disk_keeps_what_memory_does_not(scenario):
    plain, tiered = finished(scenario()), finished(scenario(*DISK))
    told = document(tiered, "fast", lambda: 0.0)["pool"]
    assert told["offloaded"] > 0 and told["found_on_disk"] > 0 and told["disk_objects"] > 0
    assert told["disk_used_bytes"] <= told["disk_capacity_bytes"] == 80 * 10**9
    assert document(plain, "fast", lambda: 0.0)["pool"]["disk_capacity_bytes"] == 0
    assert tiered.pool.store.counters.found > plain.pool.store.counters.found


def test_with_two_copies_a_death_loses_nothing_and_with_one_a_quarter(scenario):
    faults = fault("dies", 2, 1)
    ample, soon = "pool.segment_bytes_per_instance=200e9", "pool.client_ttl_s=1"
    done = finished(scenario(ample, soon, faults=faults))
    one, told = done.pool.store.counters, document(done, "fast", lambda: 0.0)["pool"]
    assert told["used_bytes"] <= told["capacity_bytes"] == 3 * 200 * 10**9, "what is lost is no capacity any more"
    two = finished(scenario(ample, soon, "pool.replica_num=2", faults=faults)).pool.store.counters
    assert two.lost == 0
    assert one.unreadable > 0 and one.lost > 0

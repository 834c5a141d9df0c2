"""What machines did over time adds up to what the events and the machines themselves say, however it was computed."""

import numpy as np
import pytest

from kvsim.events import Kind
from kvsim.metrics import Events
from kvsim.rows import Rows, TooLong
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.usage import LinkInfo, MemoryInfo, Usage
from kvsim.workload.source import trace_of

SMALL = ["cluster.instances=3", "workload.sessions=13", "workload.turns=4", "workload.output_len=90"]


def finished_run(name, *settings, max_jump=None):
    scenario = load(name, [*SMALL, *settings])
    done = simulation(scenario, trace_of(scenario), max_jump)
    done.run()
    return done


@pytest.fixture(scope="module")
def pooled():
    return finished_run("pool-16")


def per_instance(steps, name):
    return np.bincount(steps["instance"], weights=steps[name], minlength=3).astype(np.int64).tolist()


def test_rows_are_columns_and_may_grow_meanwhile():
    rows = Rows("a", "b")
    rows.add(1, 2)
    columns = rows.columns()
    rows.add(3, 4)
    assert {name: column.tolist() for name, column in columns.items()} == {"a": [1], "b": [2]}
    assert (len(rows), rows.columns()["b"].tolist()) == (2, [2, 4])
    rows.add(0, 2**63)
    with pytest.raises(TooLong, match="2\\*\\*63 ps"):
        rows.columns()
    assert {name: len(column) for name, column in Rows("a", "b").columns().items()} == {"a": 0, "b": 0}


def test_links_and_memories_are_told_apart():
    usage = Usage()
    get, put = (usage.record_link(LinkInfo(kind, 0, 10)) for kind in ("pool get", "pool put"))
    first, second = (usage.record_memory(MemoryInfo(kind, 9)) for kind in ("pool memory", "pool SSD"))
    put(1, 2, 30), get(3, 4, 50), second(5, 6), first(7, 8)
    assert usage.transfers.columns()["link"].tolist() == [1, 0]
    assert usage.transfers.columns()["size_bytes"].tolist() == [30, 50]
    assert (usage.fills.columns()["memory"].tolist(), usage.fills.columns()["used_bytes"].tolist()) == ([1, 0], [6, 8])


def test_an_instance_computes_one_step_at_a_time_and_every_token_that_was_not_found(pooled):
    steps, events = pooled.log.usage.steps.columns(), Events(pooled.log)
    for instance in range(3):
        mine = steps["instance"] == instance
        assert (steps["end_ps"][mine] > steps["start_ps"][mine]).all()
        assert (steps["start_ps"][mine][1:] >= steps["end_ps"][mine][:-1]).all()
    arrived, loaded = events.of(Kind.ARRIVED), events.of(Kind.LOADED)
    admitted = events.of(Kind.ADMITTED)
    assert not len(events.of(Kind.PREEMPTED).a) and not loaded.b.any(), "each request is computed and loaded once"
    local_only = admitted.a[admitted.b == 0].sum()
    needed = arrived.a.sum() + arrived.b.sum() - len(arrived.a) - local_only - loaded.a.sum()
    assert steps["computed_tokens"].sum() == needed
    blocks = pooled.instances[0].scheduler.blocks.num_blocks
    assert (steps["held_blocks"] > 0).all() and (steps["held_blocks"] <= blocks).all()


def test_transfers_carry_every_byte_of_their_link(pooled):
    usage = pooled.log.usage
    transfers = usage.transfers.columns()
    assert (transfers["end_ps"] >= transfers["start_ps"]).all()
    links = {(info.kind, info.instance): number for number, info in enumerate(usage.links)}
    moved = np.bincount(transfers["link"], weights=transfers["size_bytes"], minlength=len(links))
    for instance, path in enumerate(pooled.pool.paths):
        assert moved[links["pool get", instance]] == path.get_link.moved_bytes > 0
        assert moved[links["pool put", instance]] == path.put_link.moved_bytes > 0


def test_the_pool_fills_to_what_it_holds_and_never_beyond():
    done = finished_run("pool-16", "pool.segment_bytes_per_instance=8e9", "pool.lease_ttl_ms=1")
    fills, (memory,) = done.log.usage.fills.columns(), done.log.usage.memories
    assert fills["used_bytes"][-1] == done.pool.store.used_bytes
    assert (fills["used_bytes"] <= memory.capacity_bytes).all() and (np.diff(fills["time_ps"]) >= 0).all()
    assert done.pool.store.counters.evicted > 0 and (np.diff(fills["used_bytes"]) < 0).any()


@pytest.mark.parametrize("name", ["pool-16", "nopool-16"])
def test_jumps_and_single_steps_do_the_same_work(name):
    jumping, stepping = (finished_run(name, max_jump=jump).log.usage.steps.columns() for jump in (None, 1))
    assert len(jumping["instance"]) < len(stepping["instance"]) / 2
    for steps in (jumping, stepping):
        steps["busy_ps"] = steps["end_ps"] - steps["start_ps"]
    for what in ("busy_ps", "num_steps", "computed_tokens"):
        assert per_instance(jumping, what) == per_instance(stepping, what)
    single = {(end, instance): rest for end, instance, *rest in rows(stepping)}
    assert all(single[end, instance] == rest for end, instance, *rest in rows(jumping))


def rows(steps):
    """(end, instance, what holds at the end) of each."""
    return zip(*(steps[name].tolist() for name in ("end_ps", "instance", "num_running", "held_blocks")), strict=True)

"""What a pool is for: on an agentic workload it raises the hit rate and lowers the time to the first token."""

import gc

import pytest

from kvsim.config.workload import TraceWorkload
from kvsim.demo_command import DEMO
from kvsim.invariants import check
from kvsim.metrics import measure
from kvsim.run import decisions_digest, simulation
from kvsim.scenario import load
from kvsim.sequence import Sequence
from kvsim.workload.source import trace_of
from tests.support import shared_data

# 17 sessions in step on 4 instances: round robin sends a session's next turn to another instance.
SMALL = ["cluster.instances=4", "workload.sessions=17", "workload.turns=6", "workload.common_len=1000"]
WITHOUT, WITH = DEMO


def finished_run(name, settings=(), trace=None):
    scenario = load(name, settings, trace)
    done = simulation(scenario, trace_of(scenario))
    done.run()
    assert check(done) == "ok"
    return done


def measured(name, settings=(), trace=None):
    return measure(finished_run(name, settings, trace).log, num_gpus=1)


def test_a_pool_helps_sessions_that_change_the_instance():
    without, shared = measured(WITHOUT, SMALL), measured(WITH, SMALL)
    assert without.requests_completed == shared.requests_completed == 17 * 6
    assert without.hit_rate_external == 0 < shared.hit_rate_external
    assert shared.hit_rate > 1.5 * without.hit_rate
    assert shared.ttft_s.p50 < without.ttft_s.p50
    assert shared.simulated_s < without.simulated_s


@pytest.mark.parametrize(
    ("run", "streams"), [((0, 9), [7] * 9), ((3, 4), [7]), ((8, 12), [7, 8, 8, 9]), ((9, 11), [8, 8])]
)
def test_what_an_engine_learns_is_named_by_streams(run, streams):
    scenario = load(WITH, SMALL)
    pool = simulation(scenario, trace_of(scenario)).pool
    machine = pool.machine(0, Sequence(0, 200, 1, ((7, 0, 9), (8, 9, 11), (9, 11, 12))))
    assert list(machine.names_of(0, run)) == streams


def test_a_pool_is_no_help_where_nothing_is_shared():
    settings = [*SMALL, "workload.turns=1", "workload.common_len=0"]
    without, shared = measured(WITHOUT, settings), measured(WITH, settings)
    assert without.hit_rate == shared.hit_rate == 0
    assert shared.ttft_s.p50 >= without.ttft_s.p50, "it asks in vain"


def test_a_pool_is_no_help_to_one_instance_whose_cache_holds_all():
    settings = ["cluster.instances=1", "workload.sessions=2", "workload.turns=4"]
    without, shared = measured(WITHOUT, settings), measured(WITH, settings)
    assert shared.hit_rate_external == 0
    assert shared.hit_rate == without.hit_rate > 0.5


def test_what_a_full_pool_forgets_is_computed_again():
    small = measured(WITH, [*SMALL, "pool.segment_bytes_per_instance=10e9"])
    assert 0 < small.hit_rate_external < measured(WITH, SMALL).hit_rate_external


def test_a_slow_link_costs_time_and_no_tokens():
    slow = finished_run(WITH, [*SMALL, "link.bandwidth_bytes_per_s=2e8"])
    fast = finished_run(WITH, SMALL)
    assert measure(slow.log, 1).ttft_s.p50 > measure(fast.log, 1).ttft_s.p50
    assert measure(slow.log, 1).requests_completed == 17 * 6


def unreachable_after(run):
    """How many objects only refer to each other once `run` has returned."""
    gc.collect()
    gc.disable()
    try:
        run()
        return gc.collect()
    finally:
        gc.enable()


def test_a_run_leaves_nothing_to_the_garbage_collector():
    """So it may be off meanwhile: the memory of a long run is what is alive."""
    scenario = load(WITH, SMALL)
    assert unreachable_after(simulation(scenario, trace_of(scenario)).run) == 0
    assert gc.isenabled()


def test_what_refers_to_itself_is_left_to_the_garbage_collector():
    def run():
        cycle = []
        cycle.append(cycle)

    assert unreachable_after(run) == 1


def test_a_run_is_repeatable():
    first, again = finished_run(WITH, SMALL), finished_run(WITH, SMALL)
    assert first.log.digest() == again.log.digest()
    assert decisions_digest(first.decisions()) == decisions_digest(again.decisions())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "num_requests"), [("mooncake_conversation_trace.jsonl.gz", 12_031), ("claude_code", 7_146)]
)
def test_a_pool_helps_on_recorded_traces(file, num_requests):
    trace = TraceWorkload(trace=str(shared_data(file)))
    without, shared = measured(WITHOUT, trace=trace), measured(WITH, trace=trace)
    for metrics in (without, shared):
        assert metrics.requests_completed + metrics.requests_rejected == num_requests
    assert without.requests_rejected == shared.requests_rejected
    assert shared.hit_rate > 2 * without.hit_rate
    assert shared.ttft_s.mean < without.ttft_s.mean
    assert shared.ttft_s.p50 < without.ttft_s.p50

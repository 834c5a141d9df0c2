"""The bounds beside a run: a cache that keeps answers too, by hand, by brute force, and against the run itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsim.capacity import SequenceAccesses, capacity_curve
from kvsim.metrics import measure
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.source import trace_of as trace_of_scenario
from tests.kvsim.small_runs import ASKS, Ask, trace_of


def everyone(trace):
    return np.ones(trace.num_requests, dtype=bool)


def brute_force(trace, block_size, is_served):
    """Hit tokens of a cache without bound that holds every block of what came before."""
    known, hit_tokens = set(), 0
    for request in np.flatnonzero(is_served).tolist():
        names = [(stream, at) for stream, a, b in trace.segments(request, block_size) for at in range(a, b)]
        limit = (int(trace.input_len[request]) - 1) // block_size
        hit_tokens += block_size * next(
            (at for at, name in enumerate(names[:limit]) if name not in known), min(limit, len(names))
        )
        known.update(names)
    return hit_tokens, len(known)


@given(ASKS, st.sampled_from([1, 2, 3, 16]), st.data())
def test_without_bound_it_hits_all_that_was_there_before(asks, block_size, data):
    trace = trace_of(asks)
    is_served = np.array([data.draw(st.booleans()) for _ in asks])
    curve = capacity_curve(trace, block_size, is_served)
    assert (curve.infinite_hit_tokens, curve.distinct_blocks) == brute_force(trace, block_size, is_served)
    for points in (curve.lru, curve.opt):
        tokens = [point.hit_tokens for point in points]
        assert tokens == sorted(tokens) and all(left <= curve.infinite_hit_tokens for left in tokens)
        assert tokens[-1:] == [curve.infinite_hit_tokens][: len(tokens)]
    assert [point.capacity_blocks for point in curve.lru] == [point.capacity_blocks for point in curve.opt]


def test_answers_are_kept_and_the_last_token_is_computed():
    trace = trace_of(
        [
            Ask(new_len=32, output_len=32),
            Ask("turn", of=0, new_len=16, output_len=1),
            Ask("fork", of=0, cut=32, new_len=0),
        ]
    )
    curve = capacity_curve(trace, 16, everyone(trace))
    assert curve.prompt_tokens == 32 + 80 + 32
    assert curve.infinite_hit_tokens == 64 + 16, (
        "the whole of prompt and answer, then all but the block of the last token"
    )
    alone = capacity_curve(trace, 16, np.array([False, True, True]))
    assert (alone.prompt_tokens, alone.infinite_hit_tokens) == (80 + 32, 16)


def test_runs_that_continue_a_stream_are_one():
    trace = trace_of([Ask(new_len=20, output_len=12)])
    accesses = SequenceAccesses(trace, 16, everyone(trace))
    assert (accesses.start.tolist(), accesses.end.tolist()) == ([0], [2])


def test_a_pool_that_holds_everything_hits_what_the_bound_says():
    settings = ["cluster.instances=3", "workload.sessions=10", "workload.turns=5"]
    scenario = load("pool-16", [*settings, "workload.start_spread_s=900.0", "workload.delay_s=9.0"])
    trace = trace_of_scenario(scenario)
    done = simulation(scenario, trace)
    done.run()
    curve = capacity_curve(trace, scenario.engine.block_size, everyone(trace))
    bound = curve.infinite_hit_tokens / curve.prompt_tokens
    assert bound - 0.01 < measure(done.log, 1).hit_rate <= bound


def test_few_capacities_whatever_the_trace_holds():
    trace = generate(Agentic(sessions=20, turns=10, common_len=5_000, first_len=4_000, turn_len=700, output_len=300))
    curve = capacity_curve(trace, 16, everyone(trace))
    assert (len(curve.lru), len(curve.opt)) == (25, 25)
    assert curve.lru[-1].capacity_blocks == curve.opt[-1].capacity_blocks == curve.distinct_blocks
    nothing = capacity_curve(trace, 10**6, everyone(trace))
    assert (nothing.lru, nothing.opt, nothing.infinite_hit_tokens) == ((), (), 0)

"""What a pool keeps of models with several groups: of windows their tails, of recurrent states the last boundary."""

import pytest

from kvcore.group_runs import minus
from kvcore.masks import store_runs
from kvcore.runs import num_blocks
from kvcore.spec import Recurrent, SlidingWindow
from kvsim.invariants import check
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.source import trace_of


@pytest.fixture(scope="module")
def done():
    scenario = load("hybrid-window")
    run = simulation(scenario, trace_of(scenario))
    run.run()
    return run


def test_every_invariant_holds(done):
    assert check(done) == "ok"
    assert any(decision.external_hit_len for decision in done.decisions())


def test_what_is_stored_is_what_the_masks_keep(done):
    model = done.scenario.kv_model
    for sequence in done.cluster.sequences:
        ends = tuple((0, sequence.num_computed // group.block_size) for group in model.groups)
        kept = store_runs(model, ends, 0, sequence.input_len)
        assert not any(minus(sequence.kv.decisions.stored, kept)), sequence.index


def test_windows_weigh_little_in_the_pool(done):
    model = done.scenario.kv_model
    (window,) = (group for group, spec in enumerate(model.groups) if isinstance(spec, SlidingWindow))
    (full,) = model.closed_groups
    stored = [
        sum(num_blocks(sequence.kv.decisions.stored[group]) for sequence in done.cluster.sequences)
        for group in (window, full)
    ]
    num_bytes = [count * done.scenario.block_bytes[group] for count, group in zip(stored, (window, full), strict=True)]
    assert 0 < num_bytes[0] < num_bytes[1] / 10, num_bytes


def test_a_pool_that_keeps_every_boundary_is_told_apart(done):
    scenario = load("hybrid-window", ['pool.retention_interval="all"', "workload.sessions=2", "workload.turns=2"])
    run = simulation(scenario, trace_of(scenario))
    run.run()
    with pytest.raises(AssertionError):
        test_windows_weigh_little_in_the_pool(run)


# --- recurrent states -------------------------------------------------------------------------------------------------


def states_stored(*settings):
    """(blocks stored of each state group, last whole block of the prompt) of each request, and their run."""
    small = ["model.name=nemotron-3-nano-30b-a3b", "workload.sessions=6", "workload.turns=4", *settings]
    scenario = load("hybrid-window", small)
    run = simulation(scenario, trace_of(scenario))
    run.run()
    assert check(run) == "ok"
    states = [(at, spec.block_size) for at, spec in enumerate(scenario.kv_model.groups) if isinstance(spec, Recurrent)]
    assert len(states) == 4
    found = [
        (sequence.kv.decisions.stored[at], sequence.input_len // size)
        for sequence in run.cluster.sequences
        for at, size in states
    ]
    return found, run


def test_of_recurrent_states_the_last_boundary_of_each_prompt_is_stored():
    found, run = states_stored()
    assert all(stored == ((end - 1, end),) for stored, end in found)
    assert any(decision.external_hit_len for decision in run.decisions()), "and is enough to hit"
    every, _ = states_stored('pool.retention_interval="all"')
    assert any(stored != ((end - 1, end),) for stored, end in every)

"""Every model of the catalogue is served, with a pool and without, on eight of the largest GPUs."""

import pytest

from kvsim import catalog, scenario
from kvsim.invariants import check
from kvsim.run import simulation
from kvsim.workload.source import trace_of

SMALL = ("workload.sessions=4", "workload.turns=3", "cluster.instances=2", "engine.tensor_parallel_size=8")


@pytest.mark.parametrize("shipped", ["nopool-16", "pool-16"])
@pytest.mark.parametrize("name", catalog.llm_models())
def test_a_model_is_served(name, shipped):
    config = scenario.load(shipped, [f"model.name={name}", "device.name=gb300", *SMALL])
    run = simulation(config, trace_of(config))
    run.run()
    assert check(run) == "ok"
    decisions = run.decisions()
    assert len(decisions) == 12 and None not in decisions
    assert sum(decision.local_hit_len + decision.external_hit_len for decision in decisions) > 0

"""Under every routing policy the fast engine and vLLM's own scheduler get the same requests and do the same."""

import pytest

from kvsim.config.cluster import ROUTINGS
from kvsim.workload.agentic import Agentic, generate
from tests.differential.test_reference import compare
from tests.kvsim.small_runs import scenario_of

pytestmark = pytest.mark.engine
SHAPE = Agentic(sessions=9, turns=4, common_len=500, first_len=900, turn_len=300, output_len=40, start_spread_s=2.0)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_same_on_three_instances(routing):
    cluster = {"cluster.instances": 3, "cluster.routing": routing, "engine.num_gpu_blocks": 300}
    seen = compare(scenario_of(cluster), generate(SHAPE))
    assert min(seen[what] for what in ("evicted", "hits")) > 0, seen

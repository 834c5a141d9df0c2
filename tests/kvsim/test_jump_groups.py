"""Many decode steps taken as one jump are exact for models of several groups too, with a pool and without."""

from collections import Counter

import pytest

from kvsim.invariants import check
from tests.kvsim.small_models import FAMILIES, random_pool_run, random_run
from tests.kvsim.test_jump import both, seen_in

pytestmark = pytest.mark.slow

NUM_RUNS = 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("random_case", [random_run, random_pool_run])
def test_jumps_are_exact(family, random_case):
    seen = Counter()
    for seed in range(NUM_RUNS):
        runs = both(*random_case(family, seed))
        assert check(runs[0]) == check(runs[1]) == "ok"
        seen.update(seen_in(*runs))
    wanted = ("jumped", "evicted", "FINISHED") + ("LOADED", "STORED") * (random_case is random_pool_run)
    assert min(seen[what] for what in wanted) > 0, seen

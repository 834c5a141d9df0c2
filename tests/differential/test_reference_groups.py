"""The fast engine against the installed vLLM's own scheduler on models of several KV cache groups, event for event.

All groups share one pool of blocks: a hit is one that all have, windows and chunks give blocks back while a sequence
goes on, states are made where chunks end.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.differential.test_reference import compare
from tests.kvsim.small_models import FAMILIES, RETENTIONS, SCARCITIES, WIDTHS, case, random_run
from tests.kvsim.small_runs import ASKS, ENGINES, trace_of

pytestmark = pytest.mark.engine

NUM_RUNS = 30


def test_random_small_runs():
    seen = Counter()

    @settings(max_examples=150)
    @given(st.sampled_from(FAMILIES), ENGINES, SCARCITIES, WIDTHS, RETENTIONS, ASKS)
    def agree(family, bounds, scarcity, width, retention, asks):
        seen.update(compare(case(family, bounds, scarcity, width, retention), trace_of(asks)))

    agree()
    assert min(seen[what] for what in ("REJECTED", "FINISHED", "evicted", "hits")) > 0, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_more_random_small_runs_of_each_kind(family):
    """Denser ones than a search for small examples finds."""
    seen = Counter()
    for seed in range(NUM_RUNS):
        seen.update(compare(*random_run(family, seed)))
    assert min(seen[what] for what in ("PREEMPTED", "FINISHED", "evicted", "hits")) > 0, seen

"""The fast engine against the installed vLLM's own scheduler on models of several KV cache groups, event for event.

All groups share one pool of blocks: a hit is one that all have, windows and chunks give blocks back while a sequence
goes on, states are made where chunks end.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import gpu_cache
from kvcore.engine.hit import Found
from kvcore.gpu_cache import GpuCache
from tests.differential.test_reference import compare
from tests.kvsim.small_models import (
    FAMILIES,
    RETENTIONS,
    SCARCITIES,
    WIDTHS,
    case,
    full_and_states,
    full_and_window,
    random_run,
)
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


# --- negative controls: each wrong cache is found ---------------------------------------------------------------------


def shorter(engine, present, limit, hashed_len):
    """A hit ends one block earlier."""
    found = FIND(engine, present, limit, hashed_len)
    return Found(max(0, found.hit_len - engine.model.alignment), found.junction)


def everything(*_):
    return None


FIND = gpu_cache.find
WRONG = {
    "hits are a block short": (gpu_cache, "find", shorter, full_and_window),
    "every full block is kept": (gpu_cache, "reachable_runs", everything, full_and_window),
    "states are made anywhere": (gpu_cache, "chunk_end", lambda _, start, end, *rest: end, full_and_states),
    "a state serves in the step that makes it": (GpuCache, "is_fresh", lambda *_: False, full_and_states),
    "a window is thought to hold all": (gpu_cache, "admission_cap", everything, full_and_window),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_cache_is_found(wrong, monkeypatch):
    owner, name, value, family = WRONG[wrong]
    monkeypatch.setattr(owner, name, value)
    assert any(differs(family, seed) for seed in range(5 * NUM_RUNS))


def differs(family, seed):
    """Or does not get to its end."""
    try:
        compare(*random_run(family, seed))
    except (AssertionError, ValueError):
        return True
    return False

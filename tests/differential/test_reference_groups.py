"""The fast engine against the installed vLLM's own scheduler on models of several KV cache groups, event for event.

All groups share one pool of blocks: a hit is one that all have, windows and chunks give blocks back while a sequence
goes on, states are made where chunks end.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.differential.test_reference import compare
from tests.kvsim.small_runs import ASKS, ENGINES, Ask, engine, of_model, scenario_of, trace_of

pytestmark = pytest.mark.engine


def full_and_window(size, width):
    return FullAttention(size), SlidingWindow(size, 1 + width)


def full_and_windows(size, width):
    return FullAttention(size), SlidingWindow(size, 1 + width), SlidingWindow(size, 1 + width)


def two_windows(size, width):
    return SlidingWindow(size, 2 + width), SlidingWindow(size, 1 + width // 3)


def full_and_two_windows(size, width):
    return SlidingWindow(size, 2 + width), SlidingWindow(size, 1 + width // 3), FullAttention(size)


def one_window(size, width):
    return (SlidingWindow(size, 1 + width),)


def blocks_of_two_sizes(size, width):
    return FullAttention(2 * size), SlidingWindow(size, 1 + width)


def larger_blocks_of_windows(size, width):
    return FullAttention(size), SlidingWindow(3 * size, 1 + width)


def full_and_chunks(size, width):
    return FullAttention(size), ChunkedLocal(size, size * (1 + width // 8))


def full_window_and_chunks(size, width):
    return FullAttention(size), SlidingWindow(size, 1 + width), ChunkedLocal(size, size * (1 + width // 8))


def full_and_states(size, _width):
    return FullAttention(size), Recurrent(size)


def full_and_more_states(size, _width):
    return FullAttention(size), Recurrent(size), Recurrent(size), Recurrent(size)


def full_window_and_states(size, width):
    return FullAttention(size), SlidingWindow(size, 1 + width), Recurrent(size)


FAMILIES = [
    full_and_window,
    full_and_windows,
    two_windows,
    full_and_two_windows,
    one_window,
    blocks_of_two_sizes,
    larger_blocks_of_windows,
    full_and_chunks,
    full_window_and_chunks,
    full_and_states,
    full_and_more_states,
    full_window_and_states,
]
WIDTHS = st.one_of(st.integers(0, 40), st.sampled_from([0, 15, 16, 31, 64]))
RETENTIONS = st.sampled_from([0, 0, None, 1, 3])
"""In units of the model's alignment."""
SCARCITIES = st.sampled_from([1, 1, 2, 3])
"""How many groups find room for as many tokens as the settings say."""


def case(family, bounds, scarcity, width, retention):
    """A scenario with such a model."""
    model = ModelSpec(family(bounds["engine.block_size"], width))
    sparse = any(isinstance(group, SlidingWindow | Recurrent) for group in model.groups)
    num_gpu_blocks = 1 + (bounds["engine.num_gpu_blocks"] - 1) * scarcity
    scenario = scenario_of(bounds | {"engine.num_gpu_blocks": num_gpu_blocks})
    return of_model(scenario, model, retention and retention * model.alignment * sparse)


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
    for seed in range(30):
        rng = Random(seed)
        model = case(
            family, random_engine(rng), rng.choice([1, 1, 2, 3]), rng.randint(0, 64), rng.choice([0, 0, None, 2])
        )
        seen.update(compare(model, trace_of([random_ask(rng) for _ in range(rng.randint(1, 40))])))
    assert min(seen[what] for what in ("PREEMPTED", "FINISHED", "evicted", "hits")) > 0, seen


def random_engine(rng):
    instances, block_size, cache_len = rng.choice([1, 1, 2]), rng.choice([1, 2, 3, 4, 8, 16]), rng.randint(20, 300)
    max_num_seqs, budget = rng.choice([2, 3, 5, 1024, 1024]), rng.choice([rng.randint(1, 80), rng.randint(1, 80), 8192])
    return engine(instances, block_size, cache_len, max_num_seqs, budget, rng.choice([0.0, 0.0, 0.04, 0.3]))


def random_ask(rng):
    def length():
        return rng.choice([rng.randint(0, 70), rng.randint(0, 9), 16 * rng.randint(0, 5)])

    start, of = rng.choice(["fresh", "fork", "fork", "turn"]), rng.randint(0, 39)
    output_len = rng.choice([rng.randint(0, 3), length()])
    gap_us, delay_us = rng.choice([0, 0, 0, 1, 5_000, 20_000]), rng.choice([0, 0, 1, 7_000, 100_000])
    return Ask(start, of, length(), length(), output_len, gap_us, delay_us)

"""Models of one and of several KV cache groups, and small runs of them in which much collides."""

from random import Random

from hypothesis import strategies as st

from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.kvsim.small_runs import Ask, engine, of_model, scenario_of, trace_of


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


def case(family, bounds, scarcity, width, retention, name="nopool-16"):
    """A scenario with such a model."""
    model = ModelSpec(family(bounds["engine.block_size"], width))
    sparse = any(isinstance(group, SlidingWindow | Recurrent) for group in model.groups)
    num_gpu_blocks = 1 + (bounds["engine.num_gpu_blocks"] - 1) * scarcity
    scenario = scenario_of(bounds | {"engine.num_gpu_blocks": num_gpu_blocks}, name)
    return of_model(scenario, model, retention and retention * model.alignment * sparse)


def random_run(family, seed):
    """(scenario, trace) without a pool."""
    return random_case(family, Random(seed), {}, "nopool-16")


def random_pool_run(family, seed):
    """(scenario, trace) with one."""
    rng = Random(seed)
    return random_case(family, rng, random_pool(rng), "pool-16")


def random_case(family, rng, pool, name):
    scarcity, width, retention = rng.choice([1, 1, 2, 3]), rng.randint(0, 64), rng.choice([0, 0, None, 2])
    scenario = case(family, random_engine(rng) | pool, scarcity, width, retention, name)
    return scenario, trace_of([random_ask(rng) for _ in range(rng.randint(1, 40))])


def random_pool(rng):
    choices = {
        "pool.segment_bytes_per_instance": [10**9, 10**6, 3 * 10**5],
        "pool.lookup_rtt_us": [0, 200, 5_000],
        "pool.lookup_deadline_ms": [1, 100],
        "pool.lease_ttl_ms": [1, 50, 10_000],
        "pool.offer_ttl_ms": [1, 50, 4_000],
        "pool.max_load_attempts": [1, 2, 3],
        "pool.max_storing_share": [0.01, 0.25, 1.0],
        "pool.admission": ["all", "all", "second_touch"],
        "pool.retention_interval": ['"all"', 0],
        "link.bandwidth_bytes_per_s": [10**7, 10**8, 10**10],
    }
    return {key: rng.choice(values) for key, values in choices.items()}


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

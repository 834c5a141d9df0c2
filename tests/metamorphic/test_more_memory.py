"""More memory under LRU never lowers hits on equal blocks: a smaller LRU cache holds a part of what a larger one holds.

(Mattson et al., "Evaluation techniques for storage hierarchies", 1970: inclusion.) The law asks that both caches see
the same uses in the same order. So it holds
- of hit-rate curves, request by request;
- of whole runs whose requests come one after the other and find nothing on the GPU: each is looked up, computed and
  stored before the next one arrives, so that time cannot change the order of uses. Host memory and pool, request by
  request.

It need not hold of a pool behind GPU caches: a block that is hit on the GPU is not asked for, so that its use is none
to the pool; which blocks these are, and when, depends on what the pool delivered. Such a run is here, and so is FIFO.
"""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from kvcore.units import div_ceil
from kvsim.events import Kind
from kvsim.hits import CURVES, Accesses
from kvsim.metrics import Events
from kvsim.run import simulation
from kvsim.workload.builder import TraceBuilder
from tests.kvsim.small_runs import ASKS, Ask, scenario_of, trace_of

CAPACITIES_BLOCKS = (1, 2, 3, 4, 5, 8, 13, 21, 34, 200)


def never_falls(hits):
    """Whether no request has fewer hits in any cache than in the smaller one before it."""
    return all((larger >= smaller).all() for smaller, larger in pairwise(hits))


# --- curves ---------------------------------------------------------------------------------------------------------


@given(ASKS)
def test_curves_of_lru_never_fall(asks):
    assert never_falls(list(CURVES["lru"](Accesses(trace_of(asks)), CAPACITIES_BLOCKS)))


def single_blocks(names):
    """Requests of one block each; equal names are equal blocks."""
    builder, streams = TraceBuilder(), {}
    for at, name in enumerate(names):
        stream = streams.setdefault(name, len(streams))
        builder.start(at, None, 0, 0)
        builder.hold(16, 1, [(stream, 16)], 1_000 + at, 1)
    return builder.build("single blocks", "theory", 16)


@pytest.mark.parametrize(("policy", "num_hits"), [("fifo", [3, 2]), ("lru", [2, 4]), ("opt", [5, 6])])
def test_beladys_sequence_has_an_anomaly_with_fifo_alone(policy, num_hits):
    # Belady, Nelson and Shedler, CACM 1969: 9 faults with 3 frames, 10 with 4.
    hits = list(CURVES[policy](Accesses(single_blocks([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5])), (3, 4)))
    assert [int(each.sum()) for each in hits] == num_hits
    assert never_falls(hits) is (policy != "fifo")


# --- whole runs -----------------------------------------------------------------------------------------------------

BLOCK_SIZE = 16
NOTHING_ELSE_RUNS_US = 10**9
ONE_BY_ONE_LRU = {
    "cluster.instances": 1,
    "engine.block_size": BLOCK_SIZE,
    "pool.eviction": "lru",
    "pool.lease_ttl_ms": 0,
    "pool.eviction_high_watermark_ratio": 1.0,
    "pool.eviction_ratio": 1e-6,
}
"""A pool that evicts one object when there is no room for another, and only then."""

BLOCK_BYTES = scenario_of(ONE_BY_ONE_LRU, "pool-16").block_bytes[0]
TIERS = {
    "pool": lambda num_blocks: {"pool.segment_bytes_per_instance": num_blocks * BLOCK_BYTES},
    "host": lambda num_blocks: {
        "pool.segment_bytes_per_instance": BLOCK_BYTES,
        "host.cpu_bytes_to_use": num_blocks * BLOCK_BYTES,
    },
}
"""Settings that give a tier so many blocks; behind host memory the pool has one."""


def one_after_the_other(seed):
    """Prompts that mostly begin as an earlier one does."""
    rng = random.Random(seed)
    return [
        Ask(
            start=rng.choice(["fresh", "fork", "fork", "fork"]),
            of=rng.randrange(40),
            cut=rng.choice([16, 64, 100, 200, 400]),
            new_len=rng.choice([1, 17, 33, 60]),
            output_len=rng.choice([1, 1, 5, 30]),
            gap_us=NOTHING_ELSE_RUNS_US,
        )
        for _ in range(30)
    ]


def gpu_blocks(asks):
    """What the longest request needs."""
    trace = trace_of(asks)
    return max(div_ceil(length, BLOCK_SIZE) for length in (trace.input_len + trace.output_len.clip(min=1)).tolist())


def with_cold_gpu(asks):
    """Between any two requests one that shares nothing and fills the GPU, so that nothing is found there."""
    filler = Ask(new_len=gpu_blocks(asks) * BLOCK_SIZE - 1, output_len=1, gap_us=NOTHING_ELSE_RUNS_US)
    moved = (replace(ask, of=2 * (ask.of % at) if at else 0) for at, ask in enumerate(asks))
    return [each for ask in moved for each in (ask, filler)]


def hit_lens(tier, num_blocks, asks):
    """Hit of each request, in tokens."""
    settings = ONE_BY_ONE_LRU | {"engine.num_gpu_blocks": 1 + gpu_blocks(asks)} | TIERS[tier](num_blocks)
    run = simulation(scenario_of(settings, "pool-16"), trace_of(asks))
    run.run()
    admitted = Events(run.log).of(Kind.ADMITTED)
    assert admitted.request.tolist() == list(range(len(asks))), "they come one after the other"
    return admitted.a + admitted.b


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seed", range(8))
def test_more_memory_never_lowers_a_hit_in_a_whole_run(tier, seed):
    asks = with_cold_gpu(one_after_the_other(seed))
    hits = [hit_lens(tier, num_blocks, asks) for num_blocks in (60, 85, 120, 170, 240, 1_200)]
    assert never_falls(hits)
    assert np.sum(hits[0]) < np.sum(hits[-1])


def test_the_law_rejects_runs_in_which_gpu_hits_hide_uses_from_the_pool():
    runs = (one_after_the_other(seed) for seed in range(30))
    capacities = (10, 14, 20, 28, 40, 60)
    assert not all(never_falls([hit_lens("pool", blocks, asks) for blocks in capacities]) for asks in runs)

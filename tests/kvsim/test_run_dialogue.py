"""Lookups of several rounds in a run: what each takes, deadlines between them, and that a jump is exact."""

from collections import defaultdict
from dataclasses import replace

import pytest

import kvcore.frontier
from kvsim.clock import PS_PER_US
from kvsim.events import Kind
from kvsim.invariants import check
from kvsim.run import simulation
from tests.kvsim.small_runs import Ask, engine, events, scenario_of, trace_of

BLOCK = 16
NUM_BLOCKS = 2_000
"""Of the prompt that comes back: 126 in the first round, 500 in the second, the others in the third."""
RTT_US = 60_000
FIRST = Ask(new_len=NUM_BLOCKS * BLOCK, output_len=1)
COMES_BACK = Ask("fork", of=0, cut=NUM_BLOCKS * BLOCK, new_len=40, output_len=20, gap_us=5_000_000)
BUSY = [Ask(new_len=30, output_len=3_000), Ask(new_len=40, output_len=3_000)]
"""Both instances decode meanwhile; the prompt that comes back is the other instance's."""


@pytest.fixture(autouse=True)
def three_batches(monkeypatch):
    """Of a sequence this short too."""
    monkeypatch.setattr(kvcore.frontier, "LONG_BATCH_HITS", 0)


def settings(deadline_ms):
    return engine(2, BLOCK, 80_000, 8, 8_192, 0.0) | {
        "pool.segment_bytes_per_instance": 10**12,
        "pool.lookup_rtt_us": RTT_US,
        "pool.lookup_per_key_ns": 0,
        "pool.lookup_deadline_ms": deadline_ms,
        "link.bandwidth_bytes_per_s": 10**11,
    }


def finished(deadline_ms, asks, max_jump=None):
    """The run, and the events of its last request by kind."""
    done = simulation(scenario_of(settings(deadline_ms), "pool-16"), trace_of(asks), max_jump)
    done.run()
    assert check(done) == "ok"
    happened = defaultdict(list)
    for time_ps, kind, request, *_ in events(done.log):
        if request == len(asks) - 1:
            happened[Kind(kind)].append(time_ps)
    return done, happened


def decided(done):
    return done.cluster.sequences[-1].kv.decisions


def test_a_whole_hit_takes_three_rounds():
    done, happened = finished(1_000, [FIRST, COMES_BACK])
    made = decided(done)
    assert made.granted_len == NUM_BLOCKS * BLOCK
    (arrived_ps,), (loaded_ps,) = happened[Kind.ARRIVED], happened[Kind.LOADED]
    link = done.pool.paths[1].get_link
    load_ps = loaded_ps - arrived_ps - 3 * RTT_US * PS_PER_US
    assert 0 < load_ps and link.moved_bytes == NUM_BLOCKS * done.scenario.block_bytes[0]
    assert load_ps < 2 * link.moved_bytes * 10**12 // 10**11, "nothing else takes long"


@pytest.mark.parametrize(("num_rounds", "hit_blocks"), [(0, 0), (1, 126), (2, 626)])
def test_a_request_proceeds_exactly_at_the_deadline_between_two_rounds(num_rounds, hit_blocks):
    """With what the rounds so far have found."""
    deadline_ms = (num_rounds * RTT_US + RTT_US // 2) // 1_000
    before = finished(1_000, [FIRST])[0].pool.store.counters.lookups
    done, happened = finished(deadline_ms, [FIRST, COMES_BACK])
    (arrived_ps,), (admitted_ps,) = happened[Kind.ARRIVED], happened[Kind.ADMITTED]
    assert admitted_ps == arrived_ps + deadline_ms * 1_000 * PS_PER_US
    made = decided(done)
    assert (made.granted_len, made.late_lookups, made.late_answers) == (hit_blocks * BLOCK, 1, 1)
    assert done.pool.store.counters.lookups == before + num_rounds + 1, "a round begun before the deadline is the last"


@pytest.mark.parametrize(("num_rounds", "hit_blocks"), [(1, 126), (2, 626), (3, NUM_BLOCKS)])
def test_what_is_answered_at_the_instant_of_the_deadline_counts(num_rounds, hit_blocks):
    """The answer is taken first, then the request proceeds with what it proves."""
    done, _ = finished(num_rounds * RTT_US // 1_000, [FIRST, COMES_BACK])
    made = decided(done)
    assert (made.granted_len, made.late_lookups) == (hit_blocks * BLOCK, int(hit_blocks < NUM_BLOCKS))


@pytest.mark.parametrize("deadline_ms", [30, 90, 120, 150, 180, 1_000])
def test_a_jump_is_exact_when_a_deadline_falls_between_two_rounds(deadline_ms):
    asks = [*BUSY, FIRST, replace(COMES_BACK, of=2)]
    jumping, stepping = (finished(deadline_ms, asks, max_jump) for max_jump in (None, 1))
    assert jumping[0].clock.num_events < stepping[0].clock.num_events / 5, "it jumps"
    assert events(jumping[0].log) == events(stepping[0].log)
    assert decided(jumping[0]) == decided(stepping[0])
    assert bool(decided(jumping[0]).granted_len) == (deadline_ms > 60), "a round had been answered"

"""Many decode steps taken as one jump give exactly the log of step by step."""

from collections import Counter
from random import Random

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from kvsim.config.cluster import ROUTINGS
from kvsim.config.pool import ADMISSIONS, EVICTIONS, LOADINGS
from kvsim.events import Kind
from kvsim.instance import Jump
from kvsim.invariants import check
from kvsim.run import simulation
from kvsim.scheduler import Scheduler
from kvsim.workload.load import load_trace
from tests.kvsim.small_runs import ASKS, ENGINES, POOLS, Ask, engine, events, scenario_of, trace_of
from tests.support import shared_data

# A decode step of a real model takes milliseconds and its slope is tens of nanoseconds a token; small numbers collide.
SCALES = st.sampled_from([1, 10, 10**9])


@st.composite
def jumps(draw):
    scale = draw(SCALES)
    base_ps, slope_ps = draw(st.integers(1, 9)) * scale, draw(st.integers(0, 9)) * scale // 10
    context, batch = draw(st.integers(0, 1000)), draw(st.integers(1, 300))
    if slope_ps and draw(st.booleans()):  # falling, but never to nothing within the steps that are looked at
        slope_ps = -slope_ps
        base_ps -= slope_ps * (context + batch * 10**4)
    return (
        Jump(draw(st.integers(0, 10**15)), 10**4, base_ps, slope_ps, context, batch),
        base_ps,
        slope_ps,
        context,
        batch,
    )


@given(jumps(), st.integers(1, 60))
def test_the_closed_form_is_the_sum_of_the_steps(jump, num_steps):
    jump, base_ps, slope_ps, context, batch = jump
    steps_ps = [base_ps + slope_ps * (context + step * batch) for step in range(num_steps)]
    assert jump.end_of_step(num_steps) == jump.start_ps + sum(steps_ps)


def searched(jump, time_ps):
    """Smallest number of steps, at least 1, that end at `time_ps` or later."""
    steps = 1
    while jump.end_of_step(steps) < time_ps:
        steps += 1
    return steps


@given(jumps(), st.integers(0, 300), st.integers(-3, 3), st.floats(0, 1))
def test_the_root_is_the_smallest_number_of_steps(jump, num_steps, off_ps, fraction):
    jump = jump[0]
    step_ps = jump.end_of_step(num_steps + 1) - jump.end_of_step(num_steps)
    for time_ps in (jump.end_of_step(num_steps) + off_ps, jump.end_of_step(num_steps) + round(fraction * step_ps)):
        assert jump.steps_until(time_ps) == searched(jump, time_ps)


def both(scenario, trace):
    """(jumping, stepping), both run; raises AssertionError unless the logs are equal."""
    jumping, stepping = simulation(scenario, trace), simulation(scenario, trace, max_jump=1)
    jumping.run()
    stepping.run()
    assert jumping.decisions() == stepping.decisions()
    assert events(jumping.log) == events(stepping.log)
    assert jumping.log.digest() == stepping.log.digest()
    return jumping, stepping


def differs(scenario, trace):
    try:
        both(scenario, trace)
    except AssertionError:
        return True
    return False


def seen_in(jumping, stepping):
    """What happened, to know that the comparison was about something."""
    kinds = Counter(Kind(event[1]).name for event in events(jumping.log))
    evicted = sum(instance.scheduler.blocks.num_evicted for instance in jumping.instances)
    return kinds + Counter(jumped=jumping.clock.num_events < stepping.clock.num_events, evicted=evicted)


# A preempted sequence that hits what another one still holds: it is admitted in the step after the one that preempts.
HELD_BY_ANOTHER = [
    Ask(new_len=5, output_len=2),
    Ask("turn", of=0, new_len=1, output_len=2, delay_us=1),
    Ask(),
    Ask(),
    Ask(gap_us=1),
    Ask(new_len=30, output_len=5),
    Ask(new_len=46, output_len=5),
    Ask("fork", of=1, cut=8, new_len=30, output_len=5),
]


# A session that comes back to the other instance, which loads what the first one stored.
ROOMY_POOL = {
    "pool.segment_bytes_per_instance": 10**9,
    "pool.lookup_rtt_us": 200,
    "pool.lookup_per_key_ns": 0,
    "pool.lookup_deadline_ms": 100,
    "pool.lease_ttl_ms": 10_000,
    "link.bandwidth_bytes_per_s": 10**10,
}
COMES_BACK = [Ask(new_len=64, output_len=20), Ask("turn", of=0, new_len=5, output_len=20, delay_us=100_000)]

# A full pool refuses blocks of a sequence that is preempted, hits them and offers them again while it only decodes.
SMALL_POOL = ROOMY_POOL | {"pool.segment_bytes_per_instance": 3 * 10**6, "link.bandwidth_bytes_per_s": 10**8}
OFFERED_AGAIN = [
    Ask(new_len=64, output_len=48),
    Ask("fork", of=0, cut=41, new_len=1, output_len=0),
    Ask(new_len=0, output_len=0),
    Ask(new_len=17, output_len=0),
    Ask("turn", of=0, new_len=48, output_len=3),
]


def test_without_a_pool():
    seen = Counter()

    @given(ENGINES, ASKS)
    @example(engine(1, 4, 133, 5, 8192, 0.0), HELD_BY_ANOTHER)
    def agree(settings, asks):
        runs = both(scenario_of(settings), trace_of(asks))
        assert check(runs[0]) == "ok"
        seen.update(seen_in(*runs))

    agree()
    assert min(seen[what] for what in ("jumped", "evicted", "PREEMPTED", "FINISHED")) > 0, seen


# Stores pin nearly all blocks of the engine; meanwhile an offer grows old, and the local hit grows until it is whole.
PINNED_POOL = {"pool.segment_bytes_per_instance": 10**9, "link.bandwidth_bytes_per_s": 10**8} | {
    "pool.offer_ttl_ms": 50,
    "pool.max_storing_share": 1.0,
}
PINNED_ENGINE = engine(1, 4, 96, 1024, 37, 0.3)
HIT_GROWS = [
    Ask("turn", of=5, cut=7, new_len=32, output_len=0, gap_us=20000),
    Ask(of=31, cut=3, new_len=69, output_len=0, gap_us=20000, delay_us=7000),
    Ask("fork", of=35, cut=64, new_len=16, output_len=0, gap_us=20000),
    Ask("turn", of=33, cut=16, new_len=32, output_len=16, delay_us=7000),
    Ask("fork", of=17, cut=45, new_len=0, output_len=5, gap_us=1, delay_us=1),
    Ask("fork", of=28, cut=3, new_len=16, output_len=16),
    Ask("turn", of=32, cut=26, new_len=64, output_len=2, delay_us=1),
    Ask("fork", of=8, cut=1, new_len=80, output_len=80, gap_us=5000),
    Ask("fork", of=9, cut=0, new_len=80, output_len=37, gap_us=1),
    Ask("fork", of=39, cut=48, new_len=63, output_len=47, gap_us=20000),
    Ask(of=8, cut=80, new_len=57, output_len=1, gap_us=1),
    Ask("turn", of=5, cut=7, new_len=32, output_len=0, gap_us=20000),
]

NAMED = ("cluster.routing", "pool.eviction", "pool.admission", "pool.loading", "pool.session_pin")


def test_with_a_pool():
    seen = Counter()

    @given(ENGINES, POOLS, ASKS)
    @example(engine(2, 16, 300, 1024, 8192, 0.0), ROOMY_POOL, COMES_BACK)
    @example(PINNED_ENGINE, PINNED_POOL, HIT_GROWS)
    @example(engine(1, 1, 178, 1, 8192, 0.0), SMALL_POOL | {"pool.lease_ttl_ms": 1}, OFFERED_AGAIN)
    def agree(settings, pool, asks):
        runs = both(scenario_of(settings | pool, "pool-16"), trace_of(asks))
        assert check(runs[0]) == check(runs[1]) == "ok"
        seen.update(seen_in(*runs))
        seen.update(value for key, value in pool.items() if key in NAMED)

    agree()
    policies = {*EVICTIONS, *ADMISSIONS, *LOADINGS, *ROUTINGS, "soft", "hard"}
    assert min(seen[what] for what in ("jumped", "LOADED", "STORED", "FINISHED")) > 0, seen
    assert len(policies & seen.keys()) > len(policies) // 2, seen


@given(st.randoms(use_true_random=False))
def test_when_identical_instances_do_everything_at_the_same_instant(rng):
    """Which session of several that end at once is routed first must not depend on who set its alarm first."""
    firsts = [Ask(new_len=32, output_len=rng.choice([4, 8])) for _ in range(rng.randint(2, 6))]
    later = [
        Ask("turn", of=rng.randrange(40), new_len=16, output_len=rng.choice([4, 8]), delay_us=rng.choice([0, 0, 1000]))
        for _ in range(rng.randint(2, 30))
    ]
    both(
        scenario_of(engine(rng.choice([2, 3, 4]), 8, rng.choice([250, 16_000]), 1024, 8192, 0.0)),
        trace_of(firsts + later),
    )


@pytest.mark.parametrize("name", ["nopool-16", "pool-16"])
def test_a_recorded_trace(name):
    trace = load_trace(shared_data("mooncake_conversation_trace.jsonl.gz")).head(600)
    runs = both(scenario_of({"cluster.instances": 2, "engine.num_gpu_blocks": 9_000}, name), trace)
    assert check(runs[0]) == "ok"
    seen = seen_in(*runs)
    assert min(seen[what] for what in ("jumped", "evicted", "PREEMPTED")) > 0, seen


# --- negative controls: each wrong jump is found ----------------------------------------------------------------------


def late(jump, time_ps):
    """One step too many before what arrived is looked at."""
    return searched(jump, time_ps) + 1


def greedy(scheduler, step):
    """As if memory were never short."""
    return min(sequence.remaining_output for sequence, _, _ in step.scheduled)


def deaf(scheduler, step):
    """As if a step that preempts had considered who waits."""
    preempted, step.preempted = step.preempted, []
    try:
        return ORIGINAL_LIMIT(scheduler, step)
    finally:
        step.preempted = preempted


ORIGINAL_LIMIT = Scheduler.jump_limit


@pytest.mark.parametrize(("owner", "method", "wrong"), [(Jump, "steps_until", late), (Scheduler, "jump_limit", greedy)])
def test_a_wrong_jump_is_found(monkeypatch, owner, method, wrong):
    monkeypatch.setattr(owner, method, wrong)
    only_search = settings(max_examples=2_000, phases=[Phase.generate], database=None)
    cases = st.tuples(ENGINES, ASKS)
    find(cases, lambda case: differs(scenario_of(case[0]), trace_of(case[1])), settings=only_search, random=Random(0))


def test_a_jump_after_a_preemption_is_found(monkeypatch):
    monkeypatch.setattr(Scheduler, "jump_limit", deaf)
    assert differs(scenario_of(engine(1, 4, 133, 5, 8192, 0.0)), trace_of(HELD_BY_ANOTHER))

"""What a mode makes of a run: how many sessions are open, who waits for whom, where it ends. Read off the event log."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvsim.clock import PS_PER_MS, PS_PER_S, PS_PER_US
from kvsim.config.mode import Mode
from kvsim.events import Kind
from kvsim.invariants import check
from kvsim.metrics import measure
from kvsim.run import simulation
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.offered import offered
from tests.kvsim.command import under_hash_seeds
from tests.kvsim.small_runs import ENGINES, POOLS, engine, scenario_of

ROOMY = engine(2, 16, 4_000, 1024, 8192, 0.0)


@dataclass(frozen=True)
class Turn:
    """One request of a session: what is new in its prompt, its answer, and when it was recorded to start."""

    new_len: int
    output_len: int
    gap_us: int
    pause_us: int = 0


TURNS = st.builds(
    Turn, st.integers(1, 60), st.integers(0, 20), st.sampled_from([0, 1, 5_000, 90_000]), st.sampled_from([0, 7_000])
)


@st.composite
def traces(draw):
    """Sessions of one to four turns that share nothing; later turns follow the one before, or all do not."""
    sessions = draw(st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=7))
    is_closed = draw(st.booleans())
    assume(any(len(turns) > 1 for turns in sessions))
    return trace_of(sessions, is_closed, draw(st.sampled_from([0, 3_000])))


def trace_of(sessions, is_closed=True, spread_us=0):
    builder = TraceBuilder()
    for session, turns in enumerate(sessions):
        start_ps, held_len = session * spread_us * PS_PER_US, 0
        for position, turn in enumerate(turns):
            start_ps += turn.gap_us * PS_PER_US if position else 0
            after = len(builder) - 1 if position and is_closed else None
            builder.start(start_ps, after, turn.pause_us * PS_PER_US if after is not None else 0, session)
            input_len = held_len + turn.new_len
            builder.hold(input_len, turn.output_len, [(session, input_len)], session, 1)
            held_len = input_len + turn.output_len
    return builder.build("sessions", "test", 1)


@dataclass(frozen=True)
class Life:
    """Of one request, in picoseconds."""

    arrived_ps: int
    ended_ps: int


def run_of(settings, trace, keys, name="nopool-16"):
    """(simulation that ran and kept its invariants, the trace as offered)."""
    config = scenario_of(settings | {f"workload.{key}": value for key, value in keys.items()}, name)
    moved = offered(trace, config.workload, seed=3)
    done = simulation(config, moved)
    done.run()
    assert check(done) == "ok"
    return done, moved


def rows(log):
    flat = log.told().tolist()
    return [tuple(flat[at : at + log.WIDTH]) for at in range(0, len(flat), log.WIDTH)]


def lives(log):
    """By request; those that ended."""
    arrived, ended = {}, {}
    for time_ps, kind, request, _, _ in rows(log):
        if kind == Kind.ARRIVED:
            arrived[request] = time_ps
        elif kind in (Kind.FINISHED, Kind.REJECTED):
            ended[request] = time_ps
    return {request: Life(arrived[request], end_ps) for request, end_ps in ended.items()}


def most_open(log, trace):
    """The largest number of sessions that were open at one instant, from first arrival to last end."""
    found = lives(log)
    changes = []
    for session in set(trace.session.tolist()):
        own = [found[request] for request in range(trace.num_requests) if trace.session[request] == session]
        changes.append((min(life.arrived_ps for life in own), 1, +1))
        changes.append((max(life.ended_ps for life in own), 0, -1))  # an end makes room for a start of the same instant
    level = most = 0
    for _, _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


# --- N at a time ------------------------------------------------------------------------------------------------------


@given(traces(), st.integers(1, 4), st.sampled_from(["recorded", "open"]))
def test_never_more_than_n_sessions_are_open_and_n_are_reached(trace, limit, pacing):
    assume(pacing == "recorded" or (trace.arrival_ps > 0).any())
    keys = {"starts": "all_at_once", "max_sessions": limit, "pacing": pacing}
    try:
        done, moved = run_of(ROOMY, trace, keys)
    except ValueError as error:
        assume("does not record" not in str(error))
        raise
    assert most_open(done.log, moved) == min(limit, trace.num_sessions)


def test_the_count_of_open_sessions_sees_one_too_many():
    sessions = [[Turn(40, 20, 0), Turn(9, 9, 0)]] * 5
    done, moved = run_of(ROOMY, trace_of(sessions), {"starts": "all_at_once"})
    assert most_open(done.log, moved) == 5


def test_the_next_session_starts_when_one_ends_and_keeps_its_distances():
    sessions = [[Turn(40, 20, 0), Turn(9, 9, 50_000)]] * 4
    done, moved = run_of(ROOMY, trace_of(sessions, is_closed=False), {"starts": "all_at_once", "max_sessions": 1})
    found = lives(done.log)
    by_session = [[i for i in range(8) if moved.session[i] == session] for session in range(4)]
    for before, after in pairwise(by_session):
        assert found[after[0]].arrived_ps == max(found[i].ended_ps for i in before)
    for first, second in by_session:
        assert found[second].arrived_ps - found[first].arrived_ps == 50_000 * PS_PER_US


def test_sessions_that_end_at_once_do_not_nest():
    """2,000 requests that fit no engine are rejected on arrival, one session after the other."""
    done, _ = run_of(engine(1, 16, 32, 8, 64, 0.0), trace_of([[Turn(60, 20, 0)]] * 2_000), {"max_sessions": 1})
    assert measure(done.log, 1).requests_rejected == 2_000


def test_all_at_once_is_what_a_generator_without_a_spread_does():
    settings = {"cluster.instances": 2, "workload.sessions": 6, "workload.turns": 3}
    from kvsim.workload.source import trace_of as workload_of

    digests = []
    for keys in ({}, {"starts": "all_at_once"}, {"starts": "all_at_once", "max_sessions": 6}, {"max_sessions": 2}):
        config = scenario_of(settings | {f"workload.{key}": value for key, value in keys.items()})
        done = simulation(config, workload_of(config))
        done.run()
        digests.append(done.log.digest())
    assert digests[0] == digests[1] == digests[2] != digests[3]


# --- closed loops -----------------------------------------------------------------------------------------------------


@given(traces(), st.sampled_from([0.0, 0.004, 0.5]))
def test_after_the_answer_is_the_end_and_the_pause(trace, delay_s):
    done, moved = run_of(ROOMY, trace, {"pacing": "after_answer", "turn_delay_s": delay_s})
    found = lives(done.log)
    for request, before in enumerate(moved.after.tolist()):
        if before != request:
            assert found[request].arrived_ps == found[before].ended_ps + round(delay_s * PS_PER_S)


@given(traces(), st.sampled_from([0.0, 0.004, 0.5]))
def test_start_to_start_is_the_later_of_distance_and_answer(trace, delay_s):
    done, moved = run_of(ROOMY, trace, {"pacing": "start_to_start", "turn_delay_s": delay_s})
    found = lives(done.log)
    for request, before in enumerate(moved.after.tolist()):
        if before != request:
            earliest_ps = found[before].arrived_ps + round(delay_s * PS_PER_S)
            assert found[request].arrived_ps == max(found[before].ended_ps, earliest_ps)


def test_start_to_start_by_hand():
    """Recorded at 0, 1 us and 5 s: the second call waits for its answer, the third for its time."""
    done, _ = run_of(ROOMY, trace_of([[Turn(50, 9, 0), Turn(9, 9, 1), Turn(9, 9, 4_999_999)]]), START_TO_START)
    found = lives(done.log)
    assert found[0].ended_ps > PS_PER_MS
    assert found[1].arrived_ps == found[0].ended_ps
    assert found[2].arrived_ps == found[1].arrived_ps + 4_999_999 * PS_PER_US
    plain, _ = run_of(ROOMY, trace_of([[Turn(50, 9, 0), Turn(9, 9, 1), Turn(9, 9, 4_999_999)]]), {})
    assert lives(plain.log)[2].arrived_ps == lives(plain.log)[1].ended_ps, "as recorded: after the answer"


START_TO_START = {"pacing": "start_to_start"}


@given(traces())
def test_an_open_replay_starts_when_it_was_recorded_to(trace):
    assume((trace.arrival_ps[trace.after != range(trace.num_requests)] > 0).any())
    try:
        done, moved = run_of(ROOMY, trace, {"pacing": "open"})
    except ValueError as error:
        assume("does not record" not in str(error))
        raise
    assert [life.arrived_ps for _, life in sorted(lives(done.log).items())] == moved.arrival_ps.tolist()


# --- any mode ---------------------------------------------------------------------------------------------------------

STARTS = st.sampled_from(
    [
        {},
        {"starts": "all_at_once"},
        {"starts": "poisson", "rate_per_s": 30.0},
        {"starts": "ramp", "rate_per_s": 0.0, "end_rate_per_s": 50.0, "ramp_s": 0.1},
        {"starts": "diurnal", "rate_per_s": 30.0, "peak_ratio": 2.0, "period_s": 0.2},
        {"starts": "diurnal", "rate_per_s": 30.0, "profile": [1, 0, 3], "period_s": 0.2},
    ]
)
PACINGS = st.sampled_from(
    [{}, *({"pacing": pacing, "turn_delay_s": 0.01} for pacing in ("open", "after_answer", "start_to_start"))]
)
LIMITS = st.sampled_from([{}, {"max_sessions": 1}, {"max_sessions": 3}])
ANSWERS = st.sampled_from([{}, {"forced_output_len": 3}, {"min_output_len": 2}, {"max_output_len": 8}])
ENDS = st.sampled_from([{}, {"stop_after_s": 0.05}, {"stop_after_requests": 3}, {"stop_after_sessions": 1}])
MODES = st.builds(lambda *parts: {key: value for part in parts for key, value in part.items()}, STARTS, PACINGS, LIMITS)


@given(traces(), MODES, ANSWERS, ENGINES, st.one_of(st.none(), POOLS))
def test_every_mode_lets_all_requests_end_in_the_order_of_their_session(trace, mode, answers, machine, pool):
    name = "nopool-16" if pool is None else "pool-16"
    done, moved = run_of(machine | (pool or {}), trace, mode | answers, name)
    found = lives(done.log)
    assert len(found) == trace.num_requests
    for session in set(moved.session.tolist()):
        arrivals = [found[i].arrived_ps for i in range(moved.num_requests) if moved.session[i] == session]
        assert arrivals == sorted(arrivals)
    assert Mode(**mode, **answers).chosen().items() >= (mode | answers).items() or "profile" in mode


# --- the end of a run -------------------------------------------------------------------------------------------------


@given(traces(), MODES, ENDS, ENGINES, st.one_of(st.none(), POOLS))
def test_a_run_that_is_stopped_is_the_beginning_of_the_one_that_is_not(trace, mode, end, machine, pool):
    """Nothing knows of the end before it comes: neither router nor scheduler nor pool."""
    name = "nopool-16" if pool is None else "pool-16"
    whole, _ = run_of(machine | (pool or {}), trace, mode, name)
    stopped, _ = run_of(machine | (pool or {}), trace, mode | end, name)
    told, metrics = rows(stopped.log), measure(stopped.log, 1)
    lasting = [row for row in told if row[1] != Kind.STOPPED]
    assert lasting == rows(whole.log)[: len(lasting)]
    assert metrics.requests_completed + metrics.requests_rejected + metrics.requests_stopped == trace.num_requests
    if not metrics.requests_stopped:
        assert lasting == rows(whole.log)
    else:
        end_ps = told[-1][0]
        assert all(row[0] == end_ps for row in told if row[1] == Kind.STOPPED)
        later = rows(whole.log)[len(lasting) :]
        assert all(row[0] > end_ps for row in later), "all of the instant is told"


SESSIONS = [[Turn(50, 9, 0), Turn(20, 9, 0)], [Turn(50, 9, 0), Turn(20, 9, 0), Turn(20, 9, 0)]]


@pytest.mark.parametrize(
    ("end", "completed", "arrived"),
    [({"stop_after_sessions": 1}, 4, 5), ({"stop_after_requests": 1}, 2, 4), ({"stop_after_s": 1e-6}, 0, 2)],
)
def test_the_end_by_hand(end, completed, arrived):
    """Two sessions in step on one instance: two and three turns, of which each pair ends at once."""
    done, _ = run_of(ROOMY | {"cluster.instances": 1}, trace_of(SESSIONS), end)
    told = rows(done.log)
    metrics = measure(done.log, 1)
    assert (metrics.requests_completed, metrics.requests_stopped) == (completed, 5 - completed)
    assert sum(kind == Kind.ARRIVED for _, kind, _, _, _ in told) == arrived
    assert sum(a for _, kind, _, a, _ in told if kind == Kind.STOPPED) == arrived - completed
    assert metrics.simulated_s == told[-1][0] / PS_PER_S
    if "stop_after_s" in end:
        assert metrics.simulated_s == 1e-6
    assert (metrics.throughput_tokens_per_s is not None) == (completed > 0 or "stop_after_s" in end)


def test_an_end_that_does_not_come_changes_nothing():
    whole, _ = run_of(ROOMY, trace_of(SESSIONS), {})
    for end in ({"stop_after_s": 1e6}, {"stop_after_requests": 5}, {"stop_after_sessions": 2}):
        done, _ = run_of(ROOMY, trace_of(SESSIONS), end)
        assert done.log.digest() == whole.log.digest()
        assert measure(done.log, 1) == measure(whole.log, 1)


def test_a_load_that_had_not_ended_counts_in_no_hit_rate():
    """A run is stopped at every event of one that loads: what was granted and not loaded is in neither side."""
    shared = [[Turn(256, 2, 0), Turn(16, 2, 0, pause_us=10**6)]] * 5
    settings = ROOMY | {"cluster.instances": 2, "cluster.routing": "round_robin"}
    whole, _ = run_of(settings, trace_of(shared), {}, "pool-16")
    times_ps = sorted({row[0] for row in rows(whole.log)})
    seen = set()
    for end_ps in times_ps[1:-1]:
        done, moved = run_of(settings, trace_of(shared), {"stop_after_s": (end_ps + 1) / PS_PER_S}, "pool-16")
        rate, told = measure(done.log, 1).hit_rate_external, rows(done.log)
        assert rate == external_hit_rate(told, moved.input_len, counts_loading=False)
        seen.add((bool(rate), rate != external_hit_rate(told, moved.input_len, counts_loading=True)))
    assert (True, True) in seen, "some run is stopped after one load and in the middle of another"


def external_hit_rate(told, input_len, counts_loading):
    """Of the requests that had what they were granted, or of all that were admitted."""
    loaded = {request for _, kind, request, _, _ in told if kind == Kind.LOADED}
    admitted = [(request, b) for _, kind, request, _, b in told if kind == Kind.ADMITTED]
    counted = [(request, b) for request, b in admitted if counts_loading or not b or request in loaded]
    prompt_len = sum(input_len[request] for request, _ in counted)
    return sum(b for _, b in counted) / prompt_len if prompt_len else None


# --- determinism ------------------------------------------------------------------------------------------------------

PROBE = """
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.source import trace_of
keys = ["starts=ramp", "rate_per_s=0.1", "end_rate_per_s=3", "ramp_s=9", "max_sessions=5", "stop_after_sessions=6",
        "pacing=start_to_start", "turn_delay_s=20", "max_output_len=100", "sessions=12", "turns=4"]
config = load("pool-16", ["cluster.instances=2", *("workload." + key for key in keys)])
done = simulation(config, trace_of(config))
done.run()
print(done.log.digest(), len(done.log))
"""


def test_one_digest_under_any_hash_seed():
    assert len(under_hash_seeds(PROBE)) == 1

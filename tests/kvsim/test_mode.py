"""Modes: what a mode makes of a trace, what makes no sense and how that is said."""

import numpy as np
import pytest

from kvcore.errors import InvalidArgument
from kvsim import scenario
from kvsim.config.mode import Mode
from kvsim.config.workload import TraceWorkload
from kvsim.results import scenario_toml
from kvsim.toml import InvalidToml
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.offered import offered
from kvsim.workload.trace import columns_of

S = 10**12


def trace_of(*rows, closed=True):
    """A trace of (session, start_s, pause_s): a session's later rows wait for the one before, if `closed`."""
    builder, last = TraceBuilder(), {}
    for index, (session, start_s, pause_s) in enumerate(rows):
        after = last.get(session) if closed else None
        builder.start(round(start_s * S), after, round(pause_s * S) if after is not None else 0, session)
        builder.hold(100 * (1 + index), 10, [(session, 100 * (1 + index))], session, 1)
        last[session] = index
    return builder.build("rows", "test", 100)


SESSIONS = ((0, 1, 0), (1, 2, 0), (0, 5, 3), (1, 6, 1), (0, 9, 2))
SINGLES = ((0, 1, 0), (1, 4, 0), (2, 6, 0))


def starts_s(trace):
    return (trace.arrival_ps / S).tolist()


def equal(left, right):
    return all(np.array_equal(a, b) for a, b in zip(columns_of(left), columns_of(right), strict=True))


# --- starts -----------------------------------------------------------------------------------------------------------


def test_a_mode_that_says_nothing_changes_nothing():
    trace = trace_of(*SESSIONS)
    assert offered(trace, Mode()) is trace
    assert offered(trace, Mode(max_sessions=3, stop_after_s=9.0)) is trace


def test_all_at_once_moves_whole_sessions():
    trace = offered(trace_of(*SESSIONS), Mode(starts="all_at_once"))
    assert starts_s(trace) == [0, 0, 4, 4, 8]
    assert trace.session.tolist() == [0, 1, 0, 1, 0]
    assert trace.after.tolist() == [0, 1, 0, 1, 2]
    assert trace.input_len.tolist() == [100, 200, 300, 400, 500]


def test_sessions_take_the_starts_in_their_recorded_order_and_rows_move_with_them():
    trace = trace_of(*SESSIONS)
    moved = offered(trace, Mode(starts="poisson", rate_per_s=0.01), seed=5)
    first, second = (moved.arrival_ps[moved.session == session] for session in (0, 1))
    assert first[0] < second[0]
    assert np.diff(first).tolist() == [4 * S, 4 * S]
    assert np.diff(second).tolist() == [4 * S]
    assert (np.diff(moved.arrival_ps) >= 0).all()
    for session in (0, 1):
        rows, before = np.flatnonzero(moved.session == session), np.flatnonzero(trace.session == session)
        assert moved.input_len[rows].tolist() == trace.input_len[before].tolist()
        assert moved.after[rows].tolist() == [rows[0], *rows[:-1]]
        assert [moved.segments(i, 10) for i in rows] == [trace.segments(i, 10) for i in before]
        assert moved.delay_ps[rows].tolist() == trace.delay_ps[before].tolist()


def test_one_seed_one_order_of_starts():
    trace = generate(Agentic(sessions=20, turns=2))
    mode = Mode(starts="ramp", rate_per_s=0.0, end_rate_per_s=3.0, ramp_s=20.0)
    assert equal(offered(trace, mode, 1), offered(trace, mode, 1))
    assert not equal(offered(trace, mode, 1), offered(trace, mode, 2))


def test_requests_without_sessions_start_one_by_one():
    trace = offered(trace_of(*SINGLES, closed=False), Mode(starts="poisson", rate_per_s=1.0))
    assert trace.session.tolist() == [0, 1, 2]
    assert len(set(starts_s(trace))) == 3


@pytest.mark.parametrize(("scale", "expected"), [(0.5, [0.5, 1, 2.5, 3, 4.5]), (3.0, [3, 6, 15, 18, 27])])
def test_recorded_times_are_scaled_starts_and_pauses_alike(scale, expected):
    trace = offered(trace_of(*SESSIONS), Mode(time_scale=scale))
    assert starts_s(trace) == expected
    assert (trace.delay_ps / S).tolist() == [0, 0, 3 * scale, scale, 2 * scale]


# --- pacing -----------------------------------------------------------------------------------------------------------


def test_open_replay_waits_for_nobody():
    trace = offered(trace_of(*SESSIONS), Mode(pacing="open"))
    assert starts_s(trace) == [1, 2, 5, 6, 9]
    assert trace.after.tolist() == [0, 1, 2, 3, 4]
    assert not trace.delay_ps.any()


def test_open_replay_at_equal_distances():
    trace = offered(trace_of(*SESSIONS), Mode(pacing="open", turn_delay_s=0.5))
    assert starts_s(trace) == [1, 1.5, 2, 2, 2.5]
    assert trace.session.tolist() == [0, 0, 1, 0, 1]
    assert trace.input_len.tolist() == [100, 300, 200, 500, 400]


@pytest.mark.parametrize("closed", [True, False])
def test_after_the_answer_by_one_pause(closed):
    trace = offered(trace_of(*SESSIONS, closed=closed), Mode(pacing="after_answer", turn_delay_s=7.0))
    for session, size in ((0, 3), (1, 2)):
        rows = np.flatnonzero(trace.session == session)
        assert len(rows) == size
        assert trace.after[rows].tolist() == [rows[0], *rows[:-1]]
        assert (trace.delay_ps[rows] / S).tolist() == [0] + [7] * (size - 1)


def test_after_the_answer_by_the_recorded_pauses():
    trace = trace_of(*SESSIONS)
    assert equal(offered(trace, Mode(pacing="after_answer")), trace)


@pytest.mark.parametrize("closed", [True, False])
def test_start_to_start_keeps_the_recorded_distances(closed):
    """Which the run reads off the starts: tests/kvsim/test_arrivals.py has the arithmetic."""
    trace = offered(trace_of(*SESSIONS, closed=closed), Mode(pacing="start_to_start"))
    assert starts_s(trace) == [1, 2, 5, 6, 9]
    assert trace.after.tolist() == [0, 1, 0, 1, 2]
    assert not trace.delay_ps.any()


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_forced_or_bounded():
    builder = TraceBuilder()
    for index, output_len in enumerate((0, 5, 50)):
        builder.start(0, None, 0, index)
        builder.hold(8, output_len, [(index, 8)], 10 + index, 1)
    trace = builder.build("answers", "test", 8)

    def lens(**keys):
        return offered(trace, Mode(**keys)).output_len.tolist()

    assert lens(forced_output_len=9) == [9, 9, 9]
    assert lens(min_output_len=6) == [6, 6, 50]
    assert lens(max_output_len=7) == [0, 5, 7]
    assert lens(min_output_len=3, max_output_len=20) == [3, 5, 20]


def test_a_shorter_answer_is_the_beginning_of_the_recorded_one():
    """The next prompt holds what was generated and, from where that ends, what was recorded."""
    trace = generate(Agentic(sessions=1, turns=2, common_len=0, first_len=64, turn_len=64, output_len=64))
    shorter = offered(trace, Mode(forced_output_len=32))
    assert shorter.segments(0, 16) == ((1, 0, 6),)
    assert shorter.segments(1, 16) == ((1, 0, 14),)


def test_a_longer_answer_is_another_text_that_no_prompt_is_taken_to_hold():
    trace = generate(Agentic(sessions=2, turns=2, common_len=0, first_len=64, turn_len=64, output_len=64))
    longer = offered(trace, Mode(forced_output_len=128))
    prompts = {stream for request in range(4) for stream, _, _ in longer.segments(request, 16) if stream <= 2}
    answers = [longer.segments(request, 16)[-1] for request in range(4)]
    assert prompts == {1, 2}
    assert [(start, end) for _, start, end in answers] == [(4, 12)] * 2 + [(12, 20)] * 2
    assert len({stream for stream, _, _ in answers} - prompts) == 4


# --- what makes no sense ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"starts": "poisson"}, "rate_per_s as well, which starts = poisson needs"),
        ({"starts": "ramp", "rate_per_s": 1.0, "ramp_s": 5.0}, "end_rate_per_s as well, which starts = ramp needs"),
        ({"rate_per_s": 1.0}, "rate_per_s with starts = poisson or ramp or diurnal, not recorded"),
        ({"starts": "poisson", "rate_per_s": 1.0, "ramp_s": 2.0}, "ramp_s with starts = ramp, not poisson"),
        ({"starts": "poisson", "rate_per_s": 0.0}, "rate_per_s above 0: at 0 no session starts"),
        ({"starts": "ramp", "rate_per_s": 1.0, "end_rate_per_s": 0.0, "ramp_s": 2.0}, "greater than 0"),
        ({"starts": "diurnal", "rate_per_s": 1.0}, "peak_ratio or profile with starts = diurnal, one of them"),
        ({"starts": "diurnal", "rate_per_s": 1.0, "peak_ratio": 1.5, "profile": [1]}, "one of them"),
        ({"starts": "diurnal", "rate_per_s": 1.0, "peak_ratio": 11.0}, "less than or equal to 10"),
        ({"starts": "diurnal", "rate_per_s": 1.0, "profile": [0, 0]}, "none below 0 and one above"),
        ({"starts": "diurnal", "rate_per_s": 1.0, "profile": 3}, "a list of rates of equal parts of the period"),
        ({"period_s": 60.0}, "period_s with starts = diurnal, not recorded"),
        ({"starts": "al_at_once"}, "'recorded', 'all_at_once', 'poisson', 'ramp' or 'diurnal'"),
        ({"turn_delay_s": 3.0}, "pacing = after_answer, start_to_start or open with turn_delay_s, or no turn_delay_s"),
        (
            {"starts": "all_at_once", "pacing": "open", "turn_delay_s": 1.0, "time_scale": 2.0},
            "no time_scale: with starts = all_at_once and turn_delay_s no recorded time is used",
        ),
        ({"forced_output_len": 3, "max_output_len": 9}, "forced_output_len or a bound"),
        ({"min_output_len": 9, "max_output_len": 3}, "min_output_len = 9 up to max_output_len = 3"),
        ({"forced_output_len": 2**32}, "less than 4294967296"),
        ({"starts": "all_at_once", "start_spread_s": 4.0}, "start_spread_s only with starts = recorded"),
        ({"max_sessions": 0}, "greater than 0"),
        ({"stop_after_s": 1e9}, "less than or equal to 9000000"),
    ],
)
def test_a_scenario_refuses_what_makes_no_sense_and_says_what_does(keys, says):
    settings = [f"workload.{key}={value}" for key, value in keys.items()]
    with pytest.raises(InvalidToml, match=r"pool-16\.toml: workload") as error:
        scenario.load("pool-16", settings)
    assert says in str(error.value)


NO_TIMES = generate(Agentic(sessions=2, turns=3))


@pytest.mark.parametrize(
    ("trace", "keys", "says"),
    [
        (trace_of(*SINGLES), {"pacing": "open"}, "workload.pacing = 'open': expected recorded, in a trace whose"),
        (trace_of(*SINGLES), {"stop_after_sessions": 1}, "stop_after_sessions = 1: expected stop_after_requests"),
        (trace_of(*SESSIONS, closed=False), {"pacing": "after_answer"}, "turn_delay_s with it: rows does not record"),
        (NO_TIMES, {"pacing": "start_to_start"}, "does not record when later turns start"),
        (NO_TIMES, {"pacing": "open"}, "does not record when later turns start"),
        (NO_TIMES, {"time_scale": 2.0}, "workload.time_scale = 2.0: expected 1: this trace records no times"),
        (trace_of(*SESSIONS), {"time_scale": 1e9}, "workload.time_scale = 1000000000.0: expected less than 1e.06"),
        (trace_of(*SESSIONS), {"starts": "poisson", "rate_per_s": 1e-9}, "a rate at which all 2 sessions start within"),
        (trace_of(*SESSIONS), {"pacing": "open", "turn_delay_s": 8e6}, "workload.turn_delay_s = 8000000.0: expected"),
    ],
)
def test_a_trace_refuses_what_it_cannot_be_offered_in(trace, keys, says):
    with pytest.raises(InvalidArgument, match=says):
        offered(trace, Mode(**keys))


def test_sessions_that_wait_for_others_stay_as_they_are_recorded():
    builder = TraceBuilder()
    for session in (0, 1):
        builder.start(0, 0 if session else None, 0, session)
        builder.hold(8, 1, [(session, 8)], session, 1)
    trace = builder.build("crossed", "test", 8)
    assert offered(trace, Mode(forced_output_len=2)).output_len.tolist() == [2, 2]
    with pytest.raises(InvalidArgument, match=r"request 1 of crossed.*: expected no request that waits for another"):
        offered(trace, Mode(starts="all_at_once"))


# --- where it is said -------------------------------------------------------------------------------------------------


def test_a_mode_can_be_set_beside_a_trace():
    settings = ["workload.starts=poisson", "workload.rate_per_s=2", "workload.stop_after_requests=100"]
    config = scenario.load("pool-16", settings, TraceWorkload(trace="t", format="mooncake"))
    assert config.workload == TraceWorkload(
        trace="t", format="mooncake", starts="poisson", rate_per_s=2.0, stop_after_requests=100
    )


def test_a_mode_comes_back_from_the_file_a_run_writes(tmp_path):
    day = [
        "workload.starts=diurnal",
        "workload.rate_per_s=2",
        "workload.profile=[1, 2.5, 4]",
        "workload.max_sessions=3",
    ]
    config = scenario.load("pool-16", day)
    assert config.workload.profile == (1.0, 2.5, 4.0)
    path = tmp_path / "again.toml"
    path.write_text(scenario_toml(config))
    assert scenario.load(str(path)) == config
    assert config.workload.chosen() == {
        "starts": "diurnal", "rate_per_s": 2.0, "profile": (1.0, 2.5, 4.0), "time_scale": 1.0, "pacing": "recorded",
        "max_sessions": 3,
    }  # fmt: skip

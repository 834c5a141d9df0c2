"""A trace's numbers, against counting tokens one by one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.hits import hits
from kvsim.workload import mooncake
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.stats import stats
from tests.support import shared_data

shapes = st.builds(
    Agentic,
    sessions=st.integers(1, 4),
    turns=st.integers(1, 4),
    common_len=st.integers(0, 9),
    first_len=st.integers(1, 9),
    turn_len=st.integers(0, 5),
    output_len=st.integers(0, 5),
)


def unique_tokens(trace):
    """Prompt tokens that no earlier request's prompt or output held."""
    held: set[tuple[int, int]] = set()
    new = 0
    for request in range(trace.num_requests):
        tokens = [(stream, k) for stream, start, end in trace.segments(request, 1) for k in range(start, end)]
        new += len(set(tokens[: trace.input_len[request]]) - held)
        held.update(tokens)
    return new


@given(shapes)
def test_unique_tokens_are_those_nobody_held(shape):
    trace = generate(shape)
    numbers = stats(trace)
    assert numbers["unique_input_tokens"] == unique_tokens(trace)
    assert numbers["ideal_hit_rate"] == pytest.approx(1 - unique_tokens(trace) / numbers["total_input_tokens"])


def test_answers_that_come_back_are_held_and_prompts_alone_would_not_say_so():
    trace = generate(Agentic(sessions=1, turns=2, common_len=0, first_len=64, turn_len=64, output_len=64))
    assert stats(trace)["unique_input_tokens"] == 128
    assert trace.input_len.sum() - hits(trace, [1]).infinite.hit_tokens == 192


def test_all_numbers_of_a_small_trace():
    numbers = stats(generate(Agentic(2, turns=2, common_len=10, first_len=10, turn_len=5, output_len=3, delay_s=2)))
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers == {
        "name": "agentic-2x2",
        "format": "agentic",
        "granule_tokens": 64,
        "requests": 4,
        "sessions": 2,
        "closed_loop_requests": 2,
        "last_arrival_s": 2.0,
        "total_input_tokens": 96,
        "total_output_tokens": 12,
        "unique_input_tokens": 40,
        "ideal_hit_rate": 56 / 96,
        "reported_hit_rate": None,
        "input_tokens": {"mean": 24.0, "p50": 24.0, "p90": 28.0, "p99": 28.0, "max": 28.0},
        "output_tokens": {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0},
        "turns_per_session": {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0},
        "per_session": {
            "calls": alike(2),
            "input_tokens": alike(48),
            "cached_tokens": pytest.approx({"mean": 28, "p50": 28, "p90": 32, "p99": 32.9}),
            "computed_tokens": pytest.approx({"mean": 20, "p50": 20, "p90": 24, "p99": 24.9}),
            "output_tokens": alike(6),
            "first_context": alike(20),
            "last_context": alike(28),
        },
        "call_delay_s": alike(2),
    }


def alike(value):
    """A row whose values are all the same."""
    return dict.fromkeys(("mean", "p50", "p90", "p99"), float(value))


def with_sessions(trace, sessions):
    return replace(trace, session=np.array(sessions, dtype=np.int64))


def test_a_session_is_told_by_its_number_not_by_its_place():
    """Calls of sessions 0 and 2 alternate; there is no session 1."""
    trace = generate(Agentic(2, turns=2, common_len=0, first_len=10, turn_len=5, output_len=3, delay_s=2))
    numbers = stats(with_sessions(trace, [0, 2, 0, 2]))
    assert numbers["per_session"]["first_context"] == alike(10)
    assert numbers["per_session"]["last_context"] == alike(18)
    assert numbers["per_session"]["calls"] == numbers["call_delay_s"] == alike(2)
    swapped = stats(with_sessions(trace, [0, 0, 2, 2]))
    assert swapped["call_delay_s"] == alike(0), "a wrong assignment shows"
    assert swapped["per_session"]["first_context"] != alike(10)


def test_what_the_provider_reported_goes_before_what_is_ideal():
    trace = generate(Agentic(1, turns=2, common_len=0, first_len=10, turn_len=5, output_len=3))
    ideal = stats(trace)["per_session"]
    assert (ideal["cached_tokens"], ideal["computed_tokens"]) == (alike(13), alike(15))
    reported = stats(replace(trace, reported_cached_len=np.array([2, 9], dtype=np.int64)))
    assert reported["reported_hit_rate"] == 11 / 28
    assert reported["ideal_hit_rate"] == 13 / 28
    assert reported["per_session"]["cached_tokens"] == alike(11)
    assert reported["per_session"]["computed_tokens"] == alike(17)


def test_sessions_of_one_call_have_no_delays():
    numbers = stats(generate(Agentic(3, turns=1)))
    assert numbers["call_delay_s"] == dict.fromkeys(("mean", "p50", "p90", "p99"))


def test_the_conversation_trace_reaches_the_published_bound():
    """No prompt of this trace holds an answer, so what is ideal is what `kvsim.hits` calls infinite."""
    numbers = stats(mooncake.read(shared_data("mooncake_conversation_trace.jsonl.gz")))
    assert numbers["total_input_tokens"] - numbers["unique_input_tokens"] == 54_098_411
    assert numbers["ideal_hit_rate"] == 54_098_411 / 144_793_823
    assert (numbers["requests"], numbers["sessions"], numbers["total_output_tokens"]) == (12_031, 12_031, 4_122_048)

"""A trace's numbers, against counting tokens one by one."""

import json

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
        "input_tokens": {"mean": 24.0, "p50": 24.0, "p90": 28.0, "p99": 28.0, "max": 28.0},
        "output_tokens": {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0},
        "turns_per_session": {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0},
    }


def test_the_conversation_trace_reaches_the_published_bound():
    """No prompt of this trace holds an answer, so what is ideal is what `kvsim.hits` calls infinite."""
    numbers = stats(mooncake.read(shared_data("mooncake_conversation_trace.jsonl.gz")))
    assert numbers["total_input_tokens"] - numbers["unique_input_tokens"] == 54_098_411
    assert numbers["ideal_hit_rate"] == 54_098_411 / 144_793_823
    assert (numbers["requests"], numbers["sessions"], numbers["total_output_tokens"]) == (12_031, 12_031, 4_122_048)

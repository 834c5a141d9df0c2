"""The generated workload has the shape its numbers say, and its seed decides the rest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvsim.workload.agentic import Agentic, generate, random_stream
from kvsim.workload.trace import columns_of
from tests.kvsim.command import under_hash_seeds

SHAPE = Agentic(sessions=3, turns=4, common_len=100, first_len=50, turn_len=20, output_len=9, delay_s=1.5)


def equal(left, right):
    return all(np.array_equal(a, b) for a, b in zip(columns_of(left), columns_of(right), strict=True))


def test_the_blogs_scaling_run():
    """30 turns of 20,000 + 10,000, then 2,048 a turn and 900 out: the last context is 116,392 tokens."""
    trace = generate(Agentic(sessions=75))
    assert trace.num_requests == 75 * 30
    assert (trace.input_len + trace.output_len).max() == 116_392
    assert trace.input_len.min() == 30_000


def test_a_turn_waits_for_the_one_before_it():
    trace = generate(SHAPE)
    assert trace.session.tolist() == [0, 1, 2] * 4
    assert trace.after.tolist() == [0, 1, 2, *range(9)]
    assert trace.delay_ps.tolist() == [0] * 3 + [1_500_000_000_000] * 9
    assert trace.input_len.tolist() == [150] * 3 + [179] * 3 + [208] * 3 + [237] * 3


def test_a_prompt_holds_the_common_part_and_all_of_its_sessions_past():
    trace = generate(SHAPE)
    for turn in range(4):
        for session in range(3):
            (common, start, middle), (own, again, end) = trace.segments(3 * turn + session, 10)
            assert (start, middle, again, end) == (0, 10, 10, (150 + 29 * turn + 9) // 10)
            assert common != own
    owners = {trace.segments(i, 10)[1][0]: int(trace.session[i]) for i in range(12)}
    assert sorted(owners.values()) == [0, 1, 2], "one stream a session, prompts and answers alike"


@pytest.mark.parametrize(("common_len", "first_len", "streams"), [(0, 30, 1), (30, 0, 1), (16, 14, 2)])
def test_either_part_may_be_empty(common_len, first_len, streams):
    trace = generate(Agentic(sessions=2, turns=1, common_len=common_len, first_len=first_len, output_len=0))
    assert trace.segment_offset.tolist() == [0, streams, 2 * streams]
    assert (trace.segments(0, 16) == trace.segments(1, 16)) == (common_len > 0)


@given(st.integers(0, 2**40))
def test_one_seed_one_trace(seed):
    shape = Agentic(sessions=4, turns=2, start_spread_s=60)
    trace = generate(shape, seed)
    assert equal(trace, generate(shape, seed))
    starts_s = trace.arrival_ps[trace.after == np.arange(8)] / 1e12
    assert len(starts_s) == 4
    assert 0 <= starts_s.min() <= starts_s.max() < 60
    assert not equal(trace, generate(shape, seed + 1))
    assert equal(generate(SHAPE, seed), generate(SHAPE, seed + 1)), "without a spread there is nothing to draw"


def test_random_streams_are_told_apart_by_name():
    draws = [random_stream(seed, name).random(3).tolist() for seed, name in ((1, "a"), (1, "b"), (2, "a"), (1, "a"))]
    assert draws[0] == draws[3]
    assert draws[0] != draws[1] != draws[2] != draws[0]


PROBE = """
from hashlib import sha256
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.trace import columns_of
trace = generate(Agentic(sessions=9, start_spread_s=5), seed=3)
print(sha256(b"".join(column.tobytes() for column in columns_of(trace))).hexdigest())
"""


def test_one_trace_under_any_hash_seed():
    assert len(under_hash_seeds(PROBE)) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sessions": 0}, "sessions = 0: expected at least 1"),
        ({"turns": 0}, "turns = 0: expected at least 1"),
        ({"turn_len": -1}, "turn_len = -1: expected at least 0"),
        ({"delay_s": -0.5}, "delay_s = -0.5: expected at least 0"),
        ({"common_len": 0, "first_len": 0}, "first_len = 0: expected a first prompt of at least 1 token"),
        ({"sessions": 10**18}, f"sessions x turns = {30 * 10**18}: expected at most 10000000 requests"),
        ({"output_len": 2**32}, "last turn = .*: expected less than 2\\*\\*32 tokens"),
        ({"delay_s": 1e300}, "last start = 2.9e.301: expected start_spread_s and delays of less than 9000000 s"),
        ({"start_spread_s": 9e6}, "last start = 9000000.0: expected"),
    ],
)
def test_what_the_caller_gets_wrong(changes, says):
    with pytest.raises(InvalidArgument, match=says):
        Agentic(**{"sessions": 1, **changes})

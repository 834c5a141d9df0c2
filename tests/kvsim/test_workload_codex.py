"""Codex on SWE-bench Pro: the published table, typed here once more, comes out of any seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvsim.workload.codex import Codex, generate
from kvsim.workload.stats import stats
from kvsim.workload.trace import columns_of
from tests.kvsim.command import under_hash_seeds

# Mean, P50, P90, P99 of 610 trials (blog of 2026-05-06 and data card).
PER_SESSION = {
    "calls": (33, 30, 57, 90),
    "input_tokens": (2_266_055, 1_637_000, 4_750_691, 9_030_908),
    "cached_tokens": (2_133_687, 1_525_376, 4_580_224, 8_781_952),
    "computed_tokens": (132_368, 116_991, 230_677, 512_315),
    "output_tokens": (17_239, 15_666, 29_968, 40_542),
    "first_context": (12_367, 12_278, 12_813, 13_744),
    "last_context": (84_482, 80_488, 130_165, 180_943),
}
CALL_DELAY_S = (10.5, 5.2, 23.0, 81.4)
BOUNDS = {"mean": 0.05, "p50": 0.05, "p90": 0.05, "p99": 0.10}
SEEDS = (0, 1, 2, 3, 2**40)


def off(row, published):
    """The numbers of a row that are further from the published ones than they may be."""
    marks = zip(BOUNDS, published, strict=True)
    return {mark: row[mark] / value - 1 for mark, value in marks if abs(row[mark] / value - 1) > BOUNDS[mark]}


@pytest.fixture(scope="module", params=SEEDS)
def trace(request):
    return generate(Codex(sessions=610), request.param)


def growths(trace):
    later = trace.after != np.arange(trace.num_requests)
    return (trace.input_len - trace.input_len[trace.after])[later]


def test_every_row_of_the_table_comes_out(trace):
    numbers = stats(trace)
    assert numbers["sessions"] == 610
    wrong = {name: off(numbers["per_session"][name], row) for name, row in PER_SESSION.items()}
    assert not any(wrong.values()), wrong
    assert off(numbers["call_delay_s"], CALL_DELAY_S) == {}


def test_the_check_of_the_table_rejects_other_distributions():
    """Each row shifted by 11 %, and one whose tail alone is wrong."""
    numbers = stats(generate(Codex(sessions=610)))
    for name, row in PER_SESSION.items():
        assert set(off(numbers["per_session"][name], [1.11 * value for value in row])) >= {"p50", "p90"}
    assert set(off(numbers["call_delay_s"], (10.5, 5.2, 23.0, 91.0))) == {"p99"}


def test_answers_and_growth_per_call_are_the_published_ones(trace):
    assert np.median(trace.output_len) == pytest.approx(246, rel=0.05)
    assert trace.output_len.mean() == pytest.approx(520, rel=0.05)
    assert np.median(growths(trace)) == pytest.approx(880, rel=0.05)
    assert growths(trace).mean() == pytest.approx(2_242, rel=0.05)
    assert trace.input_len.sum() / trace.output_len.sum() == pytest.approx(131, rel=0.05)


def test_hit_rates_are_the_published_ones(trace):
    numbers = stats(trace)
    assert numbers["ideal_hit_rate"] == pytest.approx(0.968, abs=0.005)
    assert numbers["reported_hit_rate"] == pytest.approx(0.942, abs=0.003)
    computed_len = trace.input_len - trace.reported_cached_len
    assert computed_len.mean() == pytest.approx(3_991, rel=0.05)
    assert np.percentile(computed_len, 99) == pytest.approx(53_323, rel=0.2), "the provider misses whole contexts"


def test_a_context_only_grows_by_the_answer_and_more(trace):
    later = np.flatnonzero(trace.after != np.arange(trace.num_requests))
    before = trace.after[later]
    assert (trace.session[later] == trace.session[before]).all()
    assert (trace.input_len[later] >= trace.input_len[before] + trace.output_len[before]).all()
    assert (trace.output_len >= 1).all()
    assert (trace.reported_cached_len[later] <= trace.input_len[before]).all()
    assert (np.bincount(trace.after[later], minlength=trace.num_requests) <= 1).all(), "one call at a time"


# --- parameters -------------------------------------------------------------------------------------------------------


def test_what_all_sessions_share_is_a_parameter():
    """At the provider 11,520 tokens; the published texts share 902, so that nearly every first prompt is new."""
    replayed = generate(Codex(shared_len=902))
    served = generate(Codex())
    assert (replayed.input_len == served.input_len).all(), "lengths are not changed by what is in them"
    gap = 1 - stats(replayed)["ideal_hit_rate"] - (1 - stats(served)["ideal_hit_rate"])
    assert gap == pytest.approx(609 * (11_520 - 902) / served.input_len.sum(), rel=1e-6)
    assert stats(replayed)["per_session"]["cached_tokens"] == stats(served)["per_session"]["cached_tokens"]
    first, second = (replayed.segments(request, 1) for request in (0, 1))
    assert first[0] == second[0] == (first[0][0], 0, 902)
    assert first[1][0] != second[1][0]
    assert len(generate(Codex(sessions=2, shared_len=0)).segments(0, 1)) == 2, "the prompt and its answer"


def test_without_misses_the_provider_reports_what_is_ideal():
    """But for the first session, which finds the system prompt there, too."""
    trace = generate(Codex(missed_len=0))
    numbers = stats(trace)
    computed = (1 - numbers["reported_hit_rate"]) * trace.input_len.sum()
    assert computed == pytest.approx(numbers["unique_input_tokens"] - 11_520)
    assert numbers["per_session"]["computed_tokens"]["mean"] == pytest.approx(84_482 - 11_520, rel=0.01)


def test_misses_are_as_many_as_declared():
    ideal = generate(Codex(missed_len=0))
    for missed_len in (500, 1_791):
        missed = ideal.reported_cached_len - generate(Codex(missed_len=missed_len)).reported_cached_len
        assert missed.mean() == pytest.approx(missed_len, rel=0.03)
        assert (missed >= 0).all()


def test_generated_answers_are_reused_and_recorded_ones_are_not():
    recorded, generated = generate(Codex()), generate(Codex(answers="generated"))
    assert (recorded.output_len == generated.output_len).all()
    reused = stats(recorded)["unique_input_tokens"] - stats(generated)["unique_input_tokens"]
    last = np.zeros(610, dtype=np.int64)
    np.maximum.at(last, recorded.session, np.arange(recorded.num_requests))
    assert reused == recorded.output_len.sum() - recorded.output_len[last].sum()
    assert len(np.unique(recorded.output_stream)) == recorded.num_requests


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(0, 2**32), st.sampled_from(["recorded", "generated"]))
def test_a_few_sessions_are_sessions_too(sessions, seed, answers):
    trace = generate(Codex(sessions=sessions, answers=answers, start_spread_s=30.0), seed)
    assert trace.num_sessions == sessions
    assert (growths(trace) >= 1).all()
    assert np.bincount(trace.session).min() >= 2
    starts_s = trace.arrival_ps[trace.after == np.arange(trace.num_requests)] / 1e12
    assert len(starts_s) == sessions
    assert 0 <= starts_s.min() <= starts_s.max() < 30


def test_one_session_is_the_median_of_every_row():
    numbers = stats(generate(Codex(sessions=1), seed=5))["per_session"]
    for name, row in PER_SESSION.items():
        assert numbers[name]["mean"] == pytest.approx(row[1], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sessions": 0}, "sessions = 0: expected 1 <= sessions"),
        ({"sessions": 10**9}, "sessions = 1000000000: expected 1 <= sessions <= 100000"),
        ({"shared_len": -1}, "shared_len = -1: expected at least 0"),
        ({"shared_len": 11_521}, "shared_len = 11521: expected at most 11520"),
        ({"missed_len": -0.5}, "missed_len = -0.5: expected"),
        ({"missed_len": float("nan")}, "missed_len = nan: expected"),
        ({"missed_len": float("inf")}, "missed_len = inf: expected"),
        ({"start_spread_s": 1e300}, "start_spread_s = 1e.300: expected"),
        ({"answers": "own"}, "answers = 'own': expected recorded or generated"),
    ],
)
def test_what_the_caller_gets_wrong(changes, says):
    with pytest.raises(InvalidArgument, match=says):
        Codex(**changes)


# --- one seed, one trace ----------------------------------------------------------------------------------------------


def test_one_seed_one_trace_and_another_another():
    one, again, other = (generate(Codex(sessions=50), seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(columns_of(one), columns_of(again), strict=True))
    assert one.input_len.tolist() != other.input_len.tolist()
    assert np.sort(np.bincount(one.session)).tolist() == np.sort(np.bincount(other.session)).tolist()


PROBE = """
from hashlib import sha256
from kvsim.workload.codex import Codex, generate
from kvsim.workload.trace import columns_of
trace = generate(Codex(sessions=20), seed=3)
print(sha256(b"".join(column.tobytes() for column in columns_of(trace))).hexdigest())
"""


def test_one_trace_under_any_hash_seed():
    assert len(under_hash_seeds(PROBE)) == 1

"""Session starts against the theory of Poisson processes, each test with a process that it must reject.

A process of constant rate has independent exponential gaps: the Kolmogorov-Smirnov distance of n of them is below
1.949 / sqrt(n) with probability 0.999 (Kolmogorov's distribution). Of a rate r(t), the counts of disjoint windows are
Poisson with the integral of r as their mean: the sum of (count - mean)^2 / mean over w windows has chi-square's law
with w degrees of freedom, whose quantile at 0.999 Wilson and Hilferty (1931) approximate. Each test draws 20 seeds, and
one of them may be outside: of 20 that are right, two are with a probability of 0.0002.
"""

import math
from itertools import pairwise

import numpy as np
import pytest

from kvsim.config.mode import Mode
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.offered import offered
from kvsim.workload.starts import Constant, Profile, Ramp, day_of, drawn_s, rate_of

SEEDS = range(20)
NUM_STARTS = 4_000
Z_999 = 3.0902
KOLMOGOROV_999 = 1.949


def distance(gaps_s, rate_per_s):
    """Kolmogorov-Smirnov's, of the gaps to the exponential law."""
    law = 1 - np.exp(-rate_per_s * np.sort(gaps_s))
    ranks = np.arange(len(law) + 1) / len(law)
    return max((ranks[1:] - law).max(), (law - ranks[:-1]).max())


def is_exponential(gaps_s, rate_per_s):
    return distance(gaps_s, rate_per_s) < KOLMOGOROV_999 / math.sqrt(len(gaps_s))


def chi_square_999(degrees):
    share = 2 / (9 * degrees)
    return degrees * (1 - share + Z_999 * math.sqrt(share)) ** 3


def integral(rate_at, start_s, end_s):
    """By the trapezoidal rule on a thousand pieces."""
    times_s = np.linspace(start_s, end_s, 1_001)
    return float(np.trapezoid([rate_at(time_s) for time_s in times_s], times_s))


def follows(starts_s, rate_at, edges_s):
    """Whether the counts between the edges are those of a Poisson process with this rate."""
    counts = np.histogram(starts_s, edges_s)[0]
    means = np.array([integral(rate_at, *window) for window in pairwise(edges_s)])
    assert means.min() > 20, "too few for chi-square"
    return float(((counts - means) ** 2 / means).sum()) < chi_square_999(len(means))


def most(outcomes):
    return sum(outcomes) >= len(SEEDS) - 1


def random(seed):
    return np.random.default_rng(seed)


# --- constant rate ----------------------------------------------------------------------------------------------------


def test_gaps_of_a_poisson_process_are_exponential():
    assert most([is_exponential(np.diff(drawn_s(Constant(3.0), NUM_STARTS, random(seed))), 3.0) for seed in SEEDS])


def test_gaps_that_are_uniform_or_of_another_rate_are_rejected():
    for seed in SEEDS:
        assert not is_exponential(random(seed).random(NUM_STARTS) / 1.5, 3.0)
        assert not is_exponential(np.diff(drawn_s(Constant(3.6), NUM_STARTS, random(seed))), 3.0)


def test_gaps_do_not_depend_on_those_before():
    """Of n independent gaps the lag-1 rank correlation is normal with deviation 1 / sqrt(n)."""
    for seed in SEEDS:
        gaps_s = np.diff(drawn_s(Constant(3.0), NUM_STARTS, random(seed)))
        bound = 4 / math.sqrt(len(gaps_s))
        assert abs(lag_correlation(gaps_s)) < bound
        assert abs(lag_correlation(np.sort(gaps_s))) > bound


def lag_correlation(values):
    ranks = np.argsort(np.argsort(values))
    return np.corrcoef(ranks[1:], ranks[:-1])[0, 1]


def test_sessions_of_a_workload_are_a_poisson_process():
    mode = Mode(starts="poisson", rate_per_s=0.5)
    outcomes = []
    for seed in SEEDS:
        trace = offered(generate(Agentic(sessions=2_000, turns=2, delay_s=7.0)), mode, seed)
        starts_s = trace.arrival_ps[trace.after == np.arange(4_000)] / 1e12
        outcomes.append(is_exponential(np.diff(starts_s), 0.5))
    assert most(outcomes)


# --- rates that change ------------------------------------------------------------------------------------------------

RAMP = Ramp(rate_per_s=1.0, end_rate_per_s=5.0, ramp_s=1_000.0)
FALLING = Ramp(rate_per_s=6.0, end_rate_per_s=0.5, ramp_s=800.0)
DAY = Profile(rate_per_s=2.0, weights=day_of(1.7), period_s=600.0)
HOURS = Profile(rate_per_s=2.0, weights=(1.0, 0.0, 4.0, 3.0), period_s=500.0)


def ramp_at(ramp):
    slope = (ramp.end_rate_per_s - ramp.rate_per_s) / ramp.ramp_s
    return lambda time_s: ramp.rate_per_s + slope * time_s if time_s < ramp.ramp_s else ramp.end_rate_per_s


HEIGHT = 0.6264
LEVEL = 2.0 / float(np.i0(HEIGHT))


def day_at(time_s):
    """With the height that gives 1.7: exp(0.6264) / I0(0.6264)."""
    return LEVEL * math.exp(-HEIGHT * math.cos(2 * math.pi * time_s / 600.0))


def hours_at(time_s):
    return 2.0 * (0.5, 0.0, 2.0, 1.5)[int(time_s / 125.0) % 4]


@pytest.mark.parametrize(
    ("rate", "rate_at", "edges_s"),
    [
        (RAMP, ramp_at(RAMP), np.linspace(0, 1_100, 23)),
        (FALLING, ramp_at(FALLING), np.linspace(0, 1_000, 21)),
        (DAY, day_at, np.linspace(0, 1_800, 31)),
    ],
)
def test_counts_of_windows_are_the_integral_of_the_rate(rate, rate_at, edges_s):
    outcomes = []
    for seed in SEEDS:
        starts_s = drawn_s(rate, NUM_STARTS, random(seed))
        outcomes.append(follows(starts_s, rate_at, edges_s))
        level = Constant(integral(rate_at, 0, edges_s[-1]) / edges_s[-1])
        assert not follows(drawn_s(level, NUM_STARTS, random(seed)), rate_at, edges_s), "of the same mean"
    assert most(outcomes)


def test_counts_of_a_profile_are_its_parts():
    busy = [(0, 125), (250, 375), (375, 500), (500, 625), (750, 875), (875, 1_000)]
    means = np.array([125 * hours_at((start + end) / 2) for start, end in busy])
    outcomes = []
    for seed in SEEDS:
        starts_s = drawn_s(HOURS, NUM_STARTS, random(seed))
        counts = np.array([np.count_nonzero((starts_s >= start) & (starts_s < end)) for start, end in busy])
        outcomes.append(float(((counts - means) ** 2 / means).sum()) < chi_square_999(len(busy)))
        assert not np.any((starts_s % 500 > 125.001) & (starts_s % 500 < 249.999)), "at a weight of 0 nobody starts"
    assert most(outcomes)


@pytest.mark.parametrize("rate", [Constant(0.7), RAMP, FALLING, DAY, HOURS])
def test_the_expected_count_never_falls_and_is_reached_in_order(rate):
    times_s = np.linspace(0, 5_000, 20_001)
    assert rate.expected(np.zeros(1))[0] == 0
    assert (np.diff(rate.expected(times_s)) >= -1e-9).all()
    starts_s = drawn_s(rate, 500, random(1))
    gaps = np.diff(rate.expected(starts_s), prepend=0)
    expected = random(1).exponential(size=500)
    assert np.allclose(gaps, expected, rtol=1e-6, atol=1e-9)
    assert (np.diff(starts_s) >= 0).all()


def test_the_mean_of_a_day_is_the_rate():
    for rate in (DAY, HOURS):
        assert rate.expected(np.array([rate.period_s]))[0] == pytest.approx(2.0 * rate.period_s)


def test_a_mode_names_its_rate():
    day = {"starts": "diurnal", "rate_per_s": 2.0}
    assert rate_of(Mode(starts="poisson", rate_per_s=2.0)) == Constant(2.0)
    assert rate_of(Mode(starts="ramp", rate_per_s=0.0, end_rate_per_s=2.0, ramp_s=9.0)) == Ramp(0.0, 2.0, 9.0)
    assert rate_of(Mode(**day, peak_ratio=1.7)) == Profile(2.0, day_of(1.7), 86_400.0)
    assert rate_of(Mode(**day, profile=[1, 3], period_s=60.0)) == Profile(2.0, (1.0, 3.0), 60.0)


@pytest.mark.parametrize(("peak_ratio", "over_lowest"), [(1.0, 1.0), (1.7, 3.50), (2.8, 23.2), (10.0, None)])
def test_a_day_has_the_peak_that_is_asked_for(peak_ratio, over_lowest):
    """Azure, May 2024 (DynamoLLM): conversation 1.7 and 3.3, coding 2.8 and 34.6."""
    day = np.array(day_of(peak_ratio))
    assert day.max() / day.mean() == pytest.approx(peak_ratio, rel=1e-4)
    assert over_lowest is None or day.max() / day.min() == pytest.approx(over_lowest, rel=0.01)
    assert np.argmax(day) in (719, 720) and np.argmin(day) in (0, 1439)
    assert np.allclose(
        np.diff(np.log(day), 2), -((2 * math.pi / 1440) ** 2) * (np.log(day)[1:-1] - np.log(day).mean()), atol=1e-8
    )

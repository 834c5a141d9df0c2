"""When sessions start: Poisson processes whose rate is constant, ramps, or has a daily course.

A process of rate r(t) is one of rate 1 on a clock that shows the integral of r: the k-th start is where the integral
reaches the sum of k exponential gaps (Cinlar, Introduction to Stochastic Processes, 1975, theorem 4.7.11). So every
rate is a class that says its integral, and one function draws from all of them.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvsim.config.mode import DAY_S, Mode
from kvsim.workload.quantiles import Floats, falling_root

BISECTIONS = 80
"""Halvings of an interval: as far as a double tells times apart."""
MINUTES = 1_440
MAX_HEIGHT = 20.0
"""Of the logarithm's sine: the highest rate is then eleven times the mean."""


class Rate(Protocol):
    """Starts a second, over time."""

    def expected(self, time_s: Floats) -> Floats:
        """Mean number of starts in [0, time_s]: never falls, from 0 to above any bound."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A Poisson process."""

    rate_per_s: float

    def expected(self, time_s: Floats) -> Floats:
        """Rate times time."""
        return self.rate_per_s * time_s


@dataclass(frozen=True, slots=True)
class Ramp:
    """From one rate to another in `ramp_s`, in a straight line, and constant from then on."""

    rate_per_s: float
    end_rate_per_s: float
    ramp_s: float

    def expected(self, time_s: Floats) -> Floats:
        """A parabola, then a line."""
        inside = np.minimum(time_s, self.ramp_s)
        slope = (self.end_rate_per_s - self.rate_per_s) / self.ramp_s
        count: Floats = inside * (self.rate_per_s + slope * inside / 2) + self.end_rate_per_s * (time_s - inside)
        return count


@dataclass(frozen=True, slots=True)
class Profile:
    """Constant in each of equal parts of a period, which repeats."""

    rate_per_s: float
    """Mean."""
    weights: tuple[float, ...]
    """Of the parts; only their ratios count."""
    period_s: float

    def expected(self, time_s: Floats) -> Floats:
        """Whole periods, and a line of as many pieces as there are parts."""
        shares = np.concatenate((np.zeros(1), np.cumsum(self.weights)))
        shares /= shares[-1]
        periods, inside_s = np.divmod(time_s, self.period_s)
        edges_s = np.linspace(0, self.period_s, len(shares))
        count: Floats = self.rate_per_s * self.period_s * (periods + np.interp(inside_s, edges_s, shares))
        return count


def rate_of(mode: Mode) -> Rate:
    """What the mode's starts are drawn from; it has one of these."""
    rate_per_s, period_s = mode.rate_per_s, mode.period_s or DAY_S
    assert rate_per_s is not None, mode.starts
    if mode.starts == "ramp":
        assert mode.end_rate_per_s is not None and mode.ramp_s is not None
        return Ramp(rate_per_s, mode.end_rate_per_s, mode.ramp_s)
    if mode.profile is not None:
        return Profile(rate_per_s, mode.profile, period_s)
    if mode.peak_ratio is not None:
        return Profile(rate_per_s, day_of(mode.peak_ratio), period_s)
    return Constant(rate_per_s)


def day_of(peak_ratio: float) -> tuple[float, ...]:
    """A day in minutes whose rate's logarithm is a sine, from the lowest (night) over the highest and back.

    exp(a sin) has exp(a) / I0(a) as its highest over its mean, and exp(2a) as its highest over its lowest. With 1.7 as
    the one, the other is 3.5; with 2.8 it is 23: DynamoLLM (HPCA 2025) measured 3.3 and 34.6 in Azure's traces of
    conversation and coding of May 2024. A plain sine with 1.7 has 5.7, and none has 2.8.
    """
    height = falling_root(lambda a: peak_ratio - math.exp(a) / float(np.i0(a)), 0.0, MAX_HEIGHT)
    middles = (np.arange(MINUTES) + 0.5) / MINUTES
    day: tuple[float, ...] = tuple(np.exp(-height * np.cos(2 * math.pi * middles)).tolist())
    return day


def drawn_s(rate: Rate, count: int, random: np.random.Generator) -> Floats:
    """The first `count` starts, in seconds, in order."""
    return reached_s(rate, np.cumsum(random.exponential(size=count)))


def reached_s(rate: Rate, counts: Floats) -> Floats:
    """When the expected number of starts reaches each of the counts: first bracketed, then bisected."""
    low, high = np.zeros_like(counts), np.ones_like(counts)
    while (short := rate.expected(high) < counts).any():
        high[short] *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_below = rate.expected(middle) < counts
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return high

"""Distributions out of published percentiles, and samples of them that hold the percentiles whatever the seed.

A published row (mean, P50, P90, P99) becomes a quantile function whose logarithm is piecewise linear in the normal
score z of the rank: through the three percentiles, on beyond P99 with the slope before it, and below P50 with the one
slope that gives the mean. A sample of n values is stratified: exactly the quantiles (k + 0.5) / n, in an order that
the seed chooses. Rank correlations are made by ordering (Iman and Conover, 1982), which leaves marginals as they are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.errors import require

Floats: TypeAlias = npt.NDArray[np.float64]

NORMAL = NormalDist()
Z90, Z99 = NORMAL.inv_cdf(0.9), NORMAL.inv_cdf(0.99)
BISECTIONS = 40
MAX_SLOPE = 10.0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """One published row; raises InvalidArgument where no slope below the median gives the mean."""

    mean: float
    p50: float
    p90: float
    p99: float
    slope_below: float = field(init=False)

    def __post_init__(self) -> None:
        require(0 < self.p50 < self.p90 < self.p99, "p50, p90, p99", (self.p50, self.p90, self.p99), "0 and growing")
        log50, body, tail = self._log_line()
        upper = _share(log50, body, 0, Z90) + _share(math.log(self.p90) - tail * Z90, tail, Z90, math.inf)
        below = self.mean - upper
        require(0 < below < self.p50 / 2, "mean", self.mean, f"{upper:.6g} < mean < {upper + self.p50 / 2:.6g}")
        slope = falling_root(lambda slope: _share(log50, slope, -math.inf, 0) - below, 0.0, MAX_SLOPE)
        object.__setattr__(self, "slope_below", slope)

    def at(self, scores: Floats) -> Floats:
        """The values at these normal scores."""
        log50, body, tail = self._log_line()
        below = log50 + self.slope_below * np.minimum(scores, 0)
        return np.exp(below + body * np.clip(scores, 0, Z90) + tail * np.maximum(scores - Z90, 0))

    def _log_line(self) -> tuple[float, float, float]:
        log50, log90, log99 = math.log(self.p50), math.log(self.p90), math.log(self.p99)
        return log50, (log90 - log50) / Z90, (log99 - log90) / (Z99 - Z90)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A quantile function whose logarithm is a line in the normal score."""

    log_median: float
    spread: float
    """Standard deviation of the logarithm."""

    @classmethod
    def of(cls, mean: float, deviation: float) -> "LogNormal":
        """The one with this mean and standard deviation, where a source publishes no more."""
        variance = math.log1p((deviation / mean) ** 2)
        return cls(math.log(mean) - variance / 2, math.sqrt(variance))

    def at(self, scores: Floats) -> Floats:
        """The values at these normal scores."""
        return np.exp(self.log_median + self.spread * scores)


def ranks(count: int, random: np.random.Generator) -> Floats:
    """(k + 0.5) / count, in random order: what a distribution without a normal score is stratified by."""
    places: Floats = (random.permutation(count) + 0.5) / count
    return places


def stratified(count: int, random: np.random.Generator) -> Floats:
    """The normal scores of the ranks (k + 0.5) / count, in random order."""
    return restratified(random.random(count))


def coupled(scores: Floats, correlation: float, random: np.random.Generator) -> Floats:
    """Stratified scores whose correlation with these is about `correlation`."""
    own = stratified(len(scores), random)
    return restratified(correlation * scores + math.sqrt(1 - correlation**2) * own)


def restratified(values: Floats) -> Floats:
    """The stratified scores in the order of these values."""
    scores = np.empty(len(values))
    scores[np.argsort(values, kind="stable")] = _scores(len(values))
    return scores


def falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses zero between low and high, or the end that is nearer to it."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def _scores(count: int) -> Floats:
    return np.array([NORMAL.inv_cdf((rank + 0.5) / count) for rank in range(count)])


def _share(log_value: float, slope: float, start: float, end: float) -> float:
    """Integral of exp(log_value + slope * z) over the normal density between two scores."""
    mass = NORMAL.cdf(end - slope) - NORMAL.cdf(start - slope)
    return math.exp(log_value + slope**2 / 2) * mass

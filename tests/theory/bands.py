"""Whether a simulation gives theory's number: independent replications, fixed seeds, and the band around their mean."""

from math import sqrt
from statistics import fmean, stdev

BAND_ERRORS = 4
"""Half of the band, in standard errors of the mean: of 16 replications a right model is outside one time in 860."""

MOST_ERROR = 0.05
"""Largest standard error, as a part of the larger of theory and mean: a wider band would say nothing."""


def band(samples):
    """Mean of the replications and its standard error."""
    return fmean(samples), stdev(samples) / sqrt(len(samples))


def agrees(samples, theory):
    """Whether theory is in the band, which must be narrow."""
    mean, error = band(samples)
    assert error < MOST_ERROR * max(mean, theory), f"{mean} with standard error {error}: the band says nothing"
    return abs(mean - theory) < BAND_ERRORS * error

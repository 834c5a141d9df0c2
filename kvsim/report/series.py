"""From columns to what is drawn: pure functions, each of what its name says, none larger than the picture needs."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.float64]

NUM_POINTS = 240
"""Intervals of a picture over time, and points of a distribution."""


def edges(end_ps: int, num_intervals: int = NUM_POINTS) -> Column:
    """Ends of equal intervals from 0 to `end_ps`, the first one's start included; each is at least 1 ps long."""
    end_ps = max(end_ps, num_intervals)
    return np.array([end_ps * at // num_intervals for at in range(num_intervals + 1)], dtype=np.int64)


def spread_evenly(start_ps: Column, end_ps: Column, amount: Column | Values, edges_ps: Column) -> Values:
    """How much falls into each interval when every amount is spread evenly over [start, end).

    What takes no time falls into the interval that it is in (the later one on an edge); what lies outside, nowhere.
    """
    return spread_by_key(np.zeros_like(start_ps), 1, start_ps, end_ps, amount, edges_ps).reshape(-1)


def spread_by_key(
    key: Column, num_keys: int, start_ps: Column, end_ps: Column, amount: Column | Values, edges_ps: Column
) -> Values:
    """The same for each key in [0, num_keys): one row of intervals for each."""
    num_intervals = len(edges_ps) - 1
    end_ps = np.maximum(end_ps, start_ps + 1)
    first = np.clip(np.searchsorted(edges_ps, start_ps, side="right") - 1, 0, num_intervals - 1)
    last = np.clip(np.searchsorted(edges_ps, end_ps, side="left") - 1, first, num_intervals - 1)
    count = last - first + 1
    row = np.repeat(np.arange(len(count)), count)
    interval = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    overlap = np.minimum(end_ps[row], edges_ps[interval + 1]) - np.maximum(start_ps[row], edges_ps[interval])
    part = amount[row] * (np.maximum(overlap, 0) / (end_ps[row] - start_ps[row]))
    return per_key(key[row] * num_intervals + interval, part, num_keys * num_intervals).reshape(num_keys, num_intervals)


def busy_share(start_ps: Column, end_ps: Column, edges_ps: Column) -> Values:
    """Share of each interval in which at least one [start, end) is under way."""
    order = np.argsort(start_ps, kind="stable")
    start_ps, end_ps = start_ps[order], np.maximum.accumulate(end_ps[order])
    begins = np.ones(len(start_ps), dtype=np.bool_)
    begins[1:] = start_ps[1:] > end_ps[:-1]
    start_ps, end_ps = start_ps[begins], end_ps[np.append(begins[1:], True)[: len(begins)]]
    busy_ps = spread_evenly(start_ps, end_ps, end_ps - start_ps, edges_ps)
    return ratio(busy_ps, np.diff(edges_ps).astype(np.float64))


def sums(time_ps: Column, amount: Column | Values, edges_ps: Column) -> Values:
    """Sum of the amounts at times inside each interval, its start included; the last one has its end, too."""
    interval = np.searchsorted(edges_ps, time_ps, side="right") - 1
    interval[time_ps == edges_ps[-1]] = len(edges_ps) - 2
    inside = (interval >= 0) & (interval < len(edges_ps) - 1)
    return per_key(interval[inside], amount[inside], len(edges_ps) - 1)


def level_at(time_ps: Column, change: Column, at_ps: Column) -> Values:
    """Sum of the changes up to each moment, those at that moment included."""
    order = np.argsort(time_ps, kind="stable")
    level = np.concatenate(([0], np.cumsum(change[order])))
    return level[np.searchsorted(time_ps[order], at_ps, side="right")].astype(np.float64)


def mean_level(time_ps: Column, change: Column, edges_ps: Column) -> Values:
    """Mean over each interval of what starts at 0 and changes at these times."""
    order = np.argsort(time_ps, kind="stable")
    time_ps, change = time_ps[order], change[order]
    inner = (time_ps > edges_ps[0]) & (time_ps < edges_ps[-1])
    corners = np.unique(np.concatenate((edges_ps, time_ps[inner])))
    area = level_at(time_ps, change, corners[:-1]) * np.diff(corners)
    interval = np.searchsorted(edges_ps, corners[:-1], side="right") - 1
    return ratio(per_key(interval, area, len(edges_ps) - 1), np.diff(edges_ps).astype(np.float64))


def value_at(time_ps: Column, value: Column, at_ps: Column) -> Values:
    """The last value up to each moment; 0 before the first one. Times ascend."""
    known = np.concatenate(([0], value))
    return known[np.searchsorted(time_ps, at_ps, side="right")].astype(np.float64)


def ratio(part: Values, whole: Values) -> Values:
    """part / whole; not a number where there is no whole."""
    found: Values = np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
    return found


def distribution(sample: npt.NDArray[np.float64] | Column, num_points: int = NUM_POINTS) -> tuple[Values, Values]:
    """(values, share of the sample that is no larger): every value of a small sample, else evenly spread ranks.

    The smallest and the largest are among them.
    """
    ordered = np.sort(sample).astype(np.float64)
    count = len(ordered)
    ranks = np.arange(count) if count <= num_points else np.linspace(0, count - 1, num_points).round().astype(np.int64)
    return ordered[ranks], (ranks + 1) / max(count, 1)


def per_key(key: Column, amount: Column | Values, num_keys: int) -> Values:
    """Sum of the amounts of each key from 0 to num_keys - 1."""
    return np.bincount(key, weights=amount, minlength=num_keys)[:num_keys].astype(np.float64)

"""What is drawn is what the columns say: every series against a sum over single moments, and wrong sums are told."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.report import series

END_PS = 24
EDGES_PS = series.edges(END_PS, 6)

intervals = st.lists(
    st.tuples(st.integers(0, END_PS), st.integers(0, 9), st.integers(0, 20), st.integers(0, 2)).map(
        lambda row: (row[0], row[0] + row[1], row[2], row[3])
    ),
    max_size=12,
)
changes = st.lists(st.tuples(st.integers(0, END_PS + 5), st.integers(-5, 9)), max_size=15)


def columns(rows, width):
    return np.array(rows, dtype=np.int64).reshape(-1, width).T


def interval_of(time_ps):
    """The number of the interval that a moment is in, or None."""
    return next((at for at in range(6) if EDGES_PS[at] <= time_ps < EDGES_PS[at + 1]), None)


def spread_by_moments(rows):
    """Every picosecond of an amount's time gets its part; what takes no time counts as taking one."""
    found = np.zeros((3, 6))
    for start, end, amount, key in rows:
        length = max(end - start, 1)
        for moment in range(start, start + length):
            if interval_of(moment) is not None:
                found[key, interval_of(moment)] += amount / length
    return found


@given(intervals)
def test_amounts_are_spread_evenly_over_their_time(rows):
    start, end, amount, key = columns(rows, 4)
    expected = spread_by_moments(rows)
    assert np.allclose(series.spread_by_key(key, 3, start, end, amount, EDGES_PS), expected)
    assert np.allclose(series.spread_evenly(start, end, amount, EDGES_PS), expected.sum(axis=0))


def test_that_comparison_rejects_a_sum_by_the_end():
    rows = [(2, 9, 7, 0)]
    by_end = np.zeros(6)
    by_end[interval_of(9)] = 7
    assert not np.allclose(by_end, spread_by_moments(rows).sum(axis=0))


@given(intervals)
def test_busy_is_when_anything_is_under_way(rows):
    start, end, _, _ = columns(rows, 4)
    busy = [any(low <= moment < high for low, high, _, _ in rows) for moment in range(END_PS)]
    expected = [np.mean(busy[low:high]) for low, high in pairwise(EDGES_PS)]
    assert np.allclose(series.busy_share(start, end, EDGES_PS), expected)


@given(changes)
def test_levels_and_their_means(rows):
    time_ps, change = columns(rows, 2)
    by_moment = [sum(amount for time, amount in rows if time <= moment) for moment in range(END_PS + 1)]
    assert series.level_at(time_ps, change, np.arange(END_PS + 1)).tolist() == by_moment
    means = [np.mean(by_moment[low:high]) for low, high in pairwise(EDGES_PS)]
    assert np.allclose(series.mean_level(time_ps, change, EDGES_PS), means)


@given(changes)
def test_sums_by_interval(rows):
    time_ps, amount = columns(rows, 2)
    expected = np.zeros(6)
    for time, value in rows:
        at = 5 if time == END_PS else interval_of(time)
        if at is not None:
            expected[at] += value
    assert series.sums(time_ps, amount, EDGES_PS).tolist() == expected.tolist()


@given(changes)
def test_the_last_value_holds(rows):
    rows = sorted(rows)
    time_ps, value = columns(rows, 2)
    expected = [next((value for time, value in reversed(rows) if time <= moment), 0) for moment in EDGES_PS]
    assert series.value_at(time_ps, value, EDGES_PS).tolist() == expected


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(2, 80))
def test_a_distribution_says_how_many_are_no_larger(sample, num_points):
    values, share = series.distribution(np.array(sample), num_points)
    assert len(values) <= max(num_points, 2)
    assert (values[0], values[-1], share[-1]) == (min(sample), max(sample), 1.0)
    for value, part in zip(values, share, strict=True):
        below, up_to = sum(x < value for x in sample), sum(x <= value for x in sample)
        assert below < round(part * len(sample)) <= up_to


def test_a_share_of_nothing_is_not_a_number():
    found = series.ratio(np.array([1.0, 0.0]), np.array([4.0, 0.0]))
    assert found[0] == 0.25 and np.isnan(found[1])
    assert len(series.distribution(np.array([]))[0]) == 0


@pytest.mark.parametrize("end_ps", [0, 1, 239, 240, 241, 10**18])
def test_intervals_cover_the_whole_run_and_are_never_empty(end_ps):
    edges_ps = series.edges(end_ps)
    assert edges_ps[0] == 0 and edges_ps[-1] == max(end_ps, series.NUM_POINTS)
    assert (np.diff(edges_ps) > 0).all() and np.diff(edges_ps).max() - np.diff(edges_ps).min() <= 1

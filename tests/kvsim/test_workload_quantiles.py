"""A published row becomes a distribution that has it, and a sample that has it whatever the seed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvsim.workload.quantiles import Quantiles, coupled, falling_root, restratified, stratified

ROW = Quantiles(mean=33, p50=30, p90=57, p99=90)


def random(seed=0):
    return np.random.default_rng(seed)


def test_a_large_sample_has_the_row_and_is_ordered():
    values = ROW.at(np.sort(stratified(100_001, random())))
    assert values.mean() == pytest.approx(33, rel=1e-3)
    assert np.percentile(values, (50, 90, 99)) == pytest.approx((30, 57, 90), rel=1e-3)
    assert (np.diff(values) > 0).all()


def test_a_row_that_would_be_wrong_is_not_what_it_has():
    values = Quantiles(mean=32, p50=30, p90=57, p99=90).at(stratified(100_001, random()))
    assert values.mean() != pytest.approx(33, rel=1e-2)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ((33, 30, 30, 90), "0 and growing"),
        ((33, 0, 57, 90), "0 and growing"),
        ((22, 30, 57, 90), "mean = 22: expected 23.* < mean < 38"),
        ((39, 30, 57, 90), "mean = 39: expected 23.* < mean < 38"),
    ],
)
def test_what_no_distribution_has(row, says):
    with pytest.raises(InvalidArgument, match=says):
        Quantiles(*row)


@given(st.integers(1, 50), st.integers(0, 2**32))
def test_a_sample_is_the_same_values_in_another_order(size, seed):
    scores = stratified(size, random(seed))
    assert sorted(scores.tolist()) == sorted(stratified(size, random(seed + 1)).tolist())
    assert sorted(coupled(scores, 0.5, random(seed)).tolist()) == sorted(scores.tolist())


def test_a_correlation_is_the_one_that_was_asked_for():
    scores = stratified(20_000, random(1))
    for correlation in (0.0, 0.7, -0.4, 1.0):
        found = np.corrcoef(scores, coupled(scores, correlation, random(2)))[0, 1]
        assert found == pytest.approx(correlation, abs=0.03)


def test_order_is_kept():
    assert (np.argsort(restratified(np.array([3.0, 1.0, 2.0]))) == [1, 2, 0]).all()


def test_a_root_is_found_or_the_nearer_end():
    assert falling_root(lambda x: 2 - x * x, 0, 10) == pytest.approx(math.sqrt(2))
    assert falling_root(lambda x: 1.0, -3, 3) == pytest.approx(3)
    assert falling_root(lambda x: -1.0, -3, 3) == pytest.approx(-3)

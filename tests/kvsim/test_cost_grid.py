"""What lies between and beyond the points of a grid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvsim.cost.grid import Grid

# Rows that end at different points, rising and falling.
POINTS = {10: {0: 100, 5: 90, 20: 300}, 40: {0: 200, 5: 260}}
GRID = Grid(POINTS)


@st.composite
def rising(draw):
    """A grid that rises along both axes."""
    firsts = sorted(draw(st.sets(st.integers(1, 10**4), min_size=2, max_size=5)))
    seconds = sorted(draw(st.sets(st.integers(0, 10**4), min_size=2, max_size=5)))
    points, below = {}, dict.fromkeys(seconds, 0)
    for first in firsts:
        value, row = 0, {}
        for second in seconds:
            value = row[second] = max(value, below[second]) + draw(st.integers(0, 10**9))
        points[first] = below = row
    return points


def test_every_point_is_exact():
    assert all(GRID.at(first, second) == value for first, row in POINTS.items() for second, value in row.items())


@settings(max_examples=50)
@given(rising())
def test_every_point_of_any_grid_is_exact(points):
    assert all(Grid(points).at(x, y) == value for x, row in points.items() for y, value in row.items())


@settings(max_examples=50)
@given(rising(), st.data())
def test_a_grid_that_rises_rises_everywhere_on_it_and_beyond_each_axis_along_it(points, data):
    grid, more = Grid(points), data.draw(st.integers(0, 1000))
    on_first, on_second = (st.integers(0, max(row)) for row in (points, next(iter(points.values()))))
    beyond = st.integers(0, 10**6)
    first, second = data.draw(beyond), data.draw(on_second)
    assert grid.at(first, second) <= grid.at(first + more, second)
    first, second = data.draw(on_first), data.draw(beyond)
    assert grid.at(first, second) <= grid.at(first, second + more)


@given(st.integers(10, 40), st.integers(0, 5))
def test_between_neighbours_nothing_is_outside_of_them(first, second):
    assert 90 <= GRID.at(first, second) <= 260


def test_between_points_by_hand():
    assert GRID.at(10, 10) == 90 + 210 // 3
    assert GRID.at(25, 0) == 150
    assert GRID.at(20, 5) == 90 + 170 // 3


def test_below_the_first_point_as_there_and_beyond_the_last_as_before():
    assert GRID.at(1, 0) == GRID.at(10, 0) == 100
    assert GRID.at(10, 35) == 510
    assert GRID.at(40, 10) == 320
    assert GRID.at(70, 0) == 300


def test_beyond_the_last_point_nothing_falls():
    falling = Grid({1: {0: 50, 1: 40}, 2: {0: 30, 1: 20}})
    assert falling.at(9, 0) == 30 and falling.at(2, 9) == 20


@pytest.mark.parametrize("points", [{}, {1: {0: 1, 1: 1}}, {1: {0: 1}, 2: {0: 1}}])
def test_a_grid_has_two_points_on_each_axis(points):
    with pytest.raises(InvalidArgument, match="two or more on each axis"):
        Grid(points)

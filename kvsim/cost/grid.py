"""Integers measured on a grid of two axes; between its points and beyond them, linear.

Exact on every point. Between two neighbours never outside of what they say, and so rising where they rise. Below the
first point of an axis: as there, for what is measured first is the floor of a step. Beyond the last one: as the last
two go on, never falling along that axis.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from kvcore.errors import require


class Curve:
    """A function of one axis, through its points."""

    __slots__ = ("xs", "ys")

    def __init__(self, xs: Sequence[int], ys: Sequence[int]) -> None:
        """`xs` ascend, and there are two of them at least."""
        require(len(xs) >= 2, "points", len(xs), "two or more on each axis of a grid")
        self.xs, self.ys = xs, ys

    def at(self, x: int) -> int:
        """The value at x, rounded down."""
        xs, ys = self.xs, self.ys
        right = bisect_right(xs, x)
        if right == 0:
            return ys[0]
        left = right - 1
        if right == len(xs):
            rise = max(0, ys[left] - ys[left - 1])
            return ys[left] + rise * (x - xs[left]) // (xs[left] - xs[left - 1])
        return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) // (xs[right] - xs[left])


class Grid:
    """A function of two axes: a curve over the second one at every point of the first, which may end where it likes."""

    __slots__ = ("_curves", "_firsts")

    def __init__(self, points: Mapping[int, Mapping[int, int]]) -> None:
        """The value at (first, second) is `points[first][second]`."""
        self._firsts = sorted(points)
        self._curves = [_curve(points[first]) for first in self._firsts]
        require(len(points) >= 2, "points", len(points), "two or more on each axis of a grid")

    @property
    def seconds(self) -> Sequence[int]:
        """Points of the second axis, where the first one starts."""
        return self._curves[0].xs

    def at(self, first: int, second: int) -> int:
        """The value at the two, rounded down."""
        right = min(max(1, bisect_right(self._firsts, first)), len(self._firsts) - 1)
        pair = slice(right - 1, right + 1)
        return Curve(self._firsts[pair], [curve.at(second) for curve in self._curves[pair]]).at(first)


def _curve(points: Mapping[int, int]) -> Curve:
    xs = sorted(points)
    return Curve(xs, [points[x] for x in xs])

"""What pictures are made of, as plotly.js takes it: data and layout in plain types. Colours are names.

"@run0" is the colour of the first run, "@tier1" of the second tier, "@state0" of the first state of a request, "@mark"
of a line that marks a value; the page has a light and a dark value for each. "@run0/18" is the same, transparent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from kvsim.clock import PS_PER_S
from kvsim.report.run_series import RunSeries
from kvsim.report.series import Column, Values

Trace: TypeAlias = dict[str, Any]

NUM_RUN_COLOURS = 6
DASHES = ("solid", "dash", "dot", "dashdot")
NARROW_DECADES = 0.6
DIGITS = ((1.2, (1, 2, 3, 5, 7)), (3, (1, 2, 5)), (math.inf, (1,)))
"""(decades that an axis spans at most, where ticks are in each)."""

MAX_BARS = 128
"""More instances than that are drawn in groups, each as its mean."""

UNITS_OF_TIME = ((600, 1, "s"), (3 * 3600, 60, "min"), (None, 3600, "h"))
"""(up to so many seconds, seconds in one, name)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture: what it is called, what it shows, and what plotly draws."""

    name: str
    title: str
    text: str
    data: list[Trace]
    layout: dict[str, Any]
    height_px: int = 320
    width: Literal["third", "half", "full"] = "half"


class TimeAxis:
    """One unit of time for all pictures, by the longest run."""

    def __init__(self, runs: Sequence[RunSeries]) -> None:
        end_s = max(run.end_ps for run in runs) / PS_PER_S
        self._unit_s, self._unit = next(
            (unit_s, unit) for limit_s, unit_s, unit in UNITS_OF_TIME if limit_s is None or end_s <= limit_s
        )
        self.layout: dict[str, Any] = {
            "title": {"text": f"simulated time, {self._unit}"},
            "range": [0, max(end_s, 1e-9) / self._unit_s],
        }

    def middles(self, edges_ps: Column) -> list[float | None]:
        """Of each interval."""
        return plain((edges_ps[1:] + edges_ps[:-1]) / 2 / PS_PER_S / self._unit_s)

    def edges(self, edges_ps: Column) -> list[float | None]:
        """The first interval's start, and all ends."""
        return plain(edges_ps / PS_PER_S / self._unit_s)

    def ends(self, edges_ps: Column) -> list[float | None]:
        """Of each interval."""
        return plain(edges_ps[1:] / PS_PER_S / self._unit_s)


def plain(values: Sequence[float] | Values, digits: int = 5) -> list[float | None]:
    """Numbers that JSON has, of so many digits; None for what is not a number."""
    return [None if np.isnan(value) else float(f"{value:.{digits}g}") for value in np.asarray(values).tolist()]


def held(edges: list[float | None], y: list[float | None]) -> tuple[list[float | None], list[float | None]]:
    """Steps, one for each interval whose y is known: each lasts until the next one, or to the end."""
    at = [number for number, value in enumerate(y) if value is not None]
    return [*(edges[number] for number in at), *edges[-1:][: len(at)]], [y[number] for number in [*at, *at[-1:]]]


def size(size_bytes: int) -> str:
    """As 1.2 TB."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):  # noqa: B007
        if value < 1000:
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def colour(number: int) -> str:
    """Of the run of this number."""
    return f"@run{number % NUM_RUN_COLOURS}"


def line_of(label: str, number: int, x: list[float | None], y: list[float | None], hover: str) -> Trace:
    """A run's line."""
    dash = DASHES[number // NUM_RUN_COLOURS % len(DASHES)]
    line = {"color": colour(number), "width": 2, "dash": dash}
    extra = f"<extra>{label}</extra>"
    trace = {"type": "scatter", "mode": "lines", "name": label, "x": x, "y": y, "line": line, "showlegend": False}
    return {**trace, "hovertemplate": hover + extra}


def faint(number: int, x: list[float | None], y: list[float | None], dash: str) -> Trace:
    """A thin line that nothing is said about."""
    line = {"color": colour(number), "width": 1, "dash": dash}
    trace = {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "opacity": 0.35}
    return {**trace, "showlegend": False, "hoverinfo": "skip"}


def shaded(number: int, x: list[float | None], by_instance: Values) -> list[Trace]:
    """From the least to the largest of the instances, shaded."""
    line = {"width": 0, "color": colour(number)}
    common = {"type": "scatter", "mode": "lines", "x": x, "line": line, "showlegend": False, "hoverinfo": "skip"}
    low = {**common, "y": plain(by_instance.min(axis=0))}
    return [
        low,
        {**common, "y": plain(by_instance.max(axis=0)), "fill": "tonexty", "fillcolor": f"{colour(number)}/18"},
    ]


def band(name: str, colour: str, x: list[float | None], y: list[float | None], number: int) -> Trace:
    """Stacked on the bands before it, in the row of this number."""
    axes = {} if number == 0 else {"xaxis": f"x{number + 1}", "yaxis": f"y{number + 1}"}
    band = {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "stackgroup": f"row{number}", **axes}
    style = {"line": {"width": 0.5, "color": colour}, "fillcolor": f"{colour}/80", "legendgroup": name}
    form = "%{y:.1%}" if colour.startswith("@tier") else "%{y:,.1f}"
    return {**band, **style, "hovertemplate": form + f"<extra>{name}</extra>"}


def legend_once(data: Sequence[Trace]) -> list[Trace]:
    """The first trace of each name stands for all of them."""
    first = {trace["name"]: number for number, trace in reversed(list(enumerate(data)))}
    return [{**trace, "showlegend": first[trace["name"]] == number} for number, trace in enumerate(data)]


def stacked_rows(runs: Sequence[RunSeries], axis: TimeAxis, y: dict[str, Any]) -> dict[str, Any]:
    """A layout of one row for each run, the first on top, over one axis of time."""
    layout: dict[str, Any] = {"annotations": []}
    count, gap = len(runs), 0.28 / max(len(runs), 2)
    for number, run in enumerate(runs):
        suffix = "" if number == 0 else str(number + 1)
        top = 1 - number * (1 + gap) / (count + gap * (count - 1))
        bottom = max(0.0, top - 1 / (count + gap * (count - 1)))
        layout[f"yaxis{suffix}"] = {**y, "domain": [round(bottom, 4), round(top, 4)], "anchor": f"x{suffix}"}
        is_last = number == count - 1
        layout[f"xaxis{suffix}"] = {**axis.layout, "anchor": f"y{suffix}", "showticklabels": is_last, "matches": "x"}
        if not is_last:
            layout[f"xaxis{suffix}"] |= {"title": {"text": ""}}
        if count > 1:
            layout["annotations"].append(_name(run.label, top))
    layout["xaxis"].pop("matches")
    return layout


def _name(label: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": round(top, 4), "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": label, "showarrow": False, "font": {"size": 12}}


def height_px(runs: Sequence[RunSeries]) -> int:
    """Of a picture with a row for each run."""
    return 140 + 180 * len(runs)


def log_ticks(data: Sequence[Trace]) -> dict[str, Any]:
    """Ticks of a logarithmic axis over all x: few and round, the rounder the more it spans."""
    values = [x for trace in data for x in trace["x"]] or [1.0]
    least, most = min(values), max(values)
    decades = math.log10(most / least)
    if decades < NARROW_DECADES:
        ticks = _evenly(least, most)
    else:
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        digits = next(digits for limit, digits in DIGITS if decades <= limit)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
    return {"tickvals": ticks, "ticktext": [f"{tick:.6g}" for tick in ticks]}


def _evenly(least: float, most: float) -> list[float]:
    """Round numbers between the two, at least one."""
    step = nice_step((most - least) / 5)
    first, last = max(1, math.ceil(least / step)), math.floor(most / step)
    return [step * count for count in range(first, last + 1)] or [least]


def nice_step(at_least: float) -> float:
    """The next of 1, 2, 5, 10 and so on."""
    power = 10.0 ** math.floor(math.log10(at_least)) if at_least > 0 else 1.0
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= at_least)


def share_axis(title: str) -> dict[str, Any]:
    """From 0 to 100 %."""
    return {"title": {"text": title}, "range": [0, 1.02], "tickformat": ".0%", "dtick": 0.25}

"""The picture of hit rates over capacity: what one cache would have hit, and what the runs did."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.report.parts import Figure, Trace, colour, plain, share_axis, size
from kvsim.report.run_series import RunSeries


def capacity(runs: Sequence[RunSeries]) -> Figure | None:
    """Curves of each trace, marks of each run."""
    data: list[Trace] = []
    curves = distinct_curves(runs)
    end_bytes = 2 * max(_memory_bytes(run) for run in runs)
    for number, run in curves.items():
        is_alone = len(curves) == 1
        suffix, stroke = ("", "@text") if is_alone else (f", {run.label}", colour(number))
        data += _curves(run, suffix, stroke, end_bytes)
    data += [_reached(run, number) for number, run in enumerate(runs) if data]
    layout = {
        "xaxis": {"type": "log", "title": {"text": "capacity, bytes of KV cache"}, **_decades(data)},
        "yaxis": share_axis("hit rate"),
        "hovermode": "closest",
        **_capacity_marks(runs),
    }
    text = (
        "What one cache for the whole fleet would hit of these requests, in the order of the trace: least recently "
        "used first, clairvoyant (Belady: no policy hits more), and without bound. Diamonds are the runs, at all the "
        "memory they have: the GPU caches of all instances, their private caches and the pool."
    )
    return Figure("capacity", "Hit rate over capacity", text, data, layout, 380, "full") if data else None


def distinct_curves(runs: Sequence[RunSeries]) -> dict[int, RunSeries]:
    """The first run with each curve, by its number."""
    first: dict[str, int] = {}
    for number, run in enumerate(runs):
        if run.run["capacity"]["lru"]:
            first.setdefault(str([run.run["capacity"], run.run["block_bytes"]]), number)
    return {number: runs[number] for number in first.values()}


def _curves(run: RunSeries, suffix: str, stroke: str, end_bytes: int) -> list[Trace]:
    """All three up to `end_bytes` at least: beyond its last point a curve is flat."""
    curve = run.run["capacity"]
    infinite = curve["infinite_hit_tokens"] / curve["prompt_tokens"]
    x, lru = _points(run, curve["lru"], curve["prompt_tokens"])
    _, opt = _points(run, curve["opt"], curve["prompt_tokens"])
    hover = "%{y:.1%} at %{x:.3~s}B"
    if end_bytes > x[-1]:
        x, lru, opt = [*x, end_bytes], [*lru, lru[-1]], [*opt, opt[-1]]
    return [
        _curve(f"LRU{suffix}", x, lru, stroke, "solid", hover),
        _curve(f"clairvoyant{suffix}", x, opt, stroke, "dash", hover),
        _curve(f"infinite{suffix}", [x[0], x[-1]], [infinite, infinite], stroke, "dot", "%{y:.1%} without bound"),
    ]


def _points(run: RunSeries, points: list[dict[str, int]], prompt_tokens: int) -> tuple[list[int], list[float | None]]:
    block_bytes = run.run["block_bytes"]
    x = [point["capacity_blocks"] * block_bytes for point in points]
    return x, plain(np.array([point["hit_tokens"] for point in points]) / prompt_tokens)


def _curve(name: str, x: list[int], y: list[float | None], stroke: str, dash: str, hover: str) -> Trace:
    line = {"color": stroke, "dash": dash, "width": 2}
    extra = f"<extra>{name}</extra>"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": line,
        "hovertemplate": hover + extra,
    }


def _reached(run: RunSeries, number: int) -> Trace:
    rate = run.metrics["hit_rate"] or 0.0
    marker = {"symbol": "diamond", "size": 13, "color": colour(number), "line": {"color": "@card", "width": 1}}
    hover = f"%{{y:.1%}} reached with {size(_memory_bytes(run))}<extra>{run.label}</extra>"
    point = {"type": "scatter", "mode": "markers", "name": run.label, "x": [_memory_bytes(run)], "y": plain([rate])}
    return {**point, "marker": marker, "hovertemplate": hover}


def _memory_bytes(run: RunSeries) -> int:
    about = run.run
    gpu_bytes = about["gpu_blocks_per_instance"] * about["block_bytes"] * about["instances"]
    return int(gpu_bytes + about["host_bytes"] + about["pool_bytes"])


def _decades(data: Sequence[Trace]) -> dict[str, Any]:
    """Ticks at 1 GB, 10 GB and so on."""
    least, most = (choose(x for trace in data for x in trace["x"]) for choose in (min, max)) if data else (1, 1)
    ticks = [10**power for power in range(len(str(int(least))) - 1, len(str(int(most))) + 1)]
    span = [round(math.log10(least), 3), round(math.log10(most), 3)]
    return {"tickvals": ticks, "ticktext": [size(tick) for tick in ticks], "range": span}


def _capacity_marks(runs: Sequence[RunSeries]) -> dict[str, Any]:
    """Vertical lines at one instance's GPU cache, at all of them, and at the pool."""
    marks: dict[str, int] = {}
    for run in runs:
        gpu_bytes, count = run.run["gpu_blocks_per_instance"] * run.run["block_bytes"], run.num_instances
        marks[f"GPU cache, {size(gpu_bytes)}"] = gpu_bytes
        if count > 1:
            marks[f"{count} GPU caches, {size(gpu_bytes * count)}"] = gpu_bytes * count
        if run.run["pool_bytes"]:
            marks[f"pool, {size(run.run['pool_bytes'])}"] = run.run["pool_bytes"]
    return {
        "shapes": [_mark_line(x) for x in marks.values()],
        "annotations": [_mark_text(text, x) for text, x in marks.items()],
    }


def _mark_line(x: int) -> dict[str, Any]:
    line = {"color": "@mark", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _mark_text(text: str, x: int) -> dict[str, Any]:
    place = {"x": round(math.log10(x), 4), "y": 0.9, "yref": "paper", "xanchor": "right", "yanchor": "top"}
    style = {"textangle": -90, "showarrow": False, "bgcolor": "@card", "font": {"size": 11, "color": "@muted"}}
    return {"text": text, **place, **style}

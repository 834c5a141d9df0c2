"""The pictures of runs, each with what it shows in a sentence."""

from collections.abc import Sequence

import numpy as np

from kvcore.units import div_ceil
from kvsim.report import series
from kvsim.report.capacity_figure import capacity
from kvsim.report.parts import (
    DASHES,
    MAX_BARS,
    Figure,
    TimeAxis,
    Trace,
    band,
    colour,
    faint,
    height_px,
    held,
    legend_once,
    line_of,
    log_ticks,
    nice_step,
    plain,
    shaded,
    share_axis,
    size,
    stacked_rows,
)
from kvsim.report.run_series import GPU, RunSeries
from kvsim.report.series import Values


def figures(runs: Sequence[RunSeries]) -> list[Figure]:
    """Every picture that these runs have something for."""
    axis = TimeAxis(runs)
    found = [
        *latencies(runs),
        hit_rates(runs, axis),
        states(runs, axis),
        tokens_in_flight(runs, axis),
        gpu_busy(runs, axis),
        cache_use(runs, axis),
        link_use(runs, axis),
        pool_fill(runs, axis),
        *balance(runs),
        capacity(runs),
    ]
    return [figure for figure in found if figure is not None and figure.data]


# --- requests ---------------------------------------------------------------------------------------------------------

LATENCIES = {
    "TTFT": ("Time to first token", "s", "From arrival to the first token"),
    "TPOT": ("Time per output token", "ms", "From the first token to completion, per token after the first"),
    "E2E": ("End to end", "s", "From arrival to completion"),
}


def latencies(runs: Sequence[RunSeries]) -> list[Figure]:
    """A distribution for each latency."""
    samples = [run.latencies() for run in runs]
    return [_latency(runs, name, [sample[name] for sample in samples]) for name in LATENCIES]


def _latency(runs: Sequence[RunSeries], name: str, samples: Sequence[Values]) -> Figure:
    title, unit, meaning = LATENCIES[name]
    data: list[Trace] = []
    for number, (run, sample) in enumerate(zip(runs, samples, strict=True)):
        values, share = series.distribution(sample)
        if len(values):
            hover = f"%{{y:.1%}} of requests within %{{x:.4~g}} {unit}"
            data.append(line_of(run.label, number, plain(np.maximum(values, 1e-6)), plain(share), hover))
    layout = {
        "xaxis": {"type": "log", "title": {"text": f"{name}, {unit}"}, **log_ticks(data)},
        "yaxis": share_axis("share of requests"),
        "hovermode": "closest",
    }
    text = f"{meaning}: the share of requests that took no longer."
    return Figure(name.lower(), title, text, data, layout, width="third")


def hit_rates(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure:
    """A band for each tier, a row for each run."""
    data: list[Trace] = []
    for number, run in enumerate(runs):
        edges = axis.edges(run.hit_edges_ps)
        for tier, (name, rate) in enumerate(run.hit_rates().items()):
            if np.nansum(rate) > 0 or name == GPU:
                steps = band(name, f"@tier{tier}", *held(edges, plain(rate)), number)
                data.append({**steps, "line": {**steps["line"], "shape": "hv"}})
    layout = stacked_rows(runs, axis, share_axis("hit rate"))
    text = (
        "Of the prompt tokens of the requests admitted in an interval, the share found in each tier; the rest was "
        "computed."
    )
    return Figure("hit-rates", "Hit rate by tier", text, legend_once(data), layout, height_px(runs))


def states(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure:
    """A band for each state, a row for each run."""
    data: list[Trace] = []
    counts = [run.states() for run in runs]
    for number, (run, by_state) in enumerate(zip(runs, counts, strict=True)):
        for state, (name, count) in enumerate(by_state.items()):
            if any(other[name].any() for other in counts):
                data.append(band(name, f"@state{state}", axis.middles(run.edges_ps), plain(count), number))
    layout = stacked_rows(runs, axis, {"title": {"text": "requests"}, "rangemode": "tozero"})
    text = (
        "Requests in the system, mean of an interval: waiting for admission, loading from the pool, prefill until the "
        "first token, decode until the last."
    )
    return Figure("states", "What requests do", text, legend_once(data), layout, height_px(runs))


def tokens_in_flight(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure:
    """A line for each run."""
    hover = "%{y:,.4~s} tokens"
    data = [
        line_of(run.label, number, axis.ends(run.edges_ps), plain(run.tokens_in_flight()), hover)
        for number, run in enumerate(runs)
    ]
    layout = {"xaxis": axis.layout, "yaxis": {"title": {"text": "tokens"}, "rangemode": "tozero"}}
    text = "Prompt and generated tokens of the requests that are admitted and not complete, all instances together."
    return Figure("tokens", "Tokens in flight", text, data, layout, width="third")


# --- machines ---------------------------------------------------------------------------------------------------------


def gpu_busy(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure:
    """A line for each run, and how far its instances are apart."""
    data = []
    for number, run in enumerate(runs):
        x = axis.middles(run.edges_ps)
        if run.num_instances > 1:
            data += shaded(number, x, run.gpu_busy)
        data.append(line_of(run.label, number, x, plain(run.gpu_busy.mean(axis=0)), "%{y:.1%}"))
    layout = {"xaxis": axis.layout, "yaxis": share_axis("busy")}
    text = "Share of the time in which a step runs: mean of the instances, and from the idlest to the busiest (shaded)."
    return Figure("gpu", "GPU utilisation", text, data, layout, width="third")


def cache_use(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure:
    """A line for each run."""
    data = [
        line_of(run.label, number, axis.middles(run.edges_ps), plain(run.cache_use), "%{y:.1%}")
        for number, run in enumerate(runs)
    ]
    layout = {"xaxis": axis.layout, "yaxis": share_axis("blocks held")}
    text = "Share of the GPU's KV blocks that requests hold while a step runs; the others keep prefixes, or nothing."
    return Figure("gpu-cache", "GPU KV cache in use", text, data, layout, width="third")


def link_use(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure | None:
    """A line for each run and kind of link."""
    data = []
    for number, run in enumerate(runs):
        for index, link in enumerate(run.links):
            label = link.kind if len(runs) == 1 else f"{run.label}: {link.kind}"
            line = line_of(label, number, axis.middles(run.edges_ps), plain(link.mean), "%{y:.1%}")
            data.append({**line, "line": {**line["line"], "dash": DASHES[index % len(DASHES)]}, "showlegend": True})
            data.append(faint(number, axis.middles(run.edges_ps), plain(link.busiest), DASHES[index % len(DASHES)]))
    layout = {"xaxis": axis.layout, "yaxis": share_axis("of the bandwidth")}
    text = "Bytes moved over what the links could carry, mean of the instances (faint: the busiest one)."
    return Figure("links", "Link utilisation", text, data, layout) if data else None


def pool_fill(runs: Sequence[RunSeries], axis: TimeAxis) -> Figure | None:
    """A line for each run and memory."""
    data = []
    for number, run in enumerate(runs):
        for index, fill in enumerate(run.fills):
            label = fill.kind if len(runs) == 1 else f"{run.label}: {fill.kind}"
            share = plain(fill.used_bytes / fill.capacity_bytes)
            hover = f"%{{y:.1%}} of {size(fill.capacity_bytes)}"
            line = line_of(label, number, axis.ends(run.edges_ps), share, hover)
            data.append({**line, "line": {**line["line"], "dash": DASHES[index % len(DASHES)]}, "showlegend": True})
    layout = {"xaxis": axis.layout, "yaxis": share_axis("of the capacity")}
    text = "How much of their capacity the pool's memories hold. Its DRAM evicts at the high watermark."
    return Figure("pool", "Pool utilisation", text, data, layout) if data else None


BALANCES = (
    ("busy", "GPU busy by instance", "share of the run", "Share of the run in which the instance computes."),
    ("computed_tokens", "Tokens computed by instance", "tokens", "Prompt and output tokens that it computed."),
    ("requests", "Requests by instance", "requests", "Requests that it completed."),
)


def balance(runs: Sequence[RunSeries]) -> list[Figure]:
    """Bars for each instance."""
    return [_balance(runs, *row) for row in BALANCES]


def _balance(runs: Sequence[RunSeries], name: str, title: str, label: str, text: str) -> Figure:
    data = []
    for number, run in enumerate(runs):
        first, values = grouped(getattr(run.balance, name))
        bar = {"type": "bar", "name": run.label, "x": first, "y": plain(values), "marker": {"color": colour(number)}}
        hover = "instance %{x}: %{y:.1%}" if name == "busy" else "instance %{x}: %{y:,.0f}"
        data.append({**bar, "hovertemplate": hover + f"<extra>{run.label}</extra>", "showlegend": False})
    axis = share_axis(label) if name == "busy" else {"title": {"text": label}, "rangemode": "tozero"}
    layout = {"xaxis": {"title": {"text": "instance"}, "dtick": _dtick(runs)}, "yaxis": axis, "hovermode": "closest"}
    return Figure(f"balance-{name.replace('_', '-')}", title, text, data, {**layout, "barmode": "group"}, 260, "third")


def grouped(values: Values, max_bars: int = MAX_BARS) -> tuple[list[int], Values]:
    """(first instance, mean) of groups of equal size, no more than `max_bars` of them; of one each where that fits."""
    size_instances = div_ceil(len(values), max_bars)
    first = np.arange(0, len(values), size_instances)
    counts = np.diff(np.append(first, len(values)))
    return first.tolist(), np.add.reduceat(values, first) / counts


def _dtick(runs: Sequence[RunSeries]) -> float:
    return max(1, nice_step(max(run.num_instances for run in runs) / 8))

"""Documents as tables for people; every function takes what `--json` would print."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvsim.document import Document

MISSING = "-"
MARKS = ("p50", "p90", "p99", "mean")

COMPARED = (
    ("hit rate, of prompt tokens", "hit_rate", "{:.1%}"),
    ("  local", "hit_rate_local", "{:.1%}"),
    ("  from the pool", "hit_rate_external", "{:.1%}"),
    ("TTFT p50, s", "ttft_s.p50", "{:,.3f}"),
    ("TTFT p90, s", "ttft_s.p90", "{:,.3f}"),
    ("TTFT p99, s", "ttft_s.p99", "{:,.3f}"),
    ("TPOT p50, ms", "tpot_ms.p50", "{:,.2f}"),
    ("E2E p50, s", "e2e_s.p50", "{:,.2f}"),
    ("tokens/s per GPU, in and out", "throughput_tokens_per_s_per_gpu", "{:,.0f}"),
    ("simulated, s", "simulated_s", "{:,.1f}"),
)
"""(label, key, format) of each row of a comparison."""


WIDTH_OF_A_FILE = 160
"""Columns where output is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: brackets are no markup, numbers have no colours."""
    found = Console(markup=False, highlight=False, emoji=False, stderr=stderr)
    if not found.is_terminal:
        found.width = WIDTH_OF_A_FILE
    return found


def run(result: Document) -> RenderableType:
    """One run."""
    requests = f"{result['requests_completed']:,} completed, {result['requests_rejected']:,} rejected"
    if result["requests_stopped"]:
        requests += f", {result['requests_stopped']:,} stopped with the run"
    reasons = [f"{reason}: {count:,}" for reason, count in result["rejected_reasons"].items()]
    throughput = _shown(result, "throughput_tokens_per_s", "{:,.0f}")
    per_gpu = _shown(result, "throughput_tokens_per_s_per_gpu", "{:,.0f}")
    facts = {
        "offered": ", ".join(f"{key} {value}" for key, value in result["mode"].items()),
        "requests": "; ".join([requests, *reasons]),
        "hit rate": _hit_rates(result),
        "throughput": f"{throughput} tokens/s in and out, {per_gpu} per GPU, {result['num_gpus']} GPUs",
        "preemptions": f"{result['preemptions']:,}; late misses {result['late_misses']:,} blocks",
        "simulated": f"{result['simulated_s']:,.1f} s in {result['wall_s']:,.1f} s, {result['events']:,} events",
        "digest": f"{result['digest']}, decisions {result['decisions_digest']}, invariants {result['invariants']}",
    }
    title = f"{result['scenario']}, engine {result['engine']}, seed {result['seed']}"
    return Group(Text(title, "bold"), _pairs(facts), _latencies(result))


def comparison(left: Document, right: Document) -> RenderableType:
    """Two runs side by side, and the second's ratio to the first."""
    table = _table("", left["scenario"], right["scenario"], "ratio")
    for label, key, form in COMPARED:
        ratio = _ratio(_value(left, key), _value(right, key))
        table.add_row(label, _shown(left, key, form), _shown(right, key, form), ratio)
    title = f"{right['requests_completed']:,} requests on {right['num_gpus']} GPUs"
    return Group(Text(f"{title}; ratio of {right['scenario']} to {left['scenario']}", "bold"), table)


def hits(report: Document, block_len: int) -> RenderableType:
    """Hit rates by capacity and policy; `block_len` is what a capacity counts."""
    total, last_half = report["total_tokens"], report["last_half_tokens"]
    table = _table("policy", "capacity, blocks", "hit tokens", "hit rate", "last half of requests")
    points = [(name, f"{p['capacity_blocks']:,}", p) for name, curve in report["policies"].items() for p in curve]
    for name, capacity, point in [*points, ("any", "no bound", report["infinite"])]:
        rates = _percent(point["hit_tokens"], total), _percent(point["last_half_hit_tokens"], last_half)
        table.add_row(name, capacity, f"{point['hit_tokens']:,}", *rates)
    title = f"{report['requests']:,} requests, {total:,} prompt tokens in blocks of {block_len}"
    return Group(Text(title, "bold"), table)


def trace_stats(stats: Document) -> RenderableType:
    """What a trace holds."""
    facts = {_label(name): _number(value) for name, value in stats.items() if not isinstance(value, Mapping)}
    spreads = {_label(name): value for name, value in stats.items() if isinstance(value, Mapping)}
    sessions = spreads.pop("per session")
    spreads |= {f"{_label(name)} per session": value for name, value in sessions.items()}
    columns = list(next(iter(spreads.values())))
    table = _table("", *columns)
    for label, values in spreads.items():
        table.add_row(label, *(_number(values.get(column)) for column in columns))
    return Group(_pairs(facts), table)


def scenarios(descriptions: Mapping[str, str]) -> RenderableType:
    """Names and descriptions."""
    return _pairs(descriptions)


def models(listing: Document) -> RenderableType:
    """The catalogue."""
    table = _table(
        "model", "parameters, 1e9", "active", "weights per GPU, GB", "KV bytes a token", "a sequence", "groups"
    )
    for model in listing["models"]:
        sizes = (model["num_params"], model["num_active_params"], model["weight_bytes_per_gpu"])
        kept = (f"{model[key]:,}" for key in ("kv_bytes_per_token", "kv_bytes_per_sequence"))
        table.add_row(model["name"], *(f"{size / 1e9:,.1f}" for size in sizes), *kept, _groups(model["groups"]))
    devices = _table("device", "memory, GiB", "TB/s", "bf16 TFLOP/s", "fp8", "fp4")
    for device in listing["devices"]:
        rates = (device[f"{kind}_flops_per_s"] for kind in ("bf16", "fp8", "fp4"))
        memory = f"{device['memory_bytes'] / 2**30:,.0f}", f"{device['memory_bytes_per_s'] / 1e12:,.2f}"
        devices.add_row(
            device["name"], *memory, *(MISSING if rate is None else f"{rate / 1e12:,.0f}" for rate in rates)
        )
    title = f"tensor parallel {listing['tensor_parallel_size']}; KV in the pool, replicas once"
    return Group(Text(title, "bold"), table, Text(), devices)


def _groups(groups: Sequence[Document]) -> str:
    """Groups of one kind as one: how many, of which kind, and tokens in a block."""
    found = Counter((group["kind"], group["block_size"]) for group in groups)
    return ", ".join(f"{count} x {kind} of {size}" for (kind, size), count in found.items())


def agreement(compared: Document) -> RenderableType:
    """Step times by backend, the roofline over whole tables, links: predicted beside published."""
    steps = _table("step times", "backend", "predicted, ms", "reference, ms", "ratio")
    deployment = None
    for row in compared["step_times"]:
        if deployment != (deployment := _deployment(row)):
            steps.add_row(Text(f"{deployment} ({row['source']})", "italic"))
        times = f"{row['predicted_ms']:,.1f}", f"{row['reference_ms']:,.1f}"
        steps.add_row(f"  {row['point']}", row["backend"], *times, f"{row['ratio']:.2f}")
    tables = _table("whole tables", "phase", "backend", "points", "ratio: least", "median", "most")
    for row in compared["tables"]:
        bounds = (f"{row[f'{mark}_ratio']:.2f}" for mark in ("min", "median", "max"))
        tables.add_row(row["table"], row["phase"], row["backend"], f"{row['points']}", *bounds)
    links = _table("links", "unit", "predicted", "reference", "ratio", "source")
    for row in compared["links"]:
        rates = f"{row['predicted']:,.3g}", f"{row['reference']:,.3g}"
        links.add_row(row["point"], row["unit"], *rates, f"{row['ratio']:.2f}", row["source"])
    return Group(steps, "", tables, "", links)


def _deployment(row: Document) -> str:
    sizes = f"tensor parallel {row['tensor_parallel_size']}, data parallel {row['data_parallel_size']}"
    experts = ", expert parallel" if row["enable_expert_parallel"] else ""
    return f"{row['model']} on {row['device']}, {sizes}{experts}"


def _hit_rates(result: Document) -> str:
    whole, local, external = (_shown(result, key, form) for _, key, form in COMPARED[:3])
    return f"{whole} of prompt tokens: local {local}, from the pool {external}"


def _latencies(result: Document) -> Table:
    table = _table("", *MARKS)
    for label, key, form in (
        ("TTFT, s", "ttft_s", "{:,.3f}"),
        ("TPOT, ms", "tpot_ms", "{:,.2f}"),
        ("E2E, s", "e2e_s", "{:,.2f}"),
    ):
        table.add_row(label, *(_shown(result, f"{key}.{mark}", form) for mark in MARKS))
    return table


def _pairs(facts: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _value(result: Document, key: str) -> float | None:
    found: Any = result
    for part in key.split("."):
        found = found[part]
    return None if found is None else float(found)


def _shown(result: Document, key: str, form: str) -> str:
    value = _value(result, key)
    return MISSING if value is None else form.format(value)


def _ratio(left: float | None, right: float | None) -> str:
    return f"{right / left:.2f}x" if left and right is not None else MISSING


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else MISSING


def _number(value: object) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _label(name: str) -> str:
    return name.replace("_", " ")

"""The page in words: the headline table, what the runs' scenarios differ in, and what a reader must be warned of."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.report.run_series import TIERS, RunSeries

MISSING = "-"
SATURATED_SHARE = 0.95
"""A link that is used so much over an interval is called saturated in it."""
WORTH_A_WARNING = 0.05
"""Of the run, that some link is saturated."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number of each run: how it is found and written, and what it means."""

    label: str
    value: Callable[[RunSeries], float | None]
    form: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in the table, and the ratio to the first run where there is one."""

    text: str
    ratio: str


def metric(key: str) -> Callable[[RunSeries], float | None]:
    """The number of metrics.json under this dotted key."""

    def value(run: RunSeries) -> float | None:
        found: Any = run.metrics
        for part in key.split("."):
            found = found[part]
        return None if found is None else float(found)

    return value


def busy(run: RunSeries) -> float | None:
    """Share of the run that the GPUs compute."""
    return float(run.balance.busy.mean())


def cache_use(run: RunSeries) -> float | None:
    """Mean over the intervals in which something is computed."""
    return None if np.isnan(run.cache_use).all() else float(np.nanmean(run.cache_use))


def tier_rate(tier: str) -> Callable[[RunSeries], float | None]:
    """Hit tokens in the tier over prompt tokens, of the whole run."""

    def rate(run: RunSeries) -> float | None:
        prompt_tokens = int(run.requests.input_len[run.requests.is_admitted].sum())
        return float(run.hit_tokens[tier].sum()) / prompt_tokens if prompt_tokens else None

    return rate


def link_use(kind: str) -> Callable[[RunSeries], float | None]:
    """Of the whole run."""
    return lambda run: next((link.whole_run for link in run.links if link.kind == kind), None)


def fill(kind: str) -> Callable[[RunSeries], float | None]:
    """The fullest that the memory was at the end of an interval."""
    return lambda run: next(
        (float(found.used_bytes.max()) / found.capacity_bytes for found in run.fills if found.kind == kind), None
    )


SHARE, SECONDS, COUNT = "{:.1%}", "{:,.3f}", "{:,.0f}"

OF_REQUESTS = (
    Headline("requests completed", metric("requests_completed"), COUNT, "all tokens generated"),
    Headline("requests rejected", metric("requests_rejected"), COUNT, "longer than an instance's KV cache"),
    Headline("hit rate", metric("hit_rate"), SHARE, "of the prompt tokens of admitted requests, found in any cache"),
    Headline("- in the GPU cache", metric("hit_rate_local"), SHARE, "of the instance itself, at first admission"),
    Headline("- elsewhere", metric("hit_rate_external"), SHARE, "what the load left valid beyond that"),
)
LATENCIES = (
    Headline("TTFT p50, s", metric("ttft_s.p50"), SECONDS, "arrival to first token, median"),
    Headline("TTFT p90, s", metric("ttft_s.p90"), SECONDS, "nine of ten wait no longer"),
    Headline("TTFT p99, s", metric("ttft_s.p99"), SECONDS, "99 of 100 wait no longer"),
    Headline("TTFT mean, s", metric("ttft_s.mean"), SECONDS, "over all requests with a first token"),
    Headline("TPOT p50, ms", metric("tpot_ms.p50"), "{:,.2f}", "first token to completion, per token after the first"),
    Headline("TPOT p99, ms", metric("tpot_ms.p99"), "{:,.2f}", "of requests with at least two tokens"),
    Headline("E2E p50, s", metric("e2e_s.p50"), "{:,.2f}", "arrival to completion, median"),
    Headline("E2E p99, s", metric("e2e_s.p99"), "{:,.2f}", "99 of 100 take no longer"),
    Headline("tokens/s", metric("throughput_tokens_per_s"), COUNT, "prompt and output, completed, over the makespan"),
    Headline("tokens/s per GPU", metric("throughput_tokens_per_s_per_gpu"), COUNT, "the same over all GPUs"),
    Headline("GPU busy", busy, SHARE, "share of the makespan in which a step runs, mean of the instances"),
    Headline("KV cache in use", cache_use, SHARE, "GPU blocks held by requests, while a step runs"),
)
TROUBLE = (
    Headline("preemptions", metric("preemptions"), COUNT, "requests that gave their blocks back and began anew"),
    Headline("late misses, blocks", metric("late_misses"), COUNT, "promised by a lookup and gone when fetched"),
    Headline("makespan, s", metric("simulated_s"), "{:,.1f}", "start of the trace to the last completion"),
)


def headlines(runs: Sequence[RunSeries]) -> list[Headline]:
    """Those of every run, and those of the tiers, links and memories that these have."""
    tiers = [tier for tier in TIERS.values() if any(run.hit_tokens[tier].any() for run in runs)]
    links = dict.fromkeys(link.kind for run in runs for link in run.links)
    memories = dict.fromkeys(found.kind for run in runs for found in run.fills)
    of_load = "of the prompt tokens: loads that left them valid, by where their bytes lay"
    return [
        *OF_REQUESTS,
        *(Headline(f"-- {tier}", tier_rate(tier), SHARE, of_load) for tier in tiers),
        *LATENCIES,
        *(Headline(f"{kind} in use", link_use(kind), SHARE, "bytes moved over what could be") for kind in links),
        *(Headline(f"{kind} filled to", fill(kind), SHARE, "of its capacity, at most") for kind in memories),
        *TROUBLE,
    ]


def rows(runs: Sequence[RunSeries]) -> list[tuple[Headline, list[Cell]]]:
    """The headline table without the rows that no run has a number for."""
    found = []
    for headline in headlines(runs):
        values = [headline.value(run) for run in runs]
        if any(value is not None for value in values):
            found.append((headline, [_cell(headline, values[0], value) for value in values]))
    return found


def _cell(headline: Headline, first: float | None, value: float | None) -> Cell:
    if value is None:
        return Cell(MISSING, MISSING)
    return Cell(headline.form.format(value), f"{value / first:.2f}×" if first else MISSING)


def differences(scenarios: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(section.key, each scenario's value) where they are not all alike; names and descriptions are left out."""
    flat = [_flat(scenario) for scenario in scenarios]
    keys = dict.fromkeys(key for values in flat for key in values)
    texts = {key: [_text(values[key]) if key in values else MISSING for values in flat] for key in keys}
    own = ("scenario.name", "scenario.description")
    return [(key, values) for key, values in texts.items() if len(set(values)) > 1 and key not in own]


def _flat(scenario: dict[str, Any]) -> dict[str, Any]:
    tables = {section: table if isinstance(table, dict) else {"*": table} for section, table in scenario.items()}
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def warnings(runs: Sequence[RunSeries]) -> list[str]:
    """What changes how the numbers are to be read, a sentence each."""
    found = [warning for run in runs for warning in _of_run(run)]
    served = {(run.run["trace"]["name"], run.run["trace"]["requests"]) for run in runs}
    if len(served) > 1:
        found.insert(0, "The runs did not serve the same trace: their numbers are not comparable one to one.")
    return found


def _of_run(run: RunSeries) -> list[str]:
    metrics, label = run.metrics, run.label
    found = []
    if not metrics["requests_completed"]:
        found.append(f"{label}: no request completed.")
    if metrics["requests_stopped"]:
        stopped = metrics["requests_stopped"]
        found.append(
            f"{label}: the run was stopped, and {stopped:,} requests it left unfinished are in no E2E latency."
        )
    if metrics["requests_rejected"]:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in metrics["rejected_reasons"].items())
        found.append(f"{label}: requests were rejected and are in no latency ({reasons}).")
    if metrics["late_misses"]:
        found.append(f"{label}: {metrics['late_misses']:,} blocks were promised by the pool and gone when fetched.")
    rejected = (metrics["pool"] or {}).get("rejected", 0)
    if rejected:
        found.append(f"{label}: the pool refused {rejected:,} blocks for want of space.")
    return found + _saturated(run)


def _saturated(run: RunSeries) -> list[str]:
    found = []
    for link in run.links:
        share = float((link.busiest >= SATURATED_SHARE).mean())
        if share >= WORTH_A_WARNING:
            found.append(f"{run.label}: in {share:.0%} of the time some {link.kind} link was saturated.")
    return found

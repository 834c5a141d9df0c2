"""A result folder as series to draw and numbers to tell: everything the page says about one run."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvsim.clock import PS_PER_MS, PS_PER_S
from kvsim.document import Document
from kvsim.events import Kind
from kvsim.links.parcel import Tier
from kvsim.metrics import Columns, Events, Requests
from kvsim.parquet import Table, names, numbers
from kvsim.report import series
from kvsim.report.series import Column, Values
from kvsim.result_folder import Result

GPU = "GPU cache"
TIERS = {Tier.HOST: "host cache", Tier.LOCAL: "pool, own host", Tier.REMOTE: "pool", Tier.DISK: "pool, SSD"}
"""What loads bring blocks from, nearest first, and what the page calls it."""

ADMISSIONS = 30
"""Of so many admissions on average a point of a hit rate is made: fewer would draw noise."""

STATES = ("waiting", "loading", "prefill", "decode")
"""What requests do, in order."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One kind of link over all instances, in each interval: share of its bandwidth in use, and of the busiest one."""

    kind: str
    mean: Values
    busiest: Values
    whole_run: float
    """Of the whole run, all links of the kind together."""


@dataclass(frozen=True, slots=True)
class Fill:
    """How full a memory is at the end of each interval."""

    kind: str
    capacity_bytes: int
    used_bytes: Values


@dataclass(frozen=True, slots=True)
class Balance:
    """By instance: share of the run that it computed, tokens it computed, requests it completed."""

    busy: Values
    computed_tokens: Values
    requests: Values


class RunSeries:
    """`label` names the run on the page."""

    def __init__(self, result: Result, label: str) -> None:
        self.result = result
        self.label = label
        self.metrics: Document = result.metrics
        self.run: Document = result.run
        self.num_instances: int = result.run["instances"]
        self.requests = Requests(_events(result.events))
        self.end_ps = self.requests.end_ps()
        self.edges_ps = series.edges(self.end_ps)
        num_admitted = int(self.requests.is_admitted.sum())
        self.hit_edges_ps = series.edges(self.end_ps, min(series.NUM_POINTS, max(12, num_admitted // ADMISSIONS)))

    # --- requests ---

    def latencies(self) -> dict[str, Values]:
        """TTFT (s), TPOT (ms) and E2E (s) of every request that has one."""
        requests = self.requests
        return {
            "TTFT": requests.ttft_ps() / PS_PER_S,
            "TPOT": requests.tpot_ps() / PS_PER_MS,
            "E2E": requests.e2e_ps() / PS_PER_S,
        }

    def hit_rates(self) -> dict[str, Values]:
        """By tier: hit tokens over prompt tokens of the requests admitted in each interval."""
        admitted = self._of(Kind.ADMITTED)
        prompt_tokens = series.sums(admitted.time_ps, self.requests.input_len[admitted.request], self.hit_edges_ps)
        return {
            tier: series.ratio(series.sums(admitted.time_ps, tokens, self.hit_edges_ps), prompt_tokens)
            for tier, tokens in self.hit_tokens.items()
        }

    @cached_property
    def hit_tokens(self) -> dict[str, Values]:
        """By tier, of each first admission: what the GPU held, and what its load left valid by where its bytes lay."""
        admitted = self._of(Kind.ADMITTED)
        loaded_bytes = self._first_load_bytes()[:, admitted.request]
        external = self.requests.external_hit_len() * series.ratio(loaded_bytes, loaded_bytes.sum(axis=0))
        shares = dict(zip(TIERS.values(), np.nan_to_num(external), strict=True))
        return {GPU: admitted.a.astype(np.float64), **shares}

    def _first_load_bytes(self) -> Values:
        """Bytes by tier and request that came until the request's first load had ended."""
        loads, tier = self.result.loads, names(self.result.loads, "tier")
        time_ps, request, size_bytes = (numbers(loads, name) for name in ("time_ps", "request", "size_bytes"))
        is_first = time_ps <= self.requests.time_ps(Kind.LOADED)[request]
        row = np.array([[tier.value for tier in TIERS].index(name) for name in tier.names], dtype=np.int64)[tier.codes]
        count = len(self.requests.input_len)
        key = (row * count + request)[is_first]
        return series.per_key(key, size_bytes[is_first], len(TIERS) * count).reshape(len(TIERS), count)

    def states(self) -> dict[str, Values]:
        """By state: requests in it, on average over each interval; a preempted one stays in prefill or decode."""
        times = self._state_times()
        found = {}
        for state, (start_ps, end_ps) in zip(STATES, pairwise(times), strict=True):
            change = np.repeat([1, -1], len(start_ps))
            found[state] = series.mean_level(np.concatenate((start_ps, end_ps)), change, self.edges_ps)
        return found

    def tokens_in_flight(self) -> Values:
        """Prompt and generated tokens of requests that are admitted and not complete, at the end of each interval."""
        _, admitted_ps, _, token_ps, finished_ps = self._state_times()
        requests = self.requests
        input_len, output_len = (
            length[self._is_served] for length in (requests.input_len, requests.output_len * requests.is_finished)
        )
        change = np.concatenate((input_len, -input_len - output_len))
        level = series.level_at(np.concatenate((admitted_ps, finished_ps)), change, self.edges_ps[1:])
        generated = series.spread_evenly(token_ps, finished_ps, output_len, self.edges_ps)
        return np.maximum(level + np.cumsum(generated), 0)

    def _state_times(self) -> list[Column]:
        """Of requests that were served: arrival, first admission, end of its first load, first token, completion.

        What had not come when the run was stopped comes then.
        """
        arrived_ps, admitted_ps, loaded_ps, token_ps, finished_ps = (
            np.where(self.requests.has(kind), self.requests.time_ps(kind), self.end_ps)
            for kind in (Kind.ARRIVED, Kind.ADMITTED, Kind.LOADED, Kind.FIRST_TOKEN, Kind.FINISHED)
        )
        admitted, computes_ps = self._of(Kind.ADMITTED), admitted_ps.copy()
        loads = admitted.request[admitted.b > 0]
        computes_ps[loads] = np.maximum(loaded_ps[loads], admitted_ps[loads])
        ordered = (arrived_ps, admitted_ps, computes_ps, token_ps, finished_ps)
        return [time_ps[self._is_served] for time_ps in ordered]

    @cached_property
    def _is_served(self) -> npt.NDArray[np.bool_]:
        return self.requests.has(Kind.ARRIVED) & ~self.requests.is_rejected

    # --- machines ---

    @cached_property
    def gpu_busy(self) -> Values:
        """By instance: share of each interval in which it computes a step."""
        steps, width_ps = self.result.steps, np.diff(self.edges_ps)
        start_ps, end_ps, instance = (numbers(steps, name) for name in ("start_ps", "end_ps", "instance"))
        count = self.num_instances
        busy_ps = series.spread_by_key(instance, count, start_ps, end_ps, end_ps - start_ps, self.edges_ps)
        return busy_ps / width_ps

    @cached_property
    def cache_use(self) -> Values:
        """Share of the GPU's KV blocks that requests hold, on average over the time that is computed in."""
        steps = self.result.steps
        start_ps, end_ps, held = (numbers(steps, name) for name in ("start_ps", "end_ps", "held_blocks"))
        busy_ps = series.spread_evenly(start_ps, end_ps, end_ps - start_ps, self.edges_ps)
        area = series.spread_evenly(start_ps, end_ps, held * (end_ps - start_ps).astype(np.float64), self.edges_ps)
        return series.ratio(area, busy_ps * self.run["gpu_blocks_per_instance"])

    @cached_property
    def links(self) -> list[LinkUse]:
        """Every kind of link that carried something."""
        kinds = dict.fromkeys(link["kind"] for link in self.run["links"])
        uses = (self._link_use(kind) for kind in kinds)
        return [use for use in uses if use.whole_run]

    def _link_use(self, kind: str) -> LinkUse:
        transfers, column = self.result.transfers, names(self.result.transfers, "link")
        mine = np.flatnonzero(column.codes == (column.names.index(kind) if kind in column.names else len(column.names)))
        rows = mine[np.argsort(numbers(transfers, "instance")[mine], kind="stable")]
        instance = numbers(transfers, "instance")[rows]
        columns = [numbers(transfers, name)[rows] for name in ("start_ps", "end_ps", "size_bytes")]
        uses = []
        for link in (link for link in self.run["links"] if link["kind"] == kind):
            low, high = np.searchsorted(instance, (link["instance"], link["instance"] + 1))
            uses.append(self._use(link, *(values[low:high] for values in columns)))
        return LinkUse(kind, np.mean(uses, axis=0), np.max(uses, axis=0), float(np.mean(uses)))

    def _use(self, link: Document, start_ps: Column, end_ps: Column, size_bytes: Column) -> Values:
        """Share of one link's bandwidth in each interval: a busy one is full, or carries each transfer evenly."""
        busy = series.busy_share(start_ps, end_ps, self.edges_ps)
        if link["full_when_busy"]:
            return busy
        capacity_bytes = np.diff(self.edges_ps) / PS_PER_S * link["bandwidth_bytes_per_s"]
        carried: Values = series.spread_evenly(start_ps, end_ps, size_bytes, self.edges_ps) / capacity_bytes
        return np.minimum(carried, busy)

    @cached_property
    def fills(self) -> list[Fill]:
        """Every memory."""
        fills, column = self.result.fills, names(self.result.fills, "memory")
        found = []
        for memory in self.run["memories"]:
            mine = column.codes == column.names.index(memory["kind"])
            time_ps, used_bytes = (numbers(fills, name)[mine] for name in ("time_ps", "used_bytes"))
            level = series.value_at(time_ps, used_bytes, self.edges_ps[1:])
            found.append(Fill(memory["kind"], memory["capacity_bytes"], level))
        return found

    @cached_property
    def balance(self) -> Balance:
        """What each instance did until the end; of a step that goes on beyond it, its share."""
        finished, whole_run_ps = self._of(Kind.FINISHED), np.array([0, max(self.end_ps, 1)])
        columns = ("instance", "start_ps", "end_ps", "computed_tokens")
        instance, start_ps, end_ps, tokens = (numbers(self.result.steps, name) for name in columns)
        count = self.num_instances
        busy_ps, computed_tokens = (
            series.spread_by_key(instance, count, start_ps, end_ps, amount, whole_run_ps).reshape(-1)
            for amount in (end_ps - start_ps, tokens)
        )
        return Balance(
            busy_ps / whole_run_ps[-1], computed_tokens, series.per_key(finished.b, np.ones_like(finished.b), count)
        )

    def _of(self, kind: Kind) -> Columns:
        return self.requests.events.of(kind)


def _events(table: Table) -> Events:
    kind = names(table, "kind")
    codes = np.array([Kind[name] for name in kind.names], dtype=np.int64)[kind.codes]
    time_ps, request, a, b = (numbers(table, name) for name in ("time_ps", "request", "a", "b"))
    return Events(Columns(time_ps, codes, request, a, b))

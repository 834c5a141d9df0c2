"""What is counted, as vLLM wants to be told: one object that travels from worker to scheduler to the API server."""

from collections.abc import Callable, Mapping
from typing import Any

from kvconnector.metrics import BUCKETS_S, METRICS, Kind, Metric, Numbers, Series, combine, summary
from kvconnector.vllm_compat import KVConnectorPromMetrics, KVConnectorStats
from kvcore.units import NS_PER_S


class Stats(KVConnectorStats):
    """`data` are the numbers of some ranks, halves and steps."""

    data: Numbers

    def reset(self) -> None:
        """Start over."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: "Stats") -> "Stats":
        """Both as one; in one process the same object may be with several loggers, so that neither is changed."""
        return Stats(data=combine(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log line."""
        return summary(self.data)


class PromMetrics(KVConnectorPromMetrics):
    """The metrics in Prometheus' registry (or Ray's), with vLLM's labels before their own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._record: dict[tuple[int, Series], Callable[[Any], None]] = {}
        for metric in METRICS:
            parent = self._new(metric, [*labelnames, *(label for label, _ in metric.labels)])
            for engine, labelvalues in per_engine_labelvalues.items():
                for values in metric.all_values():
                    child = parent.labels(*labelvalues, *values)
                    self._record[engine, metric.of(*values)] = _RECORD[metric.kind](child)

    def observe(self, transfer_stats_data: Numbers, engine_idx: int = 0) -> None:
        """Add one step's numbers of an engine."""
        for series, value in transfer_stats_data.items():
            self._record[engine_idx, series](value)

    def _new(self, metric: Metric, labelnames: list[str]) -> Any:
        named = {"name": metric.full_name, "documentation": metric.text, "labelnames": labelnames}
        if metric.kind is Kind.GAUGE:
            return self._gauge_cls(**named, multiprocess_mode="mostrecent")
        if metric.kind is Kind.SECONDS:
            return self._histogram_cls(**named, buckets=list(BUCKETS_S))
        return self._counter_cls(**named)


def _observer(child: Any) -> Callable[[list[int]], None]:
    def observe(durations_ns: list[int]) -> None:
        for took_ns in durations_ns:
            child.observe(took_ns / NS_PER_S)

    return observe


_RECORD: dict[Kind, Callable[[Any], Callable[[Any], None]]] = {
    Kind.COUNTER: lambda child: child.inc,
    Kind.GAUGE: lambda child: child.set,
    Kind.SECONDS: _observer,
}
"""What a metric's child does with the numbers of a step."""

"""The dashboard asks for what the connector exports, by the labels that it has, and shows all of it."""

import json
import re

import pytest
from kvconnector.metrics import METRICS, PREFIX

from tests.support import PROJECT

DASHBOARD = json.loads((PROJECT / "connector" / "grafana" / "kvtwin.json").read_text(encoding="utf-8"))
METRIC_OF_SAMPLE = {name: metric for metric in METRICS for name in metric.sample_names}
ENGINE_LABELS = {"model_name", "engine", "instance", "le"}  # vLLM's, and what Prometheus adds itself

SELECTOR = re.compile(r"([a-z_]+:[\w:]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")


def queries(dashboard):
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return panels, variables


def faults(query):
    """What of a query nobody exports: names of metrics, labels, and values of labels."""
    found = []
    names = set(re.findall(r"\w+:\w+", query))
    found += [f"no metric {name}" for name in names - METRIC_OF_SAMPLE.keys()]
    known = set(ENGINE_LABELS)
    for name, matchers in SELECTOR.findall(query):
        labels = dict(METRIC_OF_SAMPLE[name].labels) if name in METRIC_OF_SAMPLE else {}
        known |= labels.keys()
        for label, sign, value in MATCHER.findall(matchers):
            if label not in labels and label not in ENGINE_LABELS:
                found.append(f"{name} has no label {label}")
            if label in labels and sign in ("=", "!=") and value not in labels[label]:
                found.append(f"{label} is never {value}")
    grouped = {label.strip() for labels in GROUPING.findall(query) for label in labels.split(",")}
    return found + [f"nothing is labelled {label}" for label in grouped - known]


def unseen(texts):
    """Metrics that no query shows."""
    shown = {METRIC_OF_SAMPLE[name].name for text in texts for name, _ in SELECTOR.findall(text)}
    return {metric.name for metric in METRICS} - shown


def test_every_query_asks_for_what_is_exported():
    panels, variables = queries(DASHBOARD)
    assert len(panels) > 10
    assert [fault for query in (*panels, *variables) for fault in faults(query)] == []
    assert all(SELECTOR.search(query) for query in panels)


def test_every_metric_is_shown():
    panels, _ = queries(DASHBOARD)
    assert unseen(panels) == set()
    assert unseen([query for query in panels if "control_refused" not in query]) == {"control_refused"}


def test_the_readme_lists_every_metric():
    text = (PROJECT / "connector" / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Seen from outside")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {metric.name for metric in METRICS}


def test_panels_do_not_overlap_and_say_what_they_show():
    panels = DASHBOARD["panels"]
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


@pytest.mark.parametrize(
    "query",
    [
        f"rate({PREFIX}lookup_total{{}}[5m])",
        f"rate({PREFIX}operation_seconds{{}}[5m])",
        f'{PREFIX}keys_total{{outcome="evicted"}}',
        f'{PREFIX}lookups_total{{tier="pool"}}',
        f"sum by (rank) ({PREFIX}lookups_total{{}})",
        "label_values(vllm:kvtwin_lookup, model_name)",
    ],
)
def test_control_a_query_for_what_nobody_exports(query):
    assert len(faults(query)) == 1

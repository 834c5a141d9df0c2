"""Each alert is right about when it fires, asks for what is exported, and has a runbook and a panel."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.test_dashboard import DASHBOARD, SELECTOR, faults
from tests.support import PROJECT

DEPLOY = PROJECT / "connector" / "deploy"
RULES, CASES = DEPLOY / "alerts.yml", DEPLOY / "alerts_test.yml"
RUNBOOKS = {path.stem: path.read_text(encoding="utf-8") for path in (DEPLOY / "runbooks").glob("*.md")}
(GROUP,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
PROMTOOL = shutil.which("promtool", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
CHOSEN = 'model_name=~"$model", instance=~"$instance"'  # in the dashboard
COMPARISON = re.compile(r"(.*) (>|<=) ([\d.]+)")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool, which comes with Prometheus, is not installed")


def compared(alert):
    """(what is compared, the sign, the bound) of an alert's expression."""
    return COMPARISON.fullmatch(" ".join(ALERTS[alert]["expr"].split())).groups()


# -- when they fire ----------------------------------------------------------------------------------------------------


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)


@needs_promtool
def test_the_rules_are_valid_and_fire_when_they_should():
    for result in (promtool("check", "rules", RULES), promtool("test", "rules", CASES)):
        assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("end", ["> -1", "< -1"])
def test_control_alerts_that_always_fire_or_never_are_found_out(end, tmp_path):
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = f"{compared(rule['alert'])[0]} {end}"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules), encoding="utf-8")
    shutil.copy(CASES, tmp_path)
    result = promtool("test", "rules", tmp_path / CASES.name)
    assert result.returncode != 0
    assert set(re.findall(r"alertname: (\w+)", result.stdout + result.stderr)) == set(ALERTS)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    tried = [(check["alertname"], bool(check["exp_alerts"])) for case in cases for check in case["alert_rule_test"]]
    assert set(tried) == {(alert, fires) for alert in ALERTS for fires in (True, False)}


# -- what they ask for -------------------------------------------------------------------------------------------------


def matched_values(query):
    """The alternatives of every =~ in the query, each as an equality."""
    return [
        f'{name}{{{label}="{value}"}}'
        for name, matchers in SELECTOR.findall(query)
        for label, values in re.findall(r'(\w+)=~"([^"]*)"', matchers)
        for value in values.split("|")
    ]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_asks_for_what_is_exported(alert):
    query = ALERTS[alert]["expr"]
    assert SELECTOR.search(query)
    assert [fault for asked in (query, *matched_values(query)) for fault in faults(asked)] == []


def test_control_an_outcome_that_nobody_has_is_found_in_an_alternative():
    (query,) = matched_values('vllm:kvtwin_keys_total{outcome=~"bad_kontent"}')
    assert faults(query) == ["outcome is never bad_kontent"]


# -- runbooks ----------------------------------------------------------------------------------------------------------

METRIC_IN_PROSE = re.compile(r"`(?:vllm:kvtwin_)?([a-z_]+)(?:\{([^}]*)\})?`")
EXPORTED = {"breaker_state", "waiting_jobs", "switched_off"}  # what the runbooks name, as `name{label="value"}`


def prose_faults(text):
    """What a runbook says of the metrics that it names, and nobody exports."""
    named = [(name, labels) for name, labels in METRIC_IN_PROSE.findall(text) if name in EXPORTED or labels]
    return [fault for name, labels in named for fault in faults(f"vllm:kvtwin_{name}{{{labels}}}")]


def test_every_alert_has_a_runbook_and_the_other_way_round():
    assert set(RUNBOOKS) == set(ALERTS)
    assert {rule["annotations"]["runbook"] for rule in ALERTS.values()} == {f"runbooks/{name}.md" for name in RUNBOOKS}


@pytest.mark.parametrize("alert", RUNBOOKS)
def test_a_runbook_is_short_and_says_what_to_do(alert):
    text = RUNBOOKS[alert]
    assert text.startswith(f"# {alert}\n")
    assert len(text.splitlines()) <= 25
    assert [text.count(f"**{part}**") for part in ("Urgent?", "Look at", "Do", "Undo")] == [1] * 4
    assert prose_faults(text) == []


def test_control_a_runbook_that_names_what_nobody_exports():
    assert prose_faults('Look at `waiting_jobs{operation="eviction"}`.') == ["operation is never eviction"]
    assert prose_faults('Look at `waiting_works{operation="load"}`.') != []


def test_the_panels_that_runbooks_name_are_there():
    panels = {panel["title"] for panel in DASHBOARD["panels"]}
    named = {
        title for text in RUNBOOKS.values() for title in re.findall(r'[Pp]anel\s"([^"]+)"', " ".join(text.split()))
    }
    assert named
    assert named <= panels


# -- the dashboard -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS)
def test_a_panel_shows_what_the_alert_compares_with_which_bound_and_its_runbook(alert):
    (panel,) = (panel for panel in DASHBOARD["panels"] if panel["title"] == alert)
    (target,) = panel["targets"]
    left, _, bound = compared(alert)
    assert target["expr"].replace(f", {CHOSEN}", "").replace(CHOSEN, "") == left
    assert target["expr"].count(CHOSEN) == len(SELECTOR.findall(left))
    assert [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]] == [None, float(bound)]
    assert [link["url"] for link in panel["links"]] == [f"${{runbooks}}/{alert}.md"]

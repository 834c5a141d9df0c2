"""Step times that aiconfigurator makes: the same as the shipped ones; it is asked for only when it is named."""

import sys

import pytest

from kvsim import scenario
from kvsim.catalog import devices, llm_models
from kvsim.cost import estimated
from kvsim.cost.deployment import Deployment
from kvsim.cost.estimated import MODEL_PATHS, SYSTEMS, estimated_table
from kvsim.toml import InvalidToml
from tests.kvsim.test_cost_table import STEPS

ASKED = ["engine.step_time=aiconfigurator"]


@pytest.fixture
def not_installed(monkeypatch):
    """As where it is not: an import of it fails."""
    monkeypatch.setitem(sys.modules, "aiconfigurator", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator.cli.api", None)
    estimated_table.cache_clear()


def test_without_it_a_scenario_that_names_it_is_refused_with_the_command(not_installed):
    with pytest.raises(InvalidToml, match=r"aiconfigurator to be installed .*: pip install 'kvtwin\[aiconfigurator\]'"):
        scenario.load("pool-16", ASKED)


def test_nothing_else_asks_for_it(not_installed):
    for name in ("roofline", "table:llama-3.1-8b_h100_tp1"):
        assert scenario.load("pool-16", [f"engine.step_time={name}"]).step_time.step_ps([(0, 100)], 0, 0)


def test_its_names_are_those_of_the_catalogue():
    assert MODEL_PATHS.keys() <= set(llm_models()) and SYSTEMS.keys() <= set(devices())


class Estimate:
    """aiconfigurator's answer to a question."""

    def __init__(self, mode, isl, batch_size, prefix=0, **asked):
        self.ttft = self.tpot = isl * batch_size + prefix / 1000
        self.asked = asked


@pytest.fixture
def fake(monkeypatch):
    """Something in its place that remembers the last question."""
    asked = {}

    def estimate(**question):
        asked.update(question)
        return Estimate(**question)

    monkeypatch.setattr(estimated, "_cli_estimate", lambda: estimate)
    estimated_table.cache_clear()
    yield asked
    estimated_table.cache_clear()


def test_it_is_asked_for_the_deployment(fake):
    estimated_table(Deployment("kimi-k2.5-nvfp4", "gb200", 2, 4, True))
    sizes = {key: fake[key] for key in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")}
    assert sizes == {"tp_size": 2, "attention_dp_size": 4, "moe_tp_size": 1, "moe_ep_size": 8}
    assert (fake["model_path"], fake["system_name"]) == ("nvidia/Kimi-K2.5-NVFP4", "gb200")
    estimated_table(Deployment("kimi-k2.5-nvfp4", "gb200", 2, 4, False))
    assert (fake["moe_tp_size"], fake["moe_ep_size"]) == (8, 1)


def test_its_answers_are_milliseconds_of_a_prompt_and_of_a_batch(fake):
    steps = estimated_table(Deployment("llama-3.1-8b", "h100-sxm", 1, 1, False))
    assert "moe_tp_size" not in fake
    assert steps.step_ps([(1_024, 64)], 0, 0) == (1_024 + 64) * 10**9 + 1_024 * 10**6
    assert steps.step_ps((), 8, 8 * 4_096) == 8 * 4_096 * 10**9


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (Deployment("gemma-4-31b", "h100-sxm", 1, 1, False), "a model of .*llama-3.1-8b.*not gemma-4-31b"),
        (Deployment("llama-3.1-8b", "h20", 1, 1, False), "a device of .*h100-sxm.*not h20"),
    ],
)
def test_what_it_does_not_know_is_refused(fake, of, expected):
    with pytest.raises(ValueError, match=expected):
        estimated_table(of)


def test_what_it_has_no_data_for_is_refused(monkeypatch):
    def fails(**_question):
        raise AssertionError("no rows")

    monkeypatch.setattr(estimated, "_cli_estimate", lambda: fails)
    estimated_table.cache_clear()
    with pytest.raises(ValueError, match=r"something that aiconfigurator has data for \(no rows\)"):
        estimated_table(Deployment("llama-3.1-8b", "h200", 1, 1, False))


@pytest.mark.slow
def test_it_makes_the_shipped_table():
    pytest.importorskip("aiconfigurator", reason="aiconfigurator is not installed")
    estimated_table.cache_clear()
    made = estimated_table(Deployment("llama-3.1-8b", "h100-sxm", 1, 1, False))
    shipped = STEPS["llama-3.1-8b_h100_tp1"]
    for step in [([(0, 8_192)], 0, 0), ([(65_536, 2_048)], 0, 0), ((), 32, 32 * 8_192)]:
        assert made.step_ps(*step) == pytest.approx(shipped.step_ps(*step), rel=1e-4)

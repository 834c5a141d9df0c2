"""The page as a reader meets it: complete and deterministic, and in a real browser drawn, legible and alone."""

import json
import re
from pathlib import Path

import pytest

from kvsim.report.page import distinct_labels, page, script_json
from tests.kvsim.browser import browser, complaints, look_at
from tests.kvsim.command import inside, refused

SMALL = ["cluster.instances=4", "workload.sessions=17", "workload.turns=6", "workload.common_len=1000"]
NAMES = [
    "ttft", "tpot", "e2e", "hit-rates", "states", "tokens", "gpu", "gpu-cache", "links", "pool", "balance-busy",
    "balance-computed-tokens", "balance-requests", "capacity",
]  # fmt: skip

needs_browser = pytest.mark.skipif(browser() is None, reason="no Chromium here: .ci/install-browser installs one")


def run_into(folder, scenario, *settings):
    chosen = [part for setting in [*SMALL, *settings] for part in ("--set", setting)]
    result = inside("run", scenario, *chosen, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Without a pool, with one, and with one that is too small behind slow links."""
    parent = tmp_path_factory.mktemp("runs")
    slow = ["scenario.name=slow", "pool.segment_bytes_per_instance=2e9", "link.bandwidth_bytes_per_s=200e6"]
    return [
        run_into(parent / "without", "nopool-16"),
        run_into(parent / "with", "pool-16"),
        run_into(parent / "slow", "pool-16", *slow, "pool.lease_ttl_ms=1"),
    ]


@pytest.fixture(scope="module")
def three(folders):
    return page(folders)


def names_drawn(text):
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    return [figure["name"] for figure in json.loads(found[1])]


# --- without a browser ------------------------------------------------------------------------------------------------


def test_every_picture_is_there_and_the_page_is_small_and_the_same_again(folders, three):
    assert names_drawn(three) == NAMES
    assert len(three.encode()) < 8_000_000
    assert page(folders) == three


def test_a_run_alone_and_without_a_pool_has_what_it_has(folders):
    assert names_drawn(page(folders[:1])) == [name for name in NAMES if name not in ("links", "pool")]
    assert names_drawn(page(folders[1:2])) == NAMES


def test_the_numbers_are_those_of_the_run(folders, three):
    metrics = json.loads((folders[1] / "metrics.json").read_text())
    assert f"{metrics['hit_rate']:.1%}" in three and f"{metrics['ttft_s']['p99']:,.3f}" in three
    base = json.loads((folders[0] / "metrics.json").read_text())
    assert f"{metrics['ttft_s']['p50'] / base['ttft_s']['p50']:.2f}×" in three
    assert metrics["digest"] in three
    shares = [float(share) for share in re.findall(r">([0-9.]+)%</td>", three)]
    assert len(shares) > 20 and max(shares) <= 100


def test_differences_and_warnings_are_told(three):
    assert "<code>link.bandwidth_bytes_per_s</code>" in three and "<code>200000000</code>" in three
    assert "<code>model.name</code>" not in three, "alike in all"
    assert re.search(r"slow: in \d+% of the time some pool (get|put) link was saturated", three)
    assert "pool-16: in" not in three


def test_rejected_requests_and_other_traces_are_warned_of(folders, tmp_path):
    rejecting = run_into(tmp_path / "few", "nopool-16", "engine.num_gpu_blocks=1200", "workload.turns=4")
    text = page([folders[0], rejecting])
    assert "requests were rejected and are in no latency (longer than the KV cache of an instance: " in text
    assert "did not serve the same trace" in text


def test_a_run_that_completed_nothing_has_a_page(tmp_path):
    nothing = [part for setting in [*SMALL, "engine.num_gpu_blocks=2"] for part in ("--set", setting)]
    assert inside("run", "nopool-16", *nothing, "--out", tmp_path / "none").returncode == 1
    text = page([tmp_path / "none"])
    assert "no request completed" in text
    assert "NaN" not in re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1]


def test_what_a_scenario_is_called_is_text(tmp_path):
    odd = "</script><b>&"
    text = page([run_into(tmp_path / "odd", "nopool-16", f"scenario.name={odd!r}", f"scenario.description={odd!r}")])
    assert odd not in text and "&lt;/script&gt;&lt;b&gt;&amp;" in text
    assert script_json([odd]) == r'["\u003c/script\u003e\u003cb\u003e\u0026"]'


def test_runs_of_one_name_are_told_apart():
    assert distinct_labels(["a", "b"], [Path("x"), Path("y")]) == ["a", "b"]
    assert distinct_labels(["a", "a"], [Path("x"), Path("y")]) == ["x", "y"]
    assert distinct_labels(["a", "a"], [Path("1/x"), Path("2/x")]) == ["x (1)", "x (2)"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_where_the_page_is_and_writes_it_anew(folders):
    for _ in range(2):
        result = inside("report", *folders)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"{folders[0] / 'report.html'}\n", "")
    assert "<title>" in (folders[0] / "report.html").read_text()


def test_a_file_of_the_users_is_not_replaced_unasked(folders, tmp_path):
    target = tmp_path / "mine.html"
    target.write_text("mine")
    assert "--overwrite to replace it" in refused("report", folders[0], "--out", target)
    assert target.read_text() == "mine"
    assert inside("report", folders[0], "--out", target, "--overwrite").returncode == 0
    assert "<title>" in target.read_text()


def test_what_is_no_result_is_one_line(folders, tmp_path):
    assert "a folder that `kvsim run --out` has written" in refused("report", tmp_path)
    broken = run_into(tmp_path / "broken", "nopool-16")
    (broken / "steps.parquet").write_bytes(b"PAR1 and no more")
    assert "a Parquet file that can be read" in refused("report", broken)
    (broken / "steps.parquet").write_bytes((broken / "events.parquet").read_bytes())
    assert "table steps of version 1" in refused("report", broken)
    about = json.loads((broken / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps({**about, "version": 0}))
    assert "run the scenario again" in refused("report", broken)
    (broken / "metrics.json").write_text("{")
    assert "has written (metrics.json: " in refused("report", broken)


def test_the_trace_may_be_gone(tmp_path, trace):
    chosen = ["--trace", trace, "--set", "engine.num_gpu_blocks=200"]
    assert inside("run", "pool-16", *chosen, "--out", tmp_path / "out").returncode == 0
    trace.unlink()
    assert inside("report", tmp_path / "out").returncode == 0


# --- in a browser -----------------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_laptop_draws_every_picture_and_asks_for_nothing(three, tmp_path, dark):
    seen = look_at(three, tmp_path, dark=dark)
    assert complaints(seen, NAMES, theme="dark" if dark else "light") == []
    assert (seen.probe["background"] == "rgb(244, 245, 247)") is not dark


@needs_browser
@pytest.mark.slow
def test_a_narrow_window_and_a_single_run_do_too(folders, tmp_path):
    assert complaints(look_at(page(folders[1:2]), tmp_path, width_px=800), NAMES, theme="light") == []


@needs_browser
@pytest.mark.slow
def test_the_button_switches(folders, tmp_path):
    click = '<script>document.getElementById("theme").click();</script></body>'
    seen = look_at(page(folders[1:2]).replace("</body>", click), tmp_path)
    assert complaints(seen, NAMES, theme="dark") == []
    assert seen.probe["background"] == "rgb(15, 20, 27)"


BROKEN = {
    "an error": ("function draw() {", "function draw() { throw Error('broken');", "nothing was drawn"),
    "a message": ("function draw() {", "function draw() { console.warn('odd');", "odd"),
    "a picture that is not drawn": ("FIGURES.map(figure", "FIGURES.slice(1).map(figure", "ttft is empty"),
    "a picture that is missing": ('class="plot" id="tpot"', 'id="tpot"', "tpot is missing"),
    "an address": ("default-src 'none';", "default-src 'none'; connect-src *;", "asked for http://127.0.0.1:9/x"),
    "texts that collide": ("size: 12, family", "size: 40, family", "texts collide"),
    "a wide page": ("max-width: 1600px;", "width: 3000px;", "wider than the window"),
}


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_page_is_rejected(folders, tmp_path, broken):
    right, wrong, said = BROKEN[broken]
    text = page(folders[1:2])
    assert right in text
    asks = "fetch('http://127.0.0.1:9/x').catch(() => {});" if broken == "an address" else ""
    text = text.replace(right, wrong).replace('"use strict";', '"use strict";' + asks)
    found = complaints(look_at(text, tmp_path), NAMES, theme="light")
    assert any(said in complaint for complaint in found), found

"""The command line as a user meets it: what it prints, exit codes, mistakes, files."""

import json
import re
import subprocess
import sys
import time
from typing import get_args

import pytest
from pyarrow import parquet

from kvsim import scenario
from kvsim.cli import one_line
from kvsim.config.workload import TraceWorkload
from kvsim.options import FORMATS, TIME_UNITS
from kvsim.workload import fields, load
from tests.kvsim.command import document, inside, kvsim, mooncake, refused

KEYS = [
    "scenario", "engine", "seed", "digest", "decisions_digest", "requests_completed", "requests_rejected",
    "simulated_s", "wall_s", "events", "hit_rate", "hit_rate_local", "hit_rate_external", "ttft_s", "tpot_ms", "e2e_s",
    "throughput_tokens_per_s", "throughput_tokens_per_s_per_gpu", "num_gpus", "preemptions", "late_misses",
    "invariants",
]  # fmt: skip


# --- run --------------------------------------------------------------------------------------------------------------


def test_a_run_prints_exactly_these_keys_first_and_in_order(tiny):
    began_s = time.monotonic()
    report = document("run", tiny, run=kvsim)
    took_s = time.monotonic() - began_s
    assert list(report)[: len(KEYS)] == KEYS
    for name in ("ttft_s", "tpot_ms", "e2e_s"):
        assert list(report[name]) == ["p50", "p90", "p99", "mean"]
    assert (report["scenario"], report["engine"], report["num_gpus"]) == ("tiny", "fast", 2)
    assert (report["requests_completed"], report["requests_rejected"], report["invariants"]) == (9, 0, "ok")
    assert re.fullmatch("[0-9a-f]{16}", report["digest"]) and re.fullmatch("[0-9a-f]{16}", report["decisions_digest"])
    assert 0 < report["hit_rate"] < 1
    assert took_s / 4 < report["wall_s"] <= took_s, "from the start of the process, imports included"


def test_a_table_is_the_default(tiny):
    result = kvsim("run", tiny)
    assert (result.returncode, result.stderr) == (0, "")
    for said in ("tiny, engine fast, seed 0", "9 completed, 0 rejected", "invariants ok", "TTFT, s", "p99"):
        assert said in result.stdout


def test_one_digest_for_one_seed(tiny):
    first = document("run", tiny, run=kvsim, PYTHONHASHSEED="1")
    again = document("run", tiny, run=kvsim, PYTHONHASHSEED="77")
    other = document("run", tiny, "--seed", 5)
    assert (first["digest"], first["decisions_digest"]) == (again["digest"], again["decisions_digest"])
    assert (first["seed"], other["seed"]) == (0, 5)
    assert other["digest"] != first["digest"]


def test_settings_reach_the_simulation(tiny):
    report = document("run", tiny, "--set", "cluster.instances=1", "--set", "scenario.name=[b]one[/b]")
    assert (report["num_gpus"], report["scenario"]) == (1, "[b]one[/b]")
    shown = inside("run", tiny, "--set", "scenario.name=[b]one[/b]").stdout
    assert "[b]one[/b], engine fast" in shown


def test_a_trace_replaces_the_workload(tiny, trace):
    report = document("run", tiny, "--trace", trace, "--set", "engine.num_gpu_blocks=200")
    assert report["requests_completed"] == 2
    assert report["rejected_reasons"] == {}
    assert report == {**document("run", tiny, "--trace", trace, "--format", "mooncake", "--no-cache",
                                 "--set", "engine.num_gpu_blocks=200"), "wall_s": report["wall_s"]}  # fmt: skip


def test_no_completed_request_exits_1_and_is_still_reported(tiny):
    result = kvsim("run", tiny, "--set", "engine.num_gpu_blocks=2", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (1, "")
    assert (report["requests_completed"], report["requests_rejected"]) == (0, 9), "sessions go on after a rejection"
    assert sum(report["rejected_reasons"].values()) == 9
    assert report["ttft_s"] == {"p50": None, "p90": None, "p99": None, "mean": None}
    assert inside("run", tiny, "--set", "engine.num_gpu_blocks=2").returncode == 1


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_the_configuration_is_checked_before_the_trace_is_opened(tiny, tmp_path):
    missing = tmp_path / "missing.jsonl"
    assert "engine.block_size" in refused("run", tiny, "--trace", missing, "--set", "engine.block_size=0")
    assert "--out" in refused("run", tiny, "--trace", missing, "--out", tiny)
    assert "--policy" in refused("hits", missing, "--capacity-blocks", 10, "--policy", "lru,mru")
    for wrong in ("10,0", "", "1,", "-5", "1e3", "1_0", "٣", "9" * 19, "9" * 5000):
        assert "--capacity-blocks" in refused("hits", missing, "--capacity-blocks", wrong)
    assert str(missing) in refused("run", tiny, "--trace", missing)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.blok_size=3", "engine.blok_size = 3: expected a known key; did you mean block_size?"),
        ("engine.block_size=[red]x[/red]", "'[red]x[/red]'"),
        ("engine.block_size='a\nb'", r"'a\nb'"),
        ("engine.block_size=\x1b[31m", r"\x1b[31m"),
        ("model.name=llama-3.1-8bé", "llama-3.1-8b"),
        ("model.name=" + "long " * 60, "long long"),
        ("nonsense", "--set nonsense: expected section.key=value"),
    ],
)
def test_a_bad_setting_is_one_line(tiny, setting, said):
    assert said in refused("run", tiny, "--set", setting)


def test_in_a_process_of_its_own_too(tiny, tmp_path):
    odd = "engine.block_size='[red]\n\x1b[31mé'"
    assert r"'[red]\n\x1b[31mé'" in refused("run", tiny, "--set", odd, run=kvsim)
    bad = mooncake(tmp_path / "[b] odd\n.jsonl", [(-1, 600, 5, [1, 2])])
    line = refused("trace", "stats", bad, run=kvsim)
    assert line.startswith(one_line(f"{bad}:1: timestamp, -1, expected")), line
    result = kvsim("run", tiny, "--bogus")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--bogus" in result.stderr and "Traceback" not in result.stderr


def test_times_that_the_clock_does_not_hold_are_one_line(tmp_path, trace):
    line = refused("run", "pool-16", "--trace", trace, "--set", "link.bandwidth_bytes_per_s=1")
    assert re.fullmatch(r"simulated_s = \d+: expected less than 9223372: .*", line)


def test_a_bad_scenario_is_one_line(tiny, tmp_path):
    assert "nopool-16" in refused("run", "nopol-16")
    assert str(tmp_path / "no.toml") in refused("run", tmp_path / "no.toml")
    tiny.write_text("[scenario\n")
    assert refused("run", tiny).startswith(f"{tiny}: ")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"timestamp": "[red]", "input_length": 3}', ":2: timestamp, '[red]', expected a number"),
        (
            '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1, 2]}',
            ":2: hash_ids, 2 ids, expected",
        ),
        (
            '{"timestamp": 0, "input_length": "3\\n\\u2028é", "output_length": 1, "hash_ids": [1]}',
            ":2: input_length, '3",
        ),
        ("[1]", ":2: JSON, [1], expected a JSON object"),
        ("nothing", ":2: JSON, b'nothing\\n', expected one JSON object"),
    ],
)
@pytest.mark.parametrize(
    "command", [["run", "nopool-16", "--trace"], ["trace", "stats"], ["hits", "--capacity-blocks=9"]]
)
def test_a_bad_row_is_one_line_with_its_number(tmp_path, command, row, said):
    path = mooncake(tmp_path / "[bold] odd\n.jsonl", [(0, 600, 5, [1, 2])])
    with path.open("a") as stream:
        stream.write(row + "\n")
    line = refused(*command, path)
    assert line.startswith(one_line(f"{path}:2: ")), line
    assert said in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "pool-16", "--bogus"],
        ["run", "pool-16", "--engine", "slow"],
        ["run", "pool-16", "--seed", "many"],
        ["hits", "x"],
        ["trace", "stats", "x", "--format", "csv"],
        ["bogus"],
    ],
)
def test_a_wrong_use_exits_2_without_a_traceback(arguments):
    result = inside(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Error: " in result.stderr and "Traceback" not in result.stderr


def test_values_that_no_trace_can_have_are_one_line(tiny):
    assert "--trace" in refused("run", tiny, "--trace", "")
    assert "TRACE = ''" in refused("trace", "stats", "")
    assert "[workload] beside a trace" in refused("run", tiny, "--trace", "x", "--set", "workload.turns=3")
    assert "--trace" in refused("run", tiny, "--trace", "\udcff")
    assert "--format" in refused("run", tiny, "--format", "mooncake")
    assert "scenario.seed = -1" in refused("run", tiny, "--seed", -1)


def test_the_reference_engine_says_what_it_needs(tiny, tmp_path):
    assert "without [pool]" in refused("run", "pool-16", "--engine", "vllm", "--trace", "missing")
    stub = tmp_path / "vllm" / "__init__.py"
    stub.parent.mkdir()
    stub.write_text("raise ModuleNotFoundError(\"No module named 'vllm'\", name='vllm')")
    line = refused("run", tiny, "--engine", "vllm", run=kvsim, PYTHONPATH=str(tmp_path))
    assert "pip install 'kvtwin[connector]'" in line


def test_without_assertions_it_does_not_claim_to_have_checked(tiny):
    assert "PYTHONOPTIMIZE" in refused("run", tiny, run=kvsim, PYTHONOPTIMIZE="1")


def test_a_bug_has_a_traceback_and_exits_1(tiny, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import kvsim.invariants as module\n"
        "def broken(simulation, events):\n    'Nothing holds.'\n    assert False, 'of course'\n"
        "module.INVARIANTS[99] = broken\n"
    )
    result = kvsim("run", tiny, PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" in result.stderr
    assert "InvariantBroken: invariant 99: Nothing holds: of course" in result.stderr


# --- --out ------------------------------------------------------------------------------------------------------------


def test_out_holds_the_result_and_its_scenario_gives_it_again(tiny, trace, tmp_path):
    arguments = ("run", tiny, "--trace", trace.name, "--set", "engine.num_gpu_blocks=200", "--seed", 3)
    result = kvsim(*arguments, "--json", "--out", "deep/out", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    out = tmp_path / "deep" / "out"
    report = json.loads(result.stdout)
    assert json.loads((out / "metrics.json").read_text()) == report
    events = parquet.read_table(out / "events.parquet")
    assert events.column_names == ["time_ps", "kind", "request", "a", "b"]
    assert events.num_rows == report["events"]
    assert events.column("kind").to_pylist().count("FINISHED") == 2
    again = document("run", out / "scenario.toml")
    assert (again["digest"], again["seed"]) == (report["digest"], 3)


def test_out_of_a_generated_workload_gives_it_again(tiny, tmp_path):
    report = document("run", tiny, "--out", tmp_path / "out", "--set", r'scenario.description="a \"b\" \u007f é"')
    assert document("run", tmp_path / "out" / "scenario.toml")["digest"] == report["digest"]


def test_out_overwrites_nothing(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    assert inside("run", tiny, "--out", tmp_path / "empty").returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    assert "a new or empty folder" in refused("run", tiny, "--out", tmp_path / "empty")
    assert "a folder that can be made" in refused("run", tiny, "--out", tiny / "below")
    assert before == {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}


def test_a_home_folder_is_found(tiny, trace, tmp_path):
    home = {"HOME": str(tmp_path)}
    assert kvsim("run", tiny, "--out=~/out", "--trace=~/trace.jsonl", cwd="/", **home).returncode == 0
    assert (tmp_path / "out" / "metrics.json").exists()
    assert kvsim("trace", "stats", "~/trace.jsonl", cwd="/", **home).returncode == 0


def test_a_full_disk_keeps_the_report(tiny, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvsim.results.write", full)
    result = inside("run", tiny, "--out", tmp_path / "out", "--json")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "not written: No space left on device" in result.stderr
    assert json.loads(result.stdout)["invariants"] == "ok"


# --- the other commands -----------------------------------------------------------------------------------------------


def test_hits(trace):
    report = document("hits", trace, "--capacity-blocks", "1,2", "--policy", "lru,fifo,opt")
    assert (report["requests"], report["total_tokens"], report["last_half_tokens"]) == (2, 1700, 1100)
    assert report["infinite"] == {"hit_tokens": 1024, "last_half_hit_tokens": 1024}
    assert list(report["policies"]) == ["lru", "fifo", "opt"]
    point = {"capacity_blocks": 2, "hit_tokens": 1024, "last_half_hit_tokens": 1024}
    assert report["policies"]["lru"][1] == report["policies"]["opt"][1] == point
    shown = inside("hits", trace, "--capacity-blocks", "1,2").stdout
    assert "2 requests, 1,700 prompt tokens" in shown and "60.24%" in shown


def test_trace_stats(trace):
    report = document("trace", "stats", trace)
    assert (report["format"], report["requests"], report["total_input_tokens"]) == ("mooncake", 2, 1700)
    assert "total input tokens    1,700" in inside("trace", "stats", trace).stdout


def test_scenarios():
    assert {"pool-16", "nopool-16"} <= set(document("scenarios"))
    assert "pool-16 " in inside("scenarios").stdout


def test_the_file_of_a_shipped_scenario_begins_a_new_one(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(inside("scenarios", "pool-16").stdout)
    assert scenario.load(str(mine)) == scenario.load("pool-16")
    refused = inside("scenarios", "pool-17")
    assert refused.returncode == 2
    assert "pool-17" in refused.stderr and "pool-16" in refused.stderr


def test_models():
    listed = document("models", "--tensor-parallel-size", "4")
    by_name = {model["name"]: model for model in listed["models"]}
    qwen = by_name["qwen3.5-397b-a17b"]
    assert (qwen["kv_bytes_per_token"], qwen["kv_bytes_per_sequence"]) == (30_720, 192_061_440)
    assert [(group["kind"], group["num_shards"]) for group in qwen["groups"]] == [("state", 4)] * 3 + [("full", 2)]
    assert {"h100-sxm", "gb200"} <= {device["name"] for device in listed["devices"]}
    shown = inside("models").stdout
    assert "1 x full of 16" in shown and "3 x state of 2096" in shown and "989" in shown


def test_models_that_cannot_be_divided_are_not_listed():
    assert document("models", "--tensor-parallel-size", "5")["models"] == []


def test_the_formats_of_the_command_line_are_those_of_the_readers():
    of_scenarios, _ = get_args(TraceWorkload.model_fields["format"].annotation)
    assert FORMATS == tuple(load.FORMATS) == get_args(of_scenarios)
    assert TIME_UNITS == tuple(fields.TIME_UNITS)


def test_help_and_hits_start_without_the_simulator(trace):
    probe = (
        "import sys; from click.testing import CliRunner; from kvsim.cli import app\n"
        f"CliRunner().invoke(app, {['hits', str(trace), '--capacity-blocks=5', '--json']!r}, catch_exceptions=False)\n"
        "print([name for name in ('simpy', 'pydantic', 'rich', 'kvsim.run', 'kvsim.scenario') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True, timeout=60) == "[]\n"
    imported = subprocess.check_output([sys.executable, "-c", "import kvsim.cli, sys; print('numpy' in sys.modules)"])
    assert imported == b"False\n"

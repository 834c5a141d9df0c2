"""`kvsim trace generate`: a file that the other commands read."""

import numpy as np
import pytest

from kvsim.workload.codex import Codex, generate
from kvsim.workload.load import load_trace
from kvsim.workload.trace import columns_of
from tests.kvsim.command import document, inside, kvsim, refused

FOUR = ["mean", "p50", "p90", "p99"]
PER_SESSION = [
    "calls", "input_tokens", "cached_tokens", "computed_tokens", "output_tokens", "first_context", "last_context",
]  # fmt: skip


def make(path, *options):
    result = inside("trace", "generate", "codex", "--out", path, *options)
    assert (result.returncode, result.stdout) == (0, ""), result
    return path


def test_a_trace_that_is_generated_is_served_and_described(tiny, tmp_path):
    path = make(tmp_path / "codex.jsonl", "--sessions", 3, "--seed", 7)
    report = document("trace", "stats", path)
    assert (report["format"], report["sessions"]) == ("codex", 3)
    assert list(report["per_session"]) == PER_SESSION
    assert all(list(row) == FOUR for row in (*report["per_session"].values(), report["call_delay_s"]))
    assert report["per_session"]["calls"]["p50"] == 30
    assert 0 < report["reported_hit_rate"] < report["ideal_hit_rate"] < 1
    assert report["requests"] == round(3 * report["per_session"]["calls"]["mean"])
    table = inside("trace", "stats", path).stdout
    for said in ("reported hit rate", "last context per session", "call delay s"):
        assert said in table
    run = document("run", tiny, "--trace", path, "--set", "engine.num_gpu_blocks=20000")
    assert run["requests_completed"] == report["requests"]


def test_options_reach_the_generator(tmp_path):
    chosen = ("--shared-len", 902, "--missed-len", 0, "--answers", "generated", "--start-spread-s", 9)
    found = load_trace(make(tmp_path / "a.gz", "--sessions", 4, "--seed", 2, *chosen))
    expected = generate(Codex(4, shared_len=902, missed_len=0, answers="generated", start_spread_s=9), seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(columns_of(found), columns_of(expected), strict=True))
    plain = load_trace(make(tmp_path / "b", "--sessions", 4, "--seed", 2))
    assert all(np.array_equal(a, b) for a, b in zip(columns_of(plain), columns_of(generate(Codex(4), 2)), strict=True))


def test_one_seed_one_file_under_any_hash_seed(tmp_path):
    files = []
    for name, seed, hash_seed in (("a", 1, "1"), ("b", 1, "77"), ("c", 2, "1")):
        arguments = ("--sessions", 5, "--seed", seed, "--out", tmp_path / name)
        assert kvsim("trace", "generate", "codex", *arguments, PYTHONHASHSEED=hash_seed).returncode == 0
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sessions", 0), "sessions = 0: expected 1 <= sessions"),
        (("--shared-len", 20_000), "shared_len = 20000: expected at most 11520"),
        (("--missed-len", "nan"), "missed_len = nan: expected 0 <= missed_len"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, options, said):
    assert said in refused("trace", "generate", "codex", "--out", tmp_path / "t", *options)
    assert not (tmp_path / "t").exists()


def test_wrong_use_and_a_place_that_cannot_be_written(tmp_path):
    assert inside("trace", "generate", "codex").returncode == 2
    assert inside("trace", "generate", "codex", "--out", tmp_path / "t", "--seed", -1).returncode == 2
    assert inside("trace", "generate", "bogus").returncode == 2
    result = inside("trace", "generate", "codex", "--sessions", 1, "--out", tmp_path / "no" / "t")
    assert (result.returncode, result.stdout) == (1, "")
    assert "not written: No such file or directory" in result.stderr

"""`kvsim trace convert`, and the unit of a trace's times, as a user meets them."""

import gzip
import json
import os

import pytest

from kvsim.workload import mooncake as reader
from tests.kvsim.command import TINY, document, inside, kvsim, mooncake, refused

ROWS = [(0, 600, 5, [0, 1]), (2, 1100, 5, [0, 1, 2])]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,10\n2023-11-16 18:17:04,5,0"


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def convert(source, out, *options):
    return inside("trace", "convert", source, "--to", "mooncake", "--out", out, *options)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_trace_is_written_and_read_back(azure, tmp_path, name):
    out = tmp_path / name
    result = convert(azure, out)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert out.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert reader.read(out).input_len.tolist() == [600, 5]
    assert reader.read(out).arrival_ps.tolist() == [0, 20_040_000_000]
    assert [path.name for path in tmp_path.iterdir() if path != azure] == [name], "and nothing else"


def test_the_same_trace_is_the_same_file(azure, tmp_path):
    for name in ("a.gz", "b.gz"):
        convert(azure, tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_standard_output_has_rows_and_nothing_else(azure, tmp_path):
    result = kvsim("trace", "convert", azure, "--to", "mooncake", "--out", "-", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert [json.loads(line)["input_length"] for line in result.stdout.splitlines()] == [600, 5]
    assert list(tmp_path.iterdir()) == [azure]


def test_a_pipe_takes_rows(azure):
    assert convert(azure, os.devnull).returncode == 0
    assert not os.path.isfile(os.devnull)


def test_what_the_format_cannot_say_is_said(tmp_path):
    talk = tmp_path / "talk.json"
    messages = [{"role": role, "content": role * 400} for role in ("user", "assistant", "user")]
    talk.write_text(json.dumps([{"id": "a", "messages": messages}]))
    result = convert(talk, tmp_path / "out")
    assert result.returncode == 0
    said = result.stderr.splitlines()
    assert all(line.startswith("not in the mooncake format: ") for line in said)
    assert [line.split(": ")[1].split(" ", 1)[0] for line in said] == ["1", "1", "reuse"]


def test_nothing_is_overwritten_unasked(azure, tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    line = refused("trace", "convert", azure, "--to", "mooncake", "--out", out)
    assert line == f"--out = {str(out)!r}: expected a file that is not there yet, or --overwrite to replace it"
    assert out.read_text() == "mine"
    assert convert(azure, out, "--overwrite").returncode == 0
    assert reader.read(out).num_requests == 2
    assert convert(out, out, "--overwrite").returncode == 0, "the trace is read before it is replaced"
    assert reader.read(out).num_requests == 2


def test_a_bad_trace_leaves_no_file(azure, tmp_path):
    azure.write_text(AZURE + ",3")
    assert ":3: row, " in refused("trace", "convert", azure, "--to", "mooncake", "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [azure]


@pytest.mark.parametrize("out", ["missing/out", "."])
def test_a_file_that_cannot_be_written_is_one_line(azure, tmp_path, out):
    result = convert(azure, tmp_path / out, "--overwrite")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert "not written: " in result.stderr
    assert list(tmp_path.iterdir()) == [azure]


def test_another_format_cannot_be_written(azure):
    result = inside("trace", "convert", azure, "--to", "azure", "--out", "x")
    assert result.returncode == 2 and "'azure' is not 'mooncake'" in result.stderr


BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.0,a,1,GPT-4,600,10,610,Conversation log\n6.5,a,1,GPT-4,700,10,710,Conversation log\n"
)
BAILIAN = {"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.5, "output_length": 3, "type": "text", "turn": 1}
TALK = [
    {"role": "user", "content": "u" * 900},
    {"role": "assistant", "content": "a" * 90},
    {"role": "user", "content": "!"},
]


@pytest.mark.parametrize(
    ("text", "requests", "hits"),
    [
        (AZURE, 2, 0),
        (BURST, 2, 608),
        (
            "\n".join(
                json.dumps({**BAILIAN, "chat_id": i, "input_length": 33, "hash_ids": [1, 2, i]}) for i in range(3)
            ),
            3,
            64,
        ),
        (json.dumps({"block_size": 64, "hash_ids": [1, 2], "input_length": 128}), 1, 0),
        (json.dumps([{"id": "a", "messages": TALK}]), 2, 240),
    ],
)
def test_every_format_runs(tmp_path, text, requests, hits):
    (tmp_path / "t").write_text(text)
    (tmp_path / "tiny.toml").write_text(TINY)
    one = ("--set", "cluster.instances=1", "--set", "engine.num_gpu_blocks=200")
    report = document("run", tmp_path / "tiny.toml", "--trace", tmp_path / "t", *one)
    assert (report["requests_completed"], report["requests_rejected"], report["invariants"]) == (requests, 0, "ok")
    total = document("trace", "stats", tmp_path / "t")["total_input_tokens"]
    assert report["hit_rate"] == pytest.approx(hits / total)


# --- --time-unit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "last_s"), [("s", 2.0), ("ms", 0.002), ("us", 0.000002)])
def test_a_unit_replaces_the_formats_own(tmp_path, unit, last_s):
    trace = mooncake(tmp_path / "t", ROWS)
    assert document("trace", "stats", trace)["last_arrival_s"] == 0.002
    assert document("trace", "stats", trace, "--time-unit", unit)["last_arrival_s"] == last_s
    assert convert(trace, tmp_path / "out", "--time-unit", unit).returncode == 0
    assert document("trace", "stats", tmp_path / "out")["last_arrival_s"] == last_s


def test_a_run_in_another_unit_is_kept_with_its_unit(tmp_path):
    trace = mooncake(tmp_path / "t", ROWS)
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(TINY)
    run = ("run", tiny, "--trace", trace, "--set", "engine.num_gpu_blocks=200")
    in_seconds = document(*run, "--time-unit", "s", "--out", tmp_path / "out")
    assert in_seconds["simulated_s"] > 2 > document(*run)["simulated_s"]
    assert document("run", tmp_path / "out" / "scenario.toml")["digest"] == in_seconds["digest"]


def test_a_unit_that_fits_nothing_is_one_line(azure, tmp_path):
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(TINY)
    assert "--time-unit = 's': expected --trace with it" in refused("run", tiny, "--time-unit", "s")
    assert "expected none for azure" in refused("trace", "stats", azure, "--time-unit", "s")
    assert "expected none for azure" in refused("run", tiny, "--trace", azure, "--time-unit", "s")
    blocks = tmp_path / "blocks"
    blocks.write_bytes(gzip.compress(b'{"block_size": 64, "hash_ids": [1], "input_length": 9, "timestamp": 3}'))
    assert "--time-unit s, ms or us" in refused("hits", blocks, "--capacity-blocks", 1)
    assert document("hits", blocks, "--capacity-blocks", 1, "--time-unit", "ms")["requests"] == 1

"""A real engine keeps its decision log while it serves, and kvsim reads it, though the engine was killed."""

import json
import stat
import time

import pytest

from connector.testbed.tiny_model import write_tiny_model
from kvsim.workload.load import load_trace
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.kvconnector.test_record import shared_blocks
from tests.kvsim.command import document

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK = 32


def rows_of(path, count):
    """The log's requests, once there are so many."""
    deadline = time.monotonic() + 10
    while len(found := path.read_text().splitlines()) < count + 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return [json.loads(line) for line in found[1:]]


def test_a_log_of_a_real_engine_is_a_trace(pool, tmp_path, prompt):
    path = tmp_path / "decisions.log"
    extra = {**CONNECTOR["extra"], "record": str(path)}
    config = {"model": write_tiny_model("qwen3", tmp_path / "model"), "connector": {**CONNECTOR, "extra": extra}}
    environment = {**pool.environment(), "KVTWIN_RECORD_KEY": "nobody knows"}
    first, other = prompt(700), prompt(300, 1)
    began_ns = time.time_ns()
    engine = Engine(config, tmp_path / "engine.log", environment)
    try:
        answers = engine.generate([first, first[:320] + other], max_tokens=64)["tokens"]
        engine.call("settle")
        assert engine.call("reset_local")
        next_turn = first + answers[0] + other[:50]
        hit = engine.generate([next_turn])["cached"]
        engine.call("settle")
        rows = rows_of(path, 3)
    finally:
        engine.kill()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header = json.loads(path.read_text().splitlines()[0])
    assert (header["granule_len"], header["ids"]) == (BLOCK, "keyed")
    assert began_ns < header["started_unix_ns"] < time.time_ns()
    text = path.read_text() + (tmp_path / "engine.log").read_text()
    assert "nobody knows" not in text
    assert all(row["stored"] != [[]] and row["rejected"] == [[]] for row in rows)
    last = rows[-1]
    assert hit == [(700 + 63) // BLOCK * BLOCK]
    assert [last["external_hit_len"], last["granted_len"], last["local_hit_len"]] == [*hit, *hit, 0]
    assert last["loaded"] == [[[0, hit[0] // BLOCK]]]
    assert last["keys_asked"] >= hit[0] // BLOCK
    times = [last[name] for name in ("arrived_ns", "considered_ns", "admitted_ns", "started_ns", "finished_ns")]
    assert times == sorted(times)

    trace = load_trace(path, use_cache=False)
    assert sorted(trace.input_len.tolist()) == sorted([700, 620, len(next_turn)])
    assert trace.output_len.tolist() == [64, 64, 16]
    turns = {int(length): trace.segments(row, BLOCK) for row, length in enumerate(trace.input_len)}
    assert shared_blocks(turns[700], turns[620]) == 10
    assert shared_blocks(turns[700], turns[len(next_turn)]) == (700 + 63) // BLOCK
    assert document("trace", "stats", path)["ideal_hit_rate"] > 0.4
    result = document("run", "pool-16", "--trace", path, "--set", f"engine.block_size={BLOCK}")
    assert result["requests_completed"] == 3

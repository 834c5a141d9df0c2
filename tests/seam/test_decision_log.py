"""What kvsim reads of a log is what the engine that wrote it was asked: its lengths, and which prefixes are shared."""

import json
import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from kvsim.workload.load import load_trace
from tests.kvconnector.test_record import common_len, shared_blocks
from tests.kvsim.command import document

pytestmark = pytest.mark.engine

BLOCK = 4
LINEAGES = ("abcdefghijklmnopqrstuvwABC", "abcdefghijkl34567890123456", "abcdeXYZUVWRSTABCDEFGHIJKL", "0123456789abcd")


@pytest.fixture
def engines(monkeypatch):
    """The module of engines without a model; it imports vLLM."""
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    return modelless_engine


def serve(engines, path, seed):
    """A few turns of conversations, some at once, recorded; the texts by prompt and answer, in the order of the log."""
    from kvconnector.record import Origin, Recorder

    rng = random.Random(seed)
    engine = engines.Engine([engines.full(BLOCK), engines.window(BLOCK, 9)], num_blocks=60)
    half, closed = engine.half, []
    clock = SimpleNamespace(now_ns=lambda: engine.now_ns)
    recorder = Recorder(str(path), Origin(engine.model, half.namespace, BLOCK, 1), clock, key="secret")

    def record(request, machine, life):
        recorder.record(request, machine, life)
        closed.append((request, machine.decisions))

    half.record = record
    texts = [lineage[: rng.randrange(5, len(lineage))] for lineage in LINEAGES]
    for turn in range(4):
        assert engine.scheduler.reset_prefix_cache()
        for number, text in enumerate(texts):
            engine.add(f"{number} {turn}", text, num_output=rng.randrange(1, 9))
            engine.now_ns += rng.randrange(1, 1_000)
            if rng.random() < 0.5:
                engine.drain()
        engine.drain()
        texts = [(text + engine.outputs[f"{number} {turn}"] + "next")[:50] for number, text in enumerate(texts)]
    engine.check_nothing_is_left()
    engine.connector._recorder, engine.connector._store.close = recorder, lambda: None
    engine.connector.reset_cache()
    engine.connector.shutdown()
    return recorder.path, closed


def served(engines, closed):
    """(text of prompt and answer, tokens in the prompt, what was decided) in the order of arrival."""
    return [
        (engines.text_of(request.all_token_ids), request.num_prompt_tokens, decisions)
        for request, decisions in sorted(closed, key=lambda pair: pair[0].arrival_time)
    ]


def check(trace, requests):
    """Lengths, and that two requests name blocks alike exactly as far as their texts, with answers, are the same."""
    assert trace.num_requests == len(requests)
    assert trace.input_len.tolist() == [prompt_len for _, prompt_len, _ in requests]
    assert (trace.input_len + trace.output_len).tolist() == [len(text) for text, _, _ in requests]
    named = [trace.segments(number, BLOCK) for number in range(trace.num_requests)]
    for left, (left_text, _, _) in zip(named, requests, strict=True):
        for right, (right_text, _, _) in zip(named, requests, strict=True):
            assert shared_blocks(left, right) == common_len(left_text, right_text) // BLOCK


@pytest.mark.parametrize("seed", range(3))
def test_a_log_gives_the_prompts_that_were_served(engines, tmp_path, seed):
    path, closed = serve(engines, tmp_path / "log", seed)
    requests = served(engines, closed)
    check(load_trace(path, use_cache=False), requests)
    assert any(decisions.granted_len for _, _, decisions in requests)


def test_a_log_gives_what_was_decided(engines, tmp_path):
    path, closed = serve(engines, tmp_path / "log", seed=5)
    _, *rows, reset, end = [json.loads(line) for line in path.read_text().splitlines()]
    assert end == {"records": len(closed), "dropped": 0}, "written at the engine's shutdown"
    assert reset["namespace"] != json.loads(path.read_text().splitlines()[0])["namespace"]
    for row, (request, decisions) in zip(rows, closed, strict=True):
        wanted = json.loads(json.dumps(asdict(decisions)))
        assert {name: row[name] for name in wanted} == wanted
        assert row["considered_ns"] <= row["admitted_ns"] <= row["started_ns"] <= row["finished_ns"] <= row["closed_ns"]
        assert (row["prompt_len"], row["total_len"]) == (request.num_prompt_tokens, request.num_tokens)
        assert row["keys_asked"] >= sum(end - start for runs in decisions.looked_up for start, end in runs)
        assert bool(row["lookups"]) == bool(row["rounds"]) == bool(row["keys_asked"])
    assert any(row["lookups"] for row in rows)


def test_the_command_line_takes_a_log_for_a_trace(engines, tmp_path):
    path, closed = serve(engines, tmp_path / "log", seed=7)
    total_len = sum(request.num_prompt_tokens for request, _ in closed)
    stats = document("trace", "stats", path)
    assert (stats["format"], stats["requests"], stats["total_input_tokens"]) == ("decision-log", 16, total_len)
    result = document("run", "pool-16", "--trace", path, "--set", "cluster.instances=2", "--set", "engine.block_size=4")
    assert (result["requests_completed"], result["invariants"]) == (16, "ok")


# -- controls ---------------------------------------------------------------------------------------------------------


def test_ids_of_the_beginning_only_are_found(engines, tmp_path, monkeypatch):
    from kvconnector import record

    monkeypatch.setattr(record._Ids, "_id", lambda ids, block_hash: block_hash[:8].rjust(8))
    path, closed = serve(engines, tmp_path / "log", seed=0)
    with pytest.raises(AssertionError):
        check(load_trace(path, use_cache=False), served(engines, closed))


def test_another_order_is_found(engines, tmp_path):
    path, closed = serve(engines, tmp_path / "log", seed=0)
    with pytest.raises(AssertionError):
        check(load_trace(path, use_cache=False), served(engines, closed)[::-1])

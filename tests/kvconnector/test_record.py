"""The decision log: what is written of a request, where, at whose cost; and what kvsim reads of it."""

import hashlib
import json
import logging
import os
import stat
import threading
import time
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector import record
from kvconnector.config import read_config
from kvconnector.record import Life, Origin, Recorder

from kvcore.errors import InvalidArgument
from kvcore.keys import Namespace
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from kvsim.workload.load import load_trace

BLOCK = 4
MODEL = ModelSpec((FullAttention(BLOCK), SlidingWindow(BLOCK, 9)))
ORIGIN = Origin(MODEL, Namespace("0123456789abcdef"), BLOCK, 2)
FIELDS = {
    "arrived_ns", "considered_ns", "admitted_ns", "started_ns", "finished_ns", "closed_ns", "prompt_len", "total_len",
    "lookups", "rounds", "keys_asked", "looked_up", "found", "loaded", "stored", "rejected", "local_hit_len",
    "external_hit_len", "granted_len", "admitted", "late_lookups", "late_answers", "late_misses",
}  # fmt: skip


class Clock:
    def __init__(self, now_ns=1_000):
        self.time_ns = now_ns

    def now_ns(self):
        return self.time_ns


def hashes_of(text, unit=BLOCK):
    """A chain, as the engine makes one."""
    return [hashlib.sha256(text[: end + unit].encode()).digest() for end in range(0, len(text) // unit * unit, unit)]


def request_of(text, arrival_time=None):
    arrived = time.time() if arrival_time is None else arrival_time
    return SimpleNamespace(num_tokens=len(text), block_hashes=hashes_of(text), arrival_time=arrived)


def served(prompt_len, admitted_ns=2_000):
    """A machine that was asked nothing, and when things happened to it."""
    return KVRequest(Planner(MODEL), PoolPolicy(), prompt_len), Life(1_500, admitted_ns, admitted_ns, 3_000)


def write(path, texts, prompt_len=None, key="", origin=ORIGIN):
    """A log of requests with these texts, of which the first `prompt_len` tokens are the prompt; its path."""
    recorder = Recorder(str(path), origin, Clock(), key)
    for number, text in enumerate(texts):
        recorder.record(request_of(text, time.time() + number), *served(prompt_len or len(text)))
    assert recorder.close()
    return recorder.path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def common_len(left, right):
    """Leading elements that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def shared_blocks(left, right):
    """Whole blocks at the beginning that two segment lists name alike."""
    return common_len(
        *([(stream, block) for stream, start, end in named for block in range(start, end)] for named in (left, right))
    )


def shared_text(left, right):
    """The same of two texts."""
    return common_len(left, right) // BLOCK


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_header_says_what_the_lines_mean(tmp_path):
    header = lines(write(tmp_path / "log", []))[0]
    assert abs(header.pop("started_unix_ns") - time.time_ns()) < 60 * 10**9
    assert header == {
        "kvtwin_record": 1,
        "namespace": "0123456789abcdef",
        "granule_len": 4,
        "ranks": 2,
        "groups": [
            {"type": "FullAttention", "block_len": 4, "layout": ""},
            {"type": "SlidingWindow", "block_len": 4, "layout": "", "window": 9, "extra_retained_tokens": 0},
        ],
        "eagle_groups": [],
        "kinds": [[0, 4], [1, 4]],
        "ids": "plain",
    }


def test_a_request_that_hits_loads_and_stores(tmp_path):
    clock = Clock(50)
    recorder = Recorder(str(tmp_path / "log"), ORIGIN, clock)
    start_s = time.time()
    machine, life = KVRequest(Planner(MODEL), PoolPolicy(), 14), Life(100)
    lookup = machine.consider(4, 14, 100)
    while lookup.dialogue.open:
        lookup.dialogue.answered(lookup.dialogue.question)
    life.answered(lookup.dialogue, ((0, 2), (1, 2)))
    machine.lookup_answered(lookup.ticket, 120)
    offer = machine.consider(4, 14, 130)
    life.admitted(140)
    load = machine.granted(offer.num_tokens, 140)
    assert machine.load_finished(load.ticket, ((), ()), 160) == 12
    life.started_ns = 170
    store = machine.computed(14, 170)
    assert store is None
    life.finished_ns = 180
    store = machine.finished(17, 180)
    machine.store_finished(store.ticket, ((), ((3, 4),)), 190)
    life.admitted(195)
    clock.time_ns = 200
    recorder.record(request_of("abcdefghijklmnopq", start_s + 1), machine, life)
    assert recorder.close()
    _, line, end = lines(recorder.path)
    assert abs(line.pop("arrived_ns") - 10**9) < 10**8
    assert line == {
        "considered_ns": 50,
        "admitted_ns": 90,
        "started_ns": 120,
        "finished_ns": 130,
        "closed_ns": 150,
        "prompt_len": 14,
        "total_len": 17,
        "lookups": 1,
        "rounds": lookup.dialogue.rounds,
        "keys_asked": 2 * sum(b - a for runs in lookup.dialogue.asked for a, b in runs),
        "looked_up": [[[1, 3]], [[1, 3]]],
        "found": [[[1, 3]], [[1, 3]]],
        "loaded": [[[1, 3]], [[1, 3]]],
        "stored": [[[3, 4]], []],
        "rejected": [[], [[3, 4]]],
        "local_hit_len": 4,
        "external_hit_len": 8,
        "granted_len": 8,
        "admitted": True,
        "late_lookups": 0,
        "late_answers": 0,
        "late_misses": 0,
        "ids": b"".join(block_hash[:8] for block_hash in hashes_of("abcdefghijklmnop")).hex(),
    }
    assert end == {"records": 1, "dropped": 0}


def test_what_an_earlier_line_has_is_not_written_again(tmp_path):
    texts = ["aaaabbbbcccc", "aaaabbbbccccddddeee", "aaaabbbbXXXX", "aaaabbbbccccddddffff", "bbbb", "aaa"]
    rows = lines(write(tmp_path / "log", texts))[1:-1]
    assert [(row.get("like"), len(row["ids"]) // 16) for row in rows] == [
        (None, 3), ([2, 3], 1), ([2, 2], 1), ([3, 4], 1), (None, 1), (None, 0),
    ]  # fmt: skip
    assert all({*row} - {"like", "ids"} == FIELDS for row in rows)


def test_a_reset_is_told_where_it_was(tmp_path):
    clock = Clock(100)
    recorder = Recorder(str(tmp_path / "log"), ORIGIN, clock)
    recorder.record(request_of("aaaabbbb"), *served(8))
    clock.time_ns = 700
    recorder.moved(Namespace("fedcba"))
    recorder.record(request_of("aaaabbbbcccc"), *served(12))
    assert recorder.close()
    _, _, reset, after, end = lines(recorder.path)
    assert reset == {"reset_ns": 600, "namespace": "fedcba"}
    assert (after["like"], end["records"]) == ([2, 2], 2)
    trace = load_trace(recorder.path, use_cache=False)
    assert trace.input_len.tolist() == [8, 12]


def test_hashes_at_a_finer_unit_are_written_at_the_granule(tmp_path):
    text = "aaaabbbbccccdd"
    origin = Origin(MODEL, Namespace("0"), 2, 1)
    recorder = Recorder(str(tmp_path / "log"), origin, Clock())
    request = SimpleNamespace(num_tokens=14, block_hashes=hashes_of(text, unit=2), arrival_time=0.0)
    recorder.record(request, *served(14))
    assert recorder.close()
    assert lines(recorder.path)[1]["ids"] == b"".join(block_hash[:8] for block_hash in hashes_of(text)).hex()


def test_a_key_hides_the_hashes_and_keeps_what_is_shared(tmp_path):
    texts = ["aaaabbbb", "aaaacccc"]
    plain, one, same, other = (
        write(tmp_path / str(number), texts, key=key) for number, key in enumerate(["", "one", "one", "other"])
    )
    ids = {path: [row["ids"] for row in lines(path)[1:-1]] for path in (plain, one, same, other)}
    assert ids[one] == ids[same]
    assert len({ids[path][0][:16] for path in (plain, one, other)}) == 3
    assert [lines(path)[0]["ids"] for path in (plain, one)] == ["plain", "keyed"]
    for path in (one, other):
        known = path.read_text()
        assert all(block_hash[:4].hex() not in known for text in texts for block_hash in hashes_of(text))
        assert "other" not in known
    segments = [load_trace(path, use_cache=False).segments(number, BLOCK) for path in (one, plain) for number in (0, 1)]
    assert segments[:2] == segments[2:]


def test_the_file_is_new_and_private(tmp_path):
    path = tmp_path / "log"
    first, second = write(path, []), write(path, ["aaaa"])
    assert (first, second) == (path, tmp_path / f"log.{os.getpid()}")
    assert [stat.S_IMODE(file.stat().st_mode) for file in (first, second)] == [0o600, 0o600]
    assert len(lines(first)) == 2, "left as it was"
    with pytest.raises(InvalidArgument, match=r"record = .*: expected a path where there is no file yet"):
        Recorder(str(path), ORIGIN, Clock())


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    assert write(tmp_path / "log", []) == tmp_path / f"log.{os.getpid()}"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("place", ["none/log", "x" * 300, "nul\0"])
def test_a_place_where_no_file_can_be_is_an_error_at_start(tmp_path, place):
    with pytest.raises(InvalidArgument, match="expected a path where a file can be created"):
        Recorder(str(tmp_path / place), ORIGIN, Clock())


def test_the_key_may_come_from_the_environment_and_is_not_shown():
    extra = {"master_server_address": "h:1", "record": "log"}
    config = read_config(extra, "kv_both", {"KVTWIN_RECORD_KEY": "nobody knows"})
    assert (config.record, config.record_key) == ("log", "nobody knows")
    assert read_config(extra | {"record_key": "ours"}, "kv_both", {"KVTWIN_RECORD_KEY": "x"}).record_key == "ours"
    assert "nobody knows" not in repr(config)
    assert read_config({"master_server_address": "h:1"}, "kv_both", {}).record == ""


# -- what it costs, and what it does when it cannot --------------------------------------------------------------------


class Untouchable:
    """Block hashes that the engine's thread must leave alone."""

    def __getitem__(self, index):
        raise AssertionError("read on the engine's thread")

    __len__ = __iter__ = __getitem__


@pytest.fixture
def stuck(tmp_path, monkeypatch):
    """A recorder whose disk does not answer, until `release()`."""
    gate, real = threading.Event(), os.write

    def slow(file, content):
        gate.wait(20)
        return real(file, content)

    monkeypatch.setattr(record.os, "write", slow)
    recorder = Recorder(str(tmp_path / "log"), ORIGIN, Clock())
    yield recorder, gate.set
    gate.set()


def test_a_disk_that_does_not_answer_costs_records_and_no_time(stuck, monkeypatch, caplog):
    recorder, release = stuck
    monkeypatch.setattr(record, "MAX_WAITING", 10)
    told = []
    recorder.on_dropped = lambda: told.append(recorder.num_dropped)
    began = time.monotonic()
    for _ in range(25):
        recorder.record(request_of("aaaabbbb"), *served(8))
    assert time.monotonic() - began < 5
    assert told == list(range(1, 16))
    with caplog.at_level(logging.INFO, logger="vllm.kvconnector.record"):
        release()
        assert recorder.close()
    assert lines(recorder.path)[-1] == {"records": 10, "dropped": 15}
    assert "has 10 requests; 15 were dropped" in caplog.text


def test_the_engines_thread_reads_no_hash(stuck):
    recorder, _ = stuck
    request = SimpleNamespace(num_tokens=10**6, block_hashes=Untouchable(), arrival_time=0.0)
    recorder.record(request, *served(8))
    assert recorder.num_dropped == 0


def test_a_new_block_is_hashed_once_and_a_known_one_never(tmp_path, monkeypatch):
    made = []
    real = record._Ids._id
    monkeypatch.setattr(record._Ids, "_id", lambda ids, block_hash: made.append(block_hash) or real(ids, block_hash))
    text = "".join(f"{number:04}" for number in range(1_000))
    write(tmp_path / "log", [text[:2_000], text, text, text[:1_000] + "x" * 40])
    assert len(made) == 1_000 + 10


def test_what_was_forgotten_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MAX_KNOWN_BLOCKS", 3)
    texts = ["aaaabbbbccccdddd", "aaaabbbbcccceeee", "aaaabbbbffff", "aaaabbbbcccc"]
    path = write(tmp_path / "log", texts)
    assert [row.get("like") for row in lines(path)[1:-1]] == [None, [2, 3], None, [4, 2]]
    trace = load_trace(path, use_cache=False)
    first, *others = (trace.segments(number, BLOCK) for number in range(4))
    assert [shared_blocks(first, other) for other in others] == [3, 2, 3]


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path, monkeypatch, caplog):
    written = []

    def full(file, content):
        written.append(bytes(content))
        if len(written) > 2:
            raise OSError(28, "No space left on device")
        return len(content)

    monkeypatch.setattr(record.os, "write", full)
    recorder = Recorder(str(tmp_path / "log"), ORIGIN, Clock())
    recorder.record(request_of("aaaa"), *served(4))
    recorder.record(request_of("bbbb"), *served(4))
    recorder._thread.join(10)
    recorder.record(request_of("cccc"), *served(4))
    assert recorder.close()
    assert recorder.num_dropped == 1
    assert len(written) == 3
    assert "No space left on device" in caplog.text


def test_a_write_in_parts_is_whole(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(record.os, "write", lambda file, content: real(file, content[:7]))
    rows = lines(write(tmp_path / "log", ["aaaabbbb"]))
    assert [len(rows), rows[-1]["records"]] == [3, 1]


# -- what kvsim reads of it --------------------------------------------------------------------------------------------


@given(texts=st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=12))
def test_lengths_and_sharing_come_back(tmp_path_factory, texts):
    path = write(tmp_path_factory.mktemp("log") / "log", texts, key="k")
    trace = load_trace(path, use_cache=False)
    assert trace.input_len.tolist() == [len(text) for text in texts]
    assert trace.output_len.tolist() == [0] * len(texts)
    named = [trace.segments(number, BLOCK) for number in range(len(texts))]
    for left, left_text in zip(named, texts, strict=True):
        for right, right_text in zip(named, texts, strict=True):
            assert shared_blocks(left, right) == shared_text(left_text, right_text)
    assert trace.granule_len == BLOCK


def test_the_next_turn_shares_the_answer(tmp_path):
    first, second = "aaaabbbbccccddddee", "aaaabbbbccccddddeeffgggghh"
    trace = load_trace(write(tmp_path / "log", [first, second], prompt_len=6), use_cache=False)
    assert trace.input_len.tolist() == [6, 6]
    assert trace.output_len.tolist() == [12, 20]
    assert shared_blocks(trace.segments(0, BLOCK), trace.segments(1, BLOCK)) == 4

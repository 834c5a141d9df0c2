"""Bailian's format: Mooncake's with smaller ids, other units, and sessions."""

import gzip
import json

import pytest

from kvsim.workload import bailian
from kvsim.workload.load import load_trace
from kvsim.workload.trace import TraceError

GOOD = {
    "chat_id": 5,
    "parent_chat_id": -1,
    "timestamp": 3.5,
    "input_length": 40,
    "output_length": 7,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2, 3],
}


def line(**changes):
    return json.dumps({**GOOD, **changes})


def without(field):
    return json.dumps({name: value for name, value in GOOD.items() if name != field})


def write(path, *lines):
    path.write_text("".join(text + "\n" for text in lines))
    return path


def test_columns_of_a_small_trace(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        line(timestamp=61.114),
        line(timestamp=61.114, chat_id=9, type="file", output_length=0, hash_ids=[1, 2, 4]),
        line(timestamp=62.5, chat_id=6, parent_chat_id=5, turn=2, input_length=64, hash_ids=[1, 2, 3, 4]),
        line(timestamp=70, chat_id=7, parent_chat_id=6, turn=3, input_length=1, hash_ids=[2]),
    )
    trace = load_trace(path, use_cache=False)
    assert (trace.name, trace.format, trace.granule_len) == ("q.jsonl", "bailian", 16)
    assert [round(start_ps / 1e9, 3) for start_ps in trace.arrival_ps.tolist()] == [0, 0, 1386, 8886]
    assert trace.after.tolist() == [0, 1, 2, 3], "open loop: nobody knows when an answer was complete"
    assert trace.session.tolist() == [0, 1, 0, 0]
    assert trace.input_len.tolist() == [40, 40, 64, 1]
    assert trace.num_granules.tolist() == [3, 3, 4, 1]
    first, second, third = (trace.segments(i, 8) for i in range(3))
    stream, branch = first[0][0], second[1][0]
    assert first == ((stream, 0, 5),)
    assert second == ((stream, 0, 4), (branch, 4, 5))
    assert third == ((stream, 0, 8),)
    assert trace.segments(3, 1)[0][0] not in (stream, branch), "id 2 at the start is not id 2 after id 1"


def test_a_parent_of_before_the_recording_is_nobody(tmp_path):
    rows = (line(chat_id=60, parent_chat_id=55, turn=2), line(chat_id=61, parent_chat_id=55, turn=2))
    assert bailian.read(write(tmp_path / "q", *rows)).session.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON, b'{\\n', expected one JSON object ("),
        ("[1]", "JSON, [1], expected a JSON object"),
        (without("timestamp"), "timestamp, missing, expected a number, 0 <= timestamp < 9007199254740992"),
        (line(timestamp="3"), "timestamp, '3', expected a number"),
        (line(timestamp=1.5), "timestamp, 1.5, expected at least the previous row's 2.5"),
        (line(timestamp=9_000_003), "timestamp, 9000003, expected less than 9000000 s after the first row's 2.5"),
        (without("chat_id"), "chat_id, missing, expected an integer, 0 <= chat_id < 2**32"),
        (line(chat_id=-1), "chat_id, -1, expected an integer"),
        (line(chat_id=4), "chat_id, 4, expected one that no row before it has"),
        (without("parent_chat_id"), "parent_chat_id, missing, expected a chat_id, or -1 where a conversation begins"),
        (line(parent_chat_id=-2), "parent_chat_id, -2, expected a chat_id, or -1"),
        (line(parent_chat_id=True), "parent_chat_id, True, expected a chat_id, or -1"),
        (line(parent_chat_id=None), "parent_chat_id, None, expected a chat_id, or -1"),
        (line(type=3), "type, 3, expected a text"),
        (without("type"), "type, missing, expected a text"),
        (line(turn=0), "turn, 0, expected an integer, 1 <= turn < 2**32"),
        (without("turn"), "turn, missing, expected an integer"),
        (line(input_length=0, hash_ids=[]), "input_length, 0, expected an integer, 1 <= input_length < 2**32"),
        (line(input_length=40.0), "input_length, 40.0, expected an integer"),
        (without("output_length"), "output_length, missing, expected an integer, 0 <= output_length < 2**32"),
        (line(output_length=-7), "output_length, -7, expected an integer"),
        (without("hash_ids"), "hash_ids, missing, expected a list of integers"),
        (line(hash_ids=[1, 2]), "hash_ids, 2 ids, expected 3 ids (ceil(input_length / 16))"),
        (line(hash_ids=[1, 2, 3, 4]), "hash_ids, 4 ids, expected 3 ids (ceil(input_length / 16))"),
        (line(hash_ids=[1, 2, -3]), "hash_ids[2], -3, expected an integer, 0 <= id < 2**64"),
        (line(hash_ids=[1, "2", 3]), "hash_ids[1], '2', expected an integer, 0 <= id < 2**64"),
        (line(delay=4), "delay, 4, expected only the fields chat_id, parent_chat_id, timestamp, input_length,"),
        (line()[:-1] + ', "turn": 1}', "JSON, a field twice, expected each field once"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place_field_value_and_rule(tmp_path, text, says):
    path = write(tmp_path / "q.jsonl", line(timestamp=2.5, chat_id=4), text, line(chat_id=6))
    with pytest.raises(TraceError) as caught:
        bailian.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: {says}"), message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["text", 'a "quoted" kind', "", "ä"])
def test_the_row_without_its_fault_is_read(tmp_path, kind):
    """The table above rejects faults, not the row they are made from."""
    path = tmp_path / "q.gz"
    path.write_bytes(gzip.compress("\n".join((line(timestamp=2.5, chat_id=4), line(type=kind))).encode()))
    assert bailian.read(path).num_requests == 2


def test_an_empty_file(tmp_path):
    with pytest.raises(TraceError, match=r"empty:1: file, no rows, expected one JSON object a line"):
        bailian.read(write(tmp_path / "empty"))

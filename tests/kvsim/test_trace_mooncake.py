"""Mooncake's format, to the row."""

import gzip
import json

import numpy as np
import pytest

from kvsim.workload import mooncake
from kvsim.workload.trace import TraceError
from tests.support import shared_data

GOOD = {"timestamp": 3, "input_length": 1000, "output_length": 0, "hash_ids": [7, 8]}


def line(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def without(field: str) -> str:
    return json.dumps({name: value for name, value in GOOD.items() if name != field})


def write(path, *lines):
    path.write_text("".join(text + "\n" for text in lines))
    return path


def test_columns_of_a_small_trace(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        line(timestamp=1000, input_length=1024, output_length=0, hash_ids=[1, 2]),
        line(timestamp=1000, input_length=700, output_length=5, hash_ids=[1, 3]),
        line(timestamp=1002.5, input_length=1, output_length=9, hash_ids=[2]),
    )
    trace = mooncake.read(path)
    assert (trace.name, trace.format, trace.granule_len) == ("t.jsonl", "mooncake", 512)
    assert trace.arrival_ps.tolist() == [0, 0, 2_500_000_000]
    assert trace.after.tolist() == trace.session.tolist() == [0, 1, 2]
    assert trace.input_len.tolist() == [1024, 700, 1]
    assert trace.output_len.tolist() == [0, 5, 9]
    assert trace.num_granules.tolist() == [2, 2, 1]
    first, second, third = (trace.segments(i, 16) for i in range(3))
    stream, branch, output = (name for name, _, _ in second)
    assert first == ((stream, 0, 64),)
    assert second == ((stream, 0, 32), (branch, 32, 43), (output, 43, 44)), "block 43 ends in the output"
    assert third == ()
    assert trace.segments(2, 1)[0][0] not in (stream, branch, output), "id 2 at the start is not id 2 after id 1"


@pytest.mark.parametrize("top", [2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_ids_of_64_bits_are_kept_exactly(tmp_path, top):
    ids = ([top], [top - 1], [top])
    trace = mooncake.read(write(tmp_path / "t", *(line(input_length=512, hash_ids=row) for row in ids)))
    streams = [trace.segments(i, 512)[0][0] for i in range(3)]
    assert streams[0] == streams[2] != streams[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON, b'{\\n', expected one JSON object ("),
        ("", "JSON, b'\\n', expected one JSON object ("),
        ("[1]", "JSON, [1], expected a JSON object"),
        (line().replace("1000", "NaN"), "JSON, b'"),
        (without("timestamp"), "timestamp, missing, expected a number, 0 <= timestamp < 9007199254740992"),
        (line(timestamp=-1), "timestamp, -1, expected a number"),
        (line(timestamp="3"), "timestamp, '3', expected a number"),
        (line(timestamp=True), "timestamp, True, expected a number"),
        (line(timestamp=None), "timestamp, None, expected a number"),
        (line(timestamp=1), "timestamp, 1, expected at least the previous row's 2"),
        (line(timestamp=10**13), "timestamp, 10000000000000, expected less than 9000000 s after the first row's 2"),
        (without("input_length"), "input_length, missing, expected an integer, 1 <= input_length < 2**32"),
        (line(input_length=0, hash_ids=[]), "input_length, 0, expected an integer, 1 <="),
        (line(input_length=-1000), "input_length, -1000, expected an integer"),
        (line(input_length=1000.0), "input_length, 1000.0, expected an integer"),
        (line(input_length=True, hash_ids=[7]), "input_length, True, expected an integer"),
        (line(input_length=2**32), "input_length, 4294967296, expected an integer"),
        (without("output_length"), "output_length, missing, expected an integer, 0 <= output_length < 2**32"),
        (line(output_length=-1), "output_length, -1, expected an integer"),
        (line(output_length=False), "output_length, False, expected an integer"),
        (without("hash_ids"), "hash_ids, missing, expected a list of integers"),
        (line(hash_ids="78"), "hash_ids, '78', expected a list of integers"),
        (line(hash_ids=[7]), "hash_ids, 1 ids, expected 2 ids (ceil(input_length / 512))"),
        (line(hash_ids=[7, 8, 9]), "hash_ids, 3 ids, expected 2 ids (ceil(input_length / 512))"),
        (line(hash_ids=[7, -8]), "hash_ids[1], -8, expected an integer, 0 <= id < 2**64"),
        (line(hash_ids=[7, True]), "hash_ids[1], True, expected an integer, 0 <= id < 2**64"),
        (line(hash_ids=[7.0, 8]), "hash_ids[0], 7.0, expected an integer, 0 <= id < 2**64"),
        (line(hash_ids=[7, "8"]), "hash_ids[1], '8', expected an integer, 0 <= id < 2**64"),
        (line(hash_ids=[7, 2**64]), "hash_ids[1], 1.8446744073709552e+19, expected an integer, 0 <= id < 2**64"),
        (line()[:-1] + ', "timestamp": 3}', "JSON, a field twice, expected each field once"),
        (line(timestamp=3).replace("3", "[" * 900 + "]" * 900), "timestamp, [[[[[[[...]]]]]]], expected a number"),
        (line(delay=4), "delay, 4, expected only the fields timestamp, input_length, output_length, hash_ids"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place_field_value_and_rule(tmp_path, text, says):
    path = write(tmp_path / "t.jsonl", line(timestamp=2), text, line(timestamp=4))
    with pytest.raises(TraceError) as caught:
        mooncake.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: {says}")
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


def test_the_row_without_its_fault_is_read(tmp_path):
    """The table above rejects faults, not the row they are made from."""
    assert mooncake.read(write(tmp_path / "t", line(timestamp=2), line(), line(timestamp=4))).num_requests == 3


@pytest.mark.parametrize(
    "text", [line(timestamp="x" * 5000), line(**{"x" * 5000: 1}), json.dumps([[7] * 999] * 999), "x" * 5000]
)
def test_a_long_value_is_shortened(tmp_path, text):
    with pytest.raises(TraceError) as caught:
        mooncake.read(write(tmp_path / "t", text))
    assert len(str(caught.value)) < 450


def test_an_empty_file_and_a_truncated_gzip(tmp_path):
    empty = write(tmp_path / "empty")
    with pytest.raises(TraceError, match=r"empty:1: file, no rows, expected one JSON object a line"):
        mooncake.read(empty)
    packed = gzip.compress("".join(line(timestamp=i) + "\n" for i in range(5000)).encode())
    half = tmp_path / "half.gz"
    half.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"half\.gz:\d+: file, .*, expected a complete gzip stream$"):
        mooncake.read(half)
    with pytest.raises(TraceError, match=r"none:1: file, No such file or directory, expected a file that can be read"):
        mooncake.read(tmp_path / "none")


def test_gzip_is_told_by_content(tmp_path):
    plain, packed = write(tmp_path / "a.gz", line(), line()), tmp_path / "b.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert mooncake.read(plain).num_requests == mooncake.read(packed).num_requests == 2


def test_the_conversation_trace():
    trace = mooncake.read(shared_data("mooncake_conversation_trace.jsonl.gz"))
    assert trace.num_requests == trace.num_sessions == 12_031
    assert trace.input_len.sum() == 144_793_823
    assert trace.arrival_ps[-1] == 3_536_999 * 10**9
    assert (trace.num_granules == -(-trace.input_len // 512)).all()
    assert len(np.unique(trace.output_stream)) == 12_031
    assert len(trace.segment_end) == 33_381
    assert trace.num_granules.sum() == 288_500

"""The format of KVCache.AI's simulator: blocks of a size of their own, times of no unit."""

import gzip
import json

import pytest

from kvsim.workload import kvcache_ai
from kvsim.workload.load import load_trace
from kvsim.workload.trace import TraceError

GOOD = {"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}


def line(**changes):
    return json.dumps({**GOOD, **changes})


def write(path, *lines):
    path.write_text("".join(text + "\n" for text in lines))
    return path


def test_columns_of_a_small_trace(tmp_path):
    rows = (
        line(),
        line(hash_ids=[2001], input_length=100),
        line(hash_ids=[2001, 7], input_length=100, output_length=99),
    )
    trace = load_trace(write(tmp_path / "k.jsonl", *rows), use_cache=False)
    assert (trace.name, trace.format, trace.granule_len) == ("k.jsonl", "kvcache-ai", 64)
    assert trace.arrival_ps.tolist() == [0, 0, 0], "in the order of the rows, at once"
    assert trace.session.tolist() == trace.after.tolist() == [0, 1, 2]
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([128, 100, 100], [0, 0, 99])
    assert trace.num_granules.tolist() == [2, 1, 2], "an id for each block, or for each whole one"
    first, second, third = (trace.segments(i, 4) for i in range(3))
    stream, tail, branch = first[0][0], second[1][0], third[1][0]
    assert len({stream, tail, branch}) == 3
    assert first == ((stream, 0, 32),)
    assert second == ((stream, 0, 16), (tail, 16, 25))
    assert third[:2] == ((stream, 0, 16), (branch, 16, 25))


def test_times_have_the_unit_that_the_caller_names(tmp_path):
    path = write(tmp_path / "k", line(timestamp=5), line(timestamp=7.5))
    assert load_trace(path, time_unit="ms", use_cache=False).arrival_ps.tolist() == [0, 2.5e9]
    assert load_trace(path, time_unit="s", use_cache=False).arrival_ps.tolist() == [0, 2.5e12]
    with pytest.raises(TraceError) as caught:
        load_trace(path, use_cache=False)
    expected = "expected a time unit with it (--time-unit s, ms or us): this format fixes none"
    assert str(caught.value) == f"{path}:1: timestamp, 5, {expected}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "JSON, b'nothing\\n', expected one JSON object ("),
        (line(block_size=16), "block_size, 16, expected 64"),
        (line(block_size=64.0), "block_size, 64.0, expected 64"),
        (json.dumps({"hash_ids": [1], "input_length": 9}), "block_size, missing, expected 64"),
        (line(input_length=0), "input_length, 0, expected an integer, 1 <= input_length < 2**32"),
        (line(input_length=None), "input_length, None, expected an integer"),
        (line(output_length=-1), "output_length, -1, expected an integer, 0 <= output_length < 2**32"),
        (line(hash_ids=[1, 2, 3]), "hash_ids, 3 ids, expected 2 ids (ceil(input_length / block_size), or floor)"),
        (line(hash_ids=[1]), "hash_ids, 1 ids, expected 2 ids (ceil(input_length / block_size), or floor)"),
        (line(hash_ids=None), "hash_ids, None, expected a list of integers"),
        (line(hash_ids=["1", "2"]), "hash_ids[0], '1', expected an integer, 0 <= id < 2**64"),
        (line(timestamp=5), "timestamp, 5, expected none, as in the first row"),
        (line(block_tokens=[64, 64]), "block_tokens, [64, 64], expected only the fields block_size, hash_ids,"),
        (line()[:-1] + ', "block_size": 64}', "JSON, a field twice, expected each field once"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place_field_value_and_rule(tmp_path, text, says):
    path = write(tmp_path / "k.jsonl", line(), text, line())
    with pytest.raises(TraceError) as caught:
        kvcache_ai.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: {says}"), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((), "1: file, no rows, expected one JSON object a line"),
        ((line(block_size=0),), "1: block_size, 0, expected an integer, 1 <= block_size < 2**32"),
        ((line(timestamp=5), line()), "2: timestamp, missing, expected a number"),
        ((line(timestamp=5), line(timestamp=4)), "2: timestamp, 4, expected at least the previous row's 5"),
    ],
)
def test_what_is_wrong_with_a_whole_file(tmp_path, rows, says):
    path = write(tmp_path / "k", *rows)
    with pytest.raises(TraceError) as caught:
        kvcache_ai.read(path, 10**9)
    assert str(caught.value).startswith(f"{path}:{says}"), caught.value


def test_the_row_without_its_fault_is_read(tmp_path):
    """The tables above reject faults, not the row they are made from."""
    path = tmp_path / "k.gz"
    path.write_bytes(gzip.compress(f"{line()}\n{line()}\n{line()}".encode()))
    assert kvcache_ai.read(path).num_requests == 3

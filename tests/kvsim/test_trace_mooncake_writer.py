"""Traces written in Mooncake's format and read back, against the content they were made of."""

import json
from itertools import count, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.workload import claude_code, mooncake
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.mooncake_writer import MooncakeRows
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.stats import stats
from tests.support import shared_data

PIECE_LEN = 256  # half of what one of Mooncake's ids names


def trace_of(prompts, output_len=0):
    """A trace of prompts that are (pieces named by ids, tokens of their own), 0.25 ms apart."""
    streams = count()
    tree = PrefixTree(streams)
    builder = TraceBuilder()
    for index, (pieces, own_len) in enumerate(prompts):
        builder.start(index * 250_000_000, None, 0, index)
        own_stream = next(streams)
        runs = tree.follow(np.array(pieces, dtype=np.uint64))
        builder.hold_granules(len(pieces) * PIECE_LEN + own_len, output_len, PIECE_LEN, runs, own_stream)
    return builder.build("made", "made", PIECE_LEN)


def round_trip(trace, folder):
    rows = MooncakeRows(trace)
    path = folder / "written.jsonl"
    path.write_bytes(b"".join(rows))
    return mooncake.read(path), rows.losses()


def shared(left, right):
    """Leading granules of 512 tokens that two requests name alike."""
    names = [[(stream, k) for stream, start, end in segments for k in range(start, end)] for segments in (left, right)]
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*names, strict=False))))


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=9), st.integers(0, 600)).filter(lambda found: found[0] or found[1]),
    min_size=1,
    max_size=8,
)


@given(prompts, st.integers(0, 700))
def test_lengths_times_and_whole_granules_come_back(tmp_path_factory, made, output_len):
    trace = trace_of(made, output_len)
    again, _ = round_trip(trace, tmp_path_factory.mktemp("m"))
    for name in ("arrival_ps", "input_len", "output_len"):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist()
    assert shares_what_it_should(again, made)


def shares_what_it_should(trace, made):
    """Whether any two prompts have those whole granules in common that the pieces they are made of give them."""
    for i, (left, _) in enumerate(made):
        for j, (right, _) in enumerate(made[:i]):
            pieces = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
            whole = min(trace.input_len[i], trace.input_len[j]) // 512
            prompts = [trace.segments(k, 512) for k in (i, j)]
            if min(shared(*prompts), whole) != pieces * PIECE_LEN // 512:
                return False
    return True


@pytest.mark.parametrize("wrong", [lambda ids: list(range(len(ids))), lambda ids: [1000 * ids[0] + ids[-1]] * len(ids)])
def test_a_writer_that_shares_too_much_or_too_little_is_found(tmp_path, wrong):
    made = [([1] * 4, 0), ([1] * 2 + [0] * 4, 0), ([0] * 4, 100)]
    rows = [json.loads(row) for row in MooncakeRows(trace_of(made))]
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps({**row, "hash_ids": wrong(row["hash_ids"])}) + "\n" for row in rows))
    assert not shares_what_it_should(mooncake.read(path), made)


@given(prompts)
def test_prefixes_of_whole_granules_keep_their_hit_rate(tmp_path_factory, made):
    even = [(np.repeat(pieces, 2).tolist(), own_len) for pieces, own_len in made]
    trace = trace_of(even)
    again, losses = round_trip(trace, tmp_path_factory.mktemp("m"))
    assert stats(again)["ideal_hit_rate"] == stats(trace)["ideal_hit_rate"]
    assert losses == []


def test_an_odd_prefix_loses_its_half_and_that_is_said(tmp_path):
    trace = trace_of([([1], 1000), ([1], 1000)])
    again, losses = round_trip(trace, tmp_path)
    assert (stats(trace)["ideal_hit_rate"], stats(again)["ideal_hit_rate"]) == (256 / 2512, 0)
    assert losses == [
        "reuse: the ideal hit rate is 0.101911 and becomes 0.000000, as content is named by 512 tokens of prompts, and "
        "answers are not named"
    ]


def test_a_rest_is_shared_with_the_same_rest_alone(tmp_path):
    again, _ = round_trip(trace_of([([1, 1, 1], 0), ([1, 1, 1], 0), ([1, 1, 1, 1], 0)]), tmp_path)
    assert [again.segments(i, 256)[0][:2] for i in range(3)] == [(0, 0)] * 3
    assert stats(again)["ideal_hit_rate"] == (768 + 512) / (768 + 768 + 1024)


def test_what_sessions_lose_is_said(tmp_path):
    trace = generate(Agentic(sessions=2, turns=2, common_len=512, first_len=512, turn_len=512, output_len=512))
    again, losses = round_trip(trace, tmp_path)
    # each second prompt holds its first one, and an answer that no prompt held before
    assert stats(trace)["ideal_hit_rate"] == (512 + 2 * 1536) / (2 * 1024 + 2 * 2048)
    assert stats(again)["ideal_hit_rate"] == (512 + 2 * 1024) / (2 * 1024 + 2 * 2048)
    assert losses[:2] == [
        "2 requests wait for another one's end: they start at their recorded start instead",
        "2 sessions of several requests: every request is a session of its own",
    ]
    assert losses[2].startswith("reuse: the ideal hit rate is 0.583333 and becomes 0.416667, as")


def test_a_time_is_an_integer_where_it_can_be():
    rows = list(MooncakeRows(trace_of([([1], 0)] * 5)))
    times = [b'"timestamp":0,', b'"timestamp":0.25,', b'"timestamp":0.5,', b'"timestamp":0.75,', b'"timestamp":1,']
    assert [row.partition(b'"input')[0].removeprefix(b"{") for row in rows] == times
    assert rows[0] == b'{"timestamp":0,"input_length":256,"output_length":0,"hash_ids":[0]}\n'


def test_the_conversation_trace_comes_back_as_it_was(tmp_path):
    trace = mooncake.read(shared_data("mooncake_conversation_trace.jsonl.gz"))
    again, losses = round_trip(trace, tmp_path)
    assert losses == []
    assert again.num_granules.tolist() == trace.num_granules.tolist()
    assert stats(again) == {**stats(trace), "name": "written.jsonl"}


def test_the_recorded_sessions_lose_what_is_said(tmp_path):
    trace = claude_code.read(shared_data("claude_code"))
    again, losses = round_trip(trace, tmp_path)
    assert again.input_len.tolist() == trace.input_len.tolist()
    assert losses[0].startswith("7044 requests wait for") and losses[1].startswith("102 sessions of several")
    assert f"becomes {stats(again)['ideal_hit_rate']:.6f}, as" in losses[2]

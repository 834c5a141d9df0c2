"""The connector's decision log, to the line."""

import gzip
import json
import logging

import pytest

from kvsim.workload import decision_log
from kvsim.workload.load import load_trace, sniff
from kvsim.workload.trace import TraceError

HEADER = {"kvtwin_record": 1, "granule_len": 4, "groups": [{"type": "FullAttention", "block_len": 4}]}
A, B, C, D = (f"{number:016x}" for number in (1, 2, 2**63, 2**64 - 1))
GOOD = {"arrived_ns": 5_000, "admitted_ns": 6_000, "prompt_len": 8, "total_len": 12, "ids": A + B + C}
END = json.dumps({"records": 1, "dropped": 0})


def line(**changes):
    return json.dumps({**GOOD, **changes})


def without(*fields):
    return json.dumps({name: value for name, value in GOOD.items() if name not in fields})


def write(path, *rows, header=HEADER, end="\n"):
    path.write_text("\n".join([json.dumps(header), *rows]) + end)
    return path


def test_columns_of_a_small_log(tmp_path):
    path = write(
        tmp_path / "engine.log",
        line(arrived_ns=9_000, prompt_len=6, total_len=13),
        line(arrived_ns=5_000, prompt_len=12, total_len=14, like=[2, 2], ids=D),
        line(arrived_ns=5_000, prompt_len=3, total_len=3, ids=""),
        line(arrived_ns=5_500, prompt_len=11, total_len=19, like=[3, 3], ids=A),
        json.dumps({"records": 4, "dropped": 0}),
    )
    trace = decision_log.read(path)
    assert (trace.name, trace.format, trace.granule_len) == ("engine.log", "decision-log", 4)
    assert trace.arrival_ps.tolist() == [0, 0, 500_000, 4_000_000]
    assert (trace.after.tolist(), trace.num_sessions) == ([0, 1, 2, 3], 4)
    assert trace.input_len.tolist() == [12, 3, 11, 6]
    assert trace.output_len.tolist() == [2, 0, 8, 7]
    assert trace.num_granules.tolist() == [3, 0, 2, 1]
    second, third, fourth, first = (trace.segments(number, 4) for number in range(4))
    root, branch = first[0][0], second[1][0]
    assert first == ((root, 0, 3),), "block 1 ends in the answer, of which the next ones are too"
    assert second == ((root, 0, 2), (branch, 2, 3))
    assert third == ()
    assert fourth == ((root, 0, 2), (branch, 2, 4)), "the answer goes on where the second one's prompt ends"


def test_ids_of_64_bits_are_kept_exactly(tmp_path):
    rows = [line(total_len=8, ids=last + first) for last, first in ((C, D), (C, C), (D, D), (C, D))]
    trace = decision_log.read(write(tmp_path / "t", *rows))
    named = [trace.segments(number, 4) for number in range(4)]
    assert named[0] == named[3]
    assert len(set(named)) == 3


def test_what_follows_the_last_whole_granule_is_its_own(tmp_path):
    rows = [line(prompt_len=length, total_len=length, ids=A + B) for length in (11, 11)]
    trace = decision_log.read(write(tmp_path / "t", *rows))
    left, right = (trace.segments(number, 1) for number in (0, 1))
    assert left[0] == right[0] == (left[0][0], 0, 8)
    assert left[1][0] != right[1][0]


def test_an_answer_that_leaves_another_one_is_found_by_the_next_turn(tmp_path):
    rows = [
        line(prompt_len=4, total_len=12, ids=A + B + C),
        line(prompt_len=4, total_len=12, ids=A + B + D),
        line(prompt_len=12, total_len=12, ids=A + B + D),
    ]
    trace = decision_log.read(write(tmp_path / "t", *rows))
    other, turn, following = (trace.segments(number, 4) for number in range(3))
    assert turn[-1][0] == following[-1][0] != other[-1][0]
    assert following[0] == (other[0][0], 0, 2)


def test_long_conversations_come_back_whole(tmp_path):
    rows = [line(prompt_len=4, total_len=4, ids=f"{1:016x}")]
    for turn in range(2, 1_500):
        rows.append(line(prompt_len=4 * turn, total_len=4 * turn, like=[turn, turn - 1], ids=f"{turn:016x}"))
    trace = decision_log.read(write(tmp_path / "t", *rows))
    assert len(trace.segment_stream) == trace.num_requests == 1_499
    assert len(set(trace.segment_stream.tolist())) == 1


def test_what_was_never_admitted_is_left_out_but_can_be_referred_to(tmp_path):
    rows = [line(admitted_ns=None), line(like=[2, 3], ids="")]
    trace = decision_log.read(write(tmp_path / "t", *rows))
    assert trace.num_requests == 1
    assert len(trace.segments(0, 4)) == 1
    with pytest.raises(TraceError, match="t:1: file, no request that was admitted, expected at least one"):
        decision_log.read(write(tmp_path / "t", rows[0]))


def test_resets_are_left_out(tmp_path):
    reset = json.dumps({"reset_ns": 5_000, "namespace": "0"})
    assert decision_log.read(write(tmp_path / "t", line(), reset, line(like=[2, 3], ids=""))).num_requests == 2


def test_more_fields_are_no_error(tmp_path):
    assert decision_log.read(write(tmp_path / "t", line(novelty=[1]))).num_requests == 1


def test_the_format_is_told_by_content_and_packed_or_not(tmp_path):
    path = write(tmp_path / "t", line(), END)
    assert sniff(path) == "decision-log"
    packed = tmp_path / "t.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_trace(packed, use_cache=False).num_requests == load_trace(path, use_cache=False).num_requests == 1


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_half_a_last_line_is_left_out_and_told(tmp_path, caplog, cut):
    path = write(tmp_path / "t", line(), line()[:-cut], end="")
    assert decision_log.read(path).num_requests == 1
    assert f"{path}:3: half a line, of a process that was killed, is left out" in caplog.text


def test_a_whole_last_line_without_its_end_is_read(tmp_path, caplog):
    assert decision_log.read(write(tmp_path / "t", line(), line(), end="")).num_requests == 2
    assert not caplog.records


def test_half_a_line_that_is_not_the_last_is_an_error(tmp_path):
    with pytest.raises(TraceError, match=r"t:2: JSON, b'"):
        decision_log.read(write(tmp_path / "t", line()[:-5], line()))
    with pytest.raises(TraceError, match=r"t:1: JSON, b'"):
        (tmp_path / "t").write_text(json.dumps(HEADER)[:-1])
        decision_log.read(tmp_path / "t")


def test_dropped_requests_are_told(tmp_path, caplog):
    path = write(tmp_path / "t", line(), json.dumps({"records": 1, "dropped": 7}))
    with caplog.at_level(logging.WARNING):
        assert decision_log.read(path).num_requests == 1
    assert f"{path}:3: 7 requests more were served and not recorded" in caplog.text


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({**HEADER, "kvtwin_record": 2}, "kvtwin_record, 2, expected 1"),
        ({**HEADER, "kvtwin_record": True}, "kvtwin_record, True, expected 1"),
        ({"granule_len": 4}, "kvtwin_record, missing, expected 1"),
        ({**HEADER, "granule_len": 0}, "granule_len, 0, expected an integer, 1 <="),
        ([1], "JSON, [1], expected a JSON object"),
    ],
)
def test_a_header_that_is_not_understood_is_refused(tmp_path, header, says):
    with pytest.raises(TraceError) as caught:
        decision_log.read(write(tmp_path / "t", line(), header=header))
    assert str(caught.value).startswith(f"{tmp_path / 't'}:1: {says}")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "t").write_text("")
    with pytest.raises(TraceError, match="t:1: file, no rows, expected the header of a decision log"):
        decision_log.read(tmp_path / "t")


IDS = "expected 3 ids of 16 hexadecimal digits, less those of `like`"
LIKE = "expected [line, n]: the first n ids, at least one, of a request on a line before this one"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON, b'{\\n', expected one JSON object ("),
        ("[1]", "JSON, [1], expected a JSON object"),
        (without("arrived_ns"), "arrived_ns, missing, expected a number, 0 <= arrived_ns < 9000000000000000"),
        (line(arrived_ns=-1), "arrived_ns, -1, expected a number"),
        (line(arrived_ns="1"), "arrived_ns, '1', expected a number"),
        (line(prompt_len=0), "prompt_len, 0, expected an integer, 1 <= prompt_len < 2**32"),
        (line(prompt_len=8.0), "prompt_len, 8.0, expected an integer"),
        (line(total_len=7), "total_len, 7, expected an integer, 8 <= total_len < 2**32"),
        (without("ids"), f"ids, missing, {IDS}"),
        (line(ids=[1, 2, 3]), f"ids, [1, 2, 3], {IDS}"),
        (line(ids=A + B), f"ids, '{A + B}', {IDS}"),
        (line(ids="g" * 48), f"ids, '{'g' * 48}', {IDS}"),
        (line(ids=A + " " * 16 + B), f"ids, '{A + ' ' * 16 + B}', {IDS}"),
        (line(like=[2, 3], ids=A), f"ids, '{A}', {IDS}"),
        (line(like=None), f"like, None, {LIKE}"),
        (line(like=[2], ids=C), f"like, [2], {LIKE}"),
        (line(like=[2, True], ids=C), f"like, [2, True], {LIKE}"),
        (line(like=[2, 0]), f"like, [2, 0], {LIKE}"),
        (line(like=[2, 4], ids=""), f"like, [2, 4], {LIKE}"),
        (line(like=[1, 2], ids=C), f"like, [1, 2], {LIKE}"),
        (line(like=[3, 2], ids=C), f"like, [3, 2], {LIKE}"),
        (json.dumps({"records": 1, "dropped": -1}), "dropped, -1, expected an integer, 0 <= dropped < 2**32"),
    ],
)
def test_a_line_that_breaks_the_format_is_named(tmp_path, text, says):
    path = write(tmp_path / "t", line(), text, END)
    with pytest.raises(TraceError) as caught:
        decision_log.read(path)
    assert str(caught.value).startswith(f"{path}:3: {says}")

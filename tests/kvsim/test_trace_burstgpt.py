"""BurstGPT's format: lengths, sessions that grow, and who waits for whom."""

import gzip

import pytest

from kvsim.workload import burstgpt
from kvsim.workload.stats import stats
from kvsim.workload.trace import TraceError

V1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
V2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
S = 10**12  # picoseconds
FIRST = "19440110.0,a,43,GPT-4,90,10,100,Conversation log"
GOOD = "19440161.0,a,2,ChatGPT,100,29,129,Conversation log"


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def waits(trace):
    """(index waited for or None, pause in s) of each request."""
    rows = zip(range(trace.num_requests), trace.after.tolist(), trace.delay_ps.tolist(), strict=True)
    return [(None if after == index else after, delay_ps / S) for index, after, delay_ps in rows]


def test_lengths_alone(tmp_path):
    rows = ("5,ChatGPT,472,18,490,Conversation log", "45.5,GPT-4,1087,0,1087,API log")
    trace = burstgpt.read(write(tmp_path / "b.csv", V1, *rows))
    assert (trace.name, trace.format, trace.granule_len) == ("b.csv", "burstgpt", 16)
    assert trace.arrival_ps.tolist() == [0, 40.5 * S]
    assert trace.after.tolist() == trace.session.tolist() == [0, 1]
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([472, 1087], [18, 0])
    assert stats(trace)["ideal_hit_rate"] == 0


def test_a_conversation_grows_and_a_shorter_prompt_begins_anew(tmp_path):
    rows = (
        "10.0,a,3,GPT-4,90,10,100,Conversation log",
        "11.0,b,3,GPT-4,90,10,100,Conversation log",
        "20.0,a,5,GPT-4,100,10,110,Conversation log",  # prompt and answer before it, nothing new
        "30.0,a,5,GPT-4,109,10,119,Conversation log",  # one token too few
        "40.0,a,5,GPT-4,200,10,210,Conversation log",
    )
    trace = burstgpt.read(write(tmp_path / "b.csv", V2, *rows))
    streams = [trace.segments(i, 1)[0][0] for i in range(5)]
    assert streams[0] == streams[2] and streams[3] == streams[4]
    assert len(set(streams)) == 3
    assert trace.session.tolist() == [0, 1, 0, 0, 0]
    assert stats(trace)["ideal_hit_rate"] == (100 + 119) / trace.input_len.sum()


def test_a_turn_waits_for_the_one_before_it_and_the_recorded_pause(tmp_path):
    rows = (
        "10.0,a,3,GPT-4,90,10,100,Conversation log",
        "12.0,,1,GPT-4,90,10,100,API log",
        "20.5,a,50,GPT-4,100,10,110,Conversation log",
        "30.0,a,,GPT-4,110,10,120,Conversation log",  # it began before the answer was complete
        "42.0,a,5,GPT-4,200,10,210,Conversation log",  # the end of the one before is not recorded
    )
    trace = burstgpt.read(write(tmp_path / "b.csv", V2, *rows))
    assert waits(trace) == [(None, 0), (None, 0), (0, 7.5), (2, 0), (3, 12)]
    assert trace.arrival_ps.tolist() == [0, 2 * S, 10.5 * S, 20 * S, 32 * S]


def test_neither_the_api_nor_an_empty_name_is_a_session(tmp_path):
    rows = ("1,x,1,m,9,1,10,API log", "2,x,1,m,10,1,11,API log", "3,,1,m,9,1,10,Conversation log")
    trace = burstgpt.read(write(tmp_path / "b.csv", V2, *rows, "4,,1,m,10,1,11,Conversation log"))
    assert trace.num_sessions == 4
    assert waits(trace) == [(None, 0)] * 4


def test_another_unit_is_of_all_times(tmp_path):
    path = write(tmp_path / "b.csv", V2, FIRST, GOOD)
    assert waits(burstgpt.read(path)) == [(None, 0), (0, 8)]
    assert waits(burstgpt.read(path, 10**9)) == [(None, 0), (0, 0.008)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "row, '', expected 8 cells: Timestamp,Session ID,Elapsed time,Model,"),
        (GOOD.removesuffix(",Conversation log"), "row, '19440161.0,a,2,ChatGPT,100,29,129', expected 8 cells"),
        (GOOD.replace("19440161.0", "-1"), "Timestamp, -1, expected a number, 0 <= Timestamp < 9007199254740992"),
        (GOOD.replace("19440161.0", "now"), "Timestamp, 'now', expected a number"),
        (GOOD.replace("19440161.0", "nan"), "Timestamp, 'nan', expected a number"),
        (GOOD.replace("19440161.0", ""), "Timestamp, '', expected a number"),
        (
            GOOD.replace("19440161.0", "19440109.5"),
            "Timestamp, 19440109.5, expected at least the previous row's 194",
        ),
        (
            GOOD.replace("19440161.0", "28440110.0"),
            "Timestamp, 28440110.0, expected less than 9000000 s after the",
        ),
        (GOOD.replace("a,2,", "a,-2,"), "Elapsed time, -2, expected a number, 0 <= Elapsed time < 9000000"),
        (GOOD.replace("a,2,", "a,2s,"), "Elapsed time, '2s', expected a number"),
        (GOOD.replace(",100,", ",0,"), "Request tokens, 0, expected an integer, 1 <= Request tokens < 2**32"),
        (GOOD.replace(",100,", ",100.5,"), "Request tokens, 100.5, expected an integer"),
        (GOOD.replace(",29,", ",,"), "Response tokens, '', expected an integer, 0 <= Response tokens < 2**32"),
        (GOOD.replace(",29,", ",-29,"), "Response tokens, -29, expected an integer"),
        (GOOD.replace(",129,", ",128,"), "Total tokens, 128, expected 129, the sum of Request tokens and Response"),
        (GOOD.replace(",129,", ",,"), "Total tokens, '', expected an integer"),
        (GOOD.replace("Conversation", "Chat"), "Log Type, 'Chat log', expected 'Conversation log' or 'API log'"),
        (GOOD + " ", "Log Type, 'Conversation log ', expected 'Conversation log' or"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place_field_value_and_rule(tmp_path, text, says):
    path = write(tmp_path / "b.csv", V2, FIRST, text, GOOD)
    with pytest.raises(TraceError) as caught:
        burstgpt.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: {says}"), message
    assert "\n" not in message


def test_the_row_without_its_fault_is_read(tmp_path):
    """The table above rejects faults, not the row they are made from."""
    path = tmp_path / "b.csv.gz"
    path.write_bytes(gzip.compress("\n".join((V2, FIRST, GOOD, GOOD)).encode()))
    assert burstgpt.read(path).num_requests == 3


def test_another_header_is_one_line_with_both_that_are_known(tmp_path):
    path = write(tmp_path / "b.csv", V2.replace("Session ID", "SessionID"), GOOD)
    with pytest.raises(TraceError) as caught:
        burstgpt.read(path)
    assert str(caught.value).startswith(f"{path}:1: header, 'Timestamp,SessionID,")
    assert str(caught.value).endswith(f"expected {V1} or {V2}")

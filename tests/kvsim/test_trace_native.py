"""kvtwin's own trace format: what was written is what is read, and nothing else is read."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import trace_commands
from kvsim.workload import claude_code, mooncake, native
from kvsim.workload.agentic import Agentic, generate
from kvsim.workload.codex import Codex
from kvsim.workload.codex import generate as generate_codex
from kvsim.workload.load import load_trace, sniff
from kvsim.workload.trace import COLUMN_NAMES, TraceError
from tests.support import shared_data

HEADER = {"kvtwin_trace": 1, "name": "t", "source": "made", "granule_len": 16, "num_requests": 2}
FIRST = {
    "session": 0, "start_ps": 5, "input_len": 40, "output_len": 3, "content": [[0, 16], [1, 40]], "output_stream": 1,
    "num_granules": 2, "cached_len": 16,
}  # fmt: skip
NEXT = {
    "session": 0, "start_ps": 7, "after": 0, "delay_ps": 2, "input_len": 60, "output_len": 0,
    "content": [[0, 16], [1, 60]], "output_stream": 2, "num_granules": 4, "cached_len": 43,
}  # fmt: skip


def same(left, right):
    return (left.name, left.format, left.granule_len) == (right.name, right.format, right.granule_len) and all(
        np.array_equal(getattr(left, name), getattr(right, name)) for name in COLUMN_NAMES
    )


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def without(row, *fields):
    return {name: value for name, value in row.items() if name not in fields}


def round_trip(trace, path):
    trace_commands.write(path, native.lines(trace))
    return native.read(path)


@settings(deadline=None, max_examples=30)
@given(
    st.builds(
        Agentic,
        sessions=st.integers(1, 4),
        turns=st.integers(1, 4),
        common_len=st.integers(0, 9),
        first_len=st.integers(1, 9),
        output_len=st.integers(0, 5),
        delay_s=st.floats(0, 100),
        start_spread_s=st.floats(0, 100),
    ),
    st.sampled_from(["t.jsonl", "t.jsonl.gz"]),
)
def test_what_was_written_is_what_is_read(tmp_path_factory, shape, name):
    trace = generate(shape, seed=1)
    assert same(round_trip(trace, tmp_path_factory.mktemp("native") / name), trace)


def test_with_reports_and_through_the_loader(tmp_path):
    trace = generate_codex(Codex(sessions=20), seed=1)
    path = tmp_path / "codex.jsonl"
    assert same(round_trip(trace, path), trace)
    assert sniff(path) == "kvtwin"
    assert same(load_trace(path), trace) and same(load_trace(path), trace), "the second time from the cache"
    one_less = replace(trace, reported_cached_len=trace.reported_cached_len - 1)
    assert not same(round_trip(one_less, path), trace), "a difference shows"


def test_recorded_traces_too(tmp_path):
    """Both formats that are not generated: open loop with partial granules, closed loop with groups of subagents."""
    for read, name in ((mooncake.read, "mooncake_conversation_trace.jsonl.gz"), (claude_code.read, "claude_code")):
        trace = read(shared_data(name))
        assert same(round_trip(trace, tmp_path / "t.gz"), trace)


def test_the_same_bytes_for_the_same_trace(tmp_path):
    paths = [tmp_path / name for name in ("a.gz", "b.gz", "c")]
    for path in paths:
        trace_commands.write(path, native.lines(generate_codex(Codex(sessions=2), seed=1)))
    packed, again, plain = (path.read_bytes() for path in paths)
    assert packed == again
    assert gzip.decompress(packed) == plain


def test_every_field_of_a_small_file(tmp_path):
    trace = native.read(write(tmp_path / "t", HEADER, FIRST, NEXT))
    assert (trace.name, trace.format, trace.granule_len) == ("t", "made", 16)
    assert (trace.arrival_ps.tolist(), trace.after.tolist(), trace.delay_ps.tolist()) == ([5, 7], [0, 0], [0, 2])
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([40, 60], [3, 0])
    assert trace.segments(0, 1) == ((0, 0, 16), (1, 16, 43))
    assert trace.segments(1, 1) == ((0, 0, 16), (1, 16, 60))
    assert (trace.num_granules.tolist(), trace.reported_cached_len.tolist()) == ([2, 4], [16, 43])


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({**HEADER, "kvtwin_trace": 2}, "kvtwin_trace, 2, expected 1"),
        ({**HEADER, "kvtwin_trace": True}, "kvtwin_trace, True, expected 1"),
        ({**HEADER, "name": 3}, "name, 3, expected a text"),
        (without(HEADER, "source"), "source, missing, expected a text"),
        ({**HEADER, "granule_len": 0}, "granule_len, 0, expected an integer, 1 <= granule_len"),
        ({**HEADER, "num_requests": 0}, "num_requests, 0, expected an integer, 1 <= num_requests"),
        ({**HEADER, "seed": 3}, "seed, 3, expected only the fields kvtwin_trace, name"),
        ("[]", "JSON, [], expected a JSON object"),
    ],
)
def test_a_bad_header_is_one_line(tmp_path, header, says):
    path = write(tmp_path / "t", header, FIRST, NEXT)
    with pytest.raises(TraceError) as caught:
        native.read(path)
    assert str(caught.value).startswith(f"{path}:1: {says}")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "JSON, b'{\\n', expected one JSON object"),
        (without(NEXT, "session"), "session, missing, expected an integer, 0 <= session < 2"),
        ({**NEXT, "session": 2}, "session, 2, expected an integer, 0 <= session < 2"),
        ({**NEXT, "start_ps": 4}, "start_ps, 4, expected at least the previous request's 5"),
        ({**NEXT, "start_ps": 7.0}, "start_ps, 7.0, expected an integer, 0 <= start_ps <"),
        ({**NEXT, "start_ps": 9 * 10**18}, "start_ps, 9000000000000000000, expected an integer"),
        ({**NEXT, "after": 1}, "after, 1, expected an integer, 0 <= after < 1"),
        ({**NEXT, "after": False}, "after, False, expected an integer"),
        (without(NEXT, "after"), "after, missing, expected an integer"),
        (without(NEXT, "delay_ps"), "delay_ps, missing, expected an integer"),
        ({**NEXT, "delay_ps": -2}, "delay_ps, -2, expected an integer"),
        ({**NEXT, "input_len": 0}, "input_len, 0, expected an integer, 1 <= input_len"),
        ({**NEXT, "output_len": True}, "output_len, True, expected an integer, 0 <= output_len"),
        ({**NEXT, "content": []}, "content, [], expected ends that grow, up to input_len = 60"),
        ({**NEXT, "content": [[0, 16], [1, 59]]}, "content, [[0, 16], [1, 59]], expected ends that grow"),
        ({**NEXT, "content": [[0, 16], [1, 16], [2, 60]]}, "content, [[0, 16], [1, 16], [2, 60]], expected ends that"),
        ({**NEXT, "content": [[0, 16], [1, 60, 4]]}, "content, [[0, 16], [1, 60, 4]], expected a list of runs"),
        ({**NEXT, "content": [[0, 16], [2**26, 60]]}, "content, [[0, 16], [67108864, 60]], expected a list of runs"),
        ({**NEXT, "content": [[0, 16], [True, 60]]}, "content, [[0, 16], [True, 60]], expected a list of runs"),
        ({**NEXT, "content": "x"}, "content, 'x', expected a list of runs"),
        ({**NEXT, "content": [[1, 60]]}, "content, [[1, 60]], expected stream 1 entered at token 16 from stream 0, as"),
        (
            {**NEXT, "content": [[2, 9], [0, 60]]},
            "content, [[2, 9], [0, 60]], expected stream 0 entered at token 0, as",
        ),
        ({**NEXT, "content": [[0, 17], [1, 60]]}, "content, [[0, 17], [1, 60]], expected stream 1 entered at token 16"),
        ({**NEXT, "output_stream": -1}, "output_stream, -1, expected an integer, 0 <= output_stream < 67108864"),
        ({**NEXT, "num_granules": 2}, "num_granules, 2, expected an integer, 3 <= num_granules < 5"),
        ({**NEXT, "num_granules": 5}, "num_granules, 5, expected an integer, 3 <= num_granules < 5"),
        ({**NEXT, "cached_len": 61}, "cached_len, 61, expected an integer, 0 <= cached_len < 61"),
        (without(NEXT, "cached_len"), "cached_len, missing, expected a report in every request or in none"),
        ({**NEXT, "hash_ids": []}, "hash_ids, [], expected only the fields session, start_ps, input_len"),
        (json.dumps(NEXT)[:-1] + ', "session": 0}', "JSON, a field twice, expected each field once"),
    ],
)
def test_a_bad_request_is_one_line_with_its_place_field_value_and_rule(tmp_path, row, says):
    path = write(tmp_path / "t", HEADER, FIRST, row)
    with pytest.raises(TraceError) as caught:
        native.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: {says}"), message
    assert "\n" not in message


def test_a_report_that_begins_too_late_is_an_error(tmp_path):
    path = write(tmp_path / "t", HEADER, without(FIRST, "cached_len"), NEXT)
    with pytest.raises(TraceError, match=":3: cached_len, 43, expected only the fields"):
        native.read(path)
    unreported = write(path, HEADER, without(FIRST, "cached_len"), without(NEXT, "cached_len"))
    assert len(native.read(unreported).reported_cached_len) == 0


def test_lines_that_are_missing_or_too_many_are_noticed(tmp_path):
    path = tmp_path / "t"
    with pytest.raises(TraceError, match=":2: file, 1 requests, expected num_requests = 2"):
        native.read(write(path, HEADER, FIRST))
    with pytest.raises(TraceError, match=":4: file, 3 requests, expected num_requests = 2"):
        native.read(write(path, HEADER, FIRST, NEXT, NEXT))
    with pytest.raises(TraceError, match=":1: file, no rows, expected the header of a kvtwin trace"):
        native.read(write(path))


def test_a_name_that_is_no_text_can_be_written(tmp_path):
    trace = replace(generate(Agentic(1, turns=1)), name="a\udcffb")
    assert round_trip(trace, tmp_path / "t").name == "a?b"

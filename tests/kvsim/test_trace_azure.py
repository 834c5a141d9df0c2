"""Azure's format, to the row."""

import csv
import gzip
import io
from datetime import datetime

import numpy as np
import pytest

from kvsim.workload import azure
from kvsim.workload.load import load_trace
from kvsim.workload.trace import TraceError
from tests.support import shared_data

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:17:04.0319600,100,8"


def write(path, *lines, end="\r\n"):
    path.write_bytes(end.join((HEADER, *lines)).encode())
    return path


def test_columns_of_a_small_trace(tmp_path):
    rows = ("2023-12-31 23:59:59.9799600,40,10", "2023-12-31 23:59:59.9799600,1,0", "2024-01-01 00:00:01.0319601,7,8")
    trace = azure.read(write(tmp_path / "t.csv", *rows))
    assert (trace.name, trace.format, trace.granule_len) == ("t.csv", "azure", 16)
    assert trace.arrival_ps.tolist() == [0, 0, 1_052_000_100_000], "to 100 ns, over the end of a year"
    assert trace.after.tolist() == trace.session.tolist() == [0, 1, 2]
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([40, 1, 7], [10, 0, 8])
    assert trace.num_granules.tolist() == [2, 0, 0]
    streams = [trace.segments(i, 1)[0][0] for i in range(3)]
    assert len(set(streams)) == 3, "no prompt shares anything"
    assert trace.segments(0, 16) == ((streams[0], 0, 3),), "an answer goes on where its prompt ends"


def test_the_times_of_2024_and_whole_seconds(tmp_path):
    path = write(tmp_path / "t", "2024-05-12 00:00:00.003947+00:00,1,1", "2024-05-12 00:00:01+00:00,1,1", end="\n")
    assert azure.read(path).arrival_ps.tolist() == [0, 996_053_000_000]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "row, '', expected 3 cells: TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("2023-11-16 18:17:04.0319600,100", "row, '2023-11-16 18:17:04.0319600,100', expected 3 cells"),
        (GOOD + ",1", "row, '2023-11-16 18:17:04.0319600,100,8,1', expected 3 cells"),
        ('2023-11-16 18:17:04,"100,8', """CSV, b'2023-11-16 18:17:04,"100,8\\r\\n', expected one row in UTF-8 ("""),
        ("yesterday,100,8", "TIMESTAMP, 'yesterday', expected a time as in 2023-11-16 18:17:03.9799600, in UTC"),
        ("2023-11-31 18:17:04,100,8", "TIMESTAMP, '2023-11-31 18:17:04', expected a time"),
        ("2023-11-16 24:17:04,100,8", "TIMESTAMP, '2023-11-16 24:17:04', expected a time"),
        ("2023-11-16T18:17:04,100,8", "TIMESTAMP, '2023-11-16T18:17:04', expected a time"),
        ("2023-11-16 18:17:04+01:00,100,8", "TIMESTAMP, '2023-11-16 18:17:04+01:00', expected a time"),
        ("2023-11-16 18:17:04.,100,8", "TIMESTAMP, '2023-11-16 18:17:04.', expected a time"),
        ("17,100,8", "TIMESTAMP, '17', expected a time"),
        (
            "2023-11-16 18:17:03.9799599,100,8",
            "TIMESTAMP, '2023-11-16 18:17:03.9799599', expected at least the previous row's 2023-11-16 18:17:03.97996",
        ),
        (
            "2024-03-02 18:17:04,100,8",
            "TIMESTAMP, '2024-03-02 18:17:04', expected less than 9000000 s after the first row's 2023-11-16 18:17:03",
        ),
        ("2023-11-16 18:17:04,0,8", "ContextTokens, 0, expected an integer, 1 <= ContextTokens < 2**32"),
        ("2023-11-16 18:17:04,,8", "ContextTokens, '', expected an integer"),
        ("2023-11-16 18:17:04,1e3,8", "ContextTokens, '1e3', expected an integer"),
        ("2023-11-16 18:17:04, 100,8", "ContextTokens, ' 100', expected an integer"),
        ("2023-11-16 18:17:04,0100,8", "ContextTokens, '0100', expected an integer"),
        ("2023-11-16 18:17:04,100.0,8", "ContextTokens, 100.0, expected an integer"),
        ("2023-11-16 18:17:04,4294967296,8", "ContextTokens, 4294967296, expected an integer"),
        (f"2023-11-16 18:17:04,{'9' * 9000},8", "ContextTokens, '99999"),
        ("2023-11-16 18:17:04,100,-1", "GeneratedTokens, -1, expected an integer, 0 <= GeneratedTokens < 2**32"),
        ("2023-11-16 18:17:04,100,x", "GeneratedTokens, 'x', expected an integer"),
        (HEADER, "TIMESTAMP, 'TIMESTAMP', expected a time"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place_field_value_and_rule(tmp_path, text, says):
    path = write(tmp_path / "t.csv", "2023-11-16 18:17:03.97996,1,1", text, "2023-11-16 18:17:05,1,1")
    with pytest.raises(TraceError) as caught:
        azure.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: {says}"), message
    assert "\n" not in message and len(message) < 500


def test_the_row_without_its_fault_is_read(tmp_path):
    """The table above rejects faults, not the row they are made from."""
    path = write(tmp_path / "t", "2023-11-16 18:17:03.97996,1,1", GOOD, "2023-11-16 18:17:05,1,1")
    assert azure.read(path).num_requests == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", f"1: file, no rows, expected a header ({HEADER}) and a request a line"),
        (HEADER.encode(), f"1: file, no rows, expected a header ({HEADER}) and a request a line"),
        (GOOD.encode(), f"1: header, '2023-11-16 18:17:04.0319600,100,8', expected {HEADER}"),
        (b"TIMESTAMP,ContextTokens\n", f"1: header, 'TIMESTAMP,ContextTokens', expected {HEADER}"),
        (b"\xff\xfe,\n", r"1: CSV, b'\xff\xfe,\n', expected one row in UTF-8 (invalid start byte)"),
        (f"{HEADER}\n{GOOD}\n\xe9,1,1\n".encode("latin-1"), r"3: CSV, b'\xe9,1,1\n', expected one row in UTF-8 ("),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path, content, says):
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        azure.read(path)
    assert str(caught.value).startswith(f"{path}:{says}")


def test_half_a_gzip_stream(tmp_path):
    packed = gzip.compress("\n".join([HEADER, *[GOOD] * 5000]).encode(), 1)
    half = tmp_path / "half.gz"
    half.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"half\.gz:\d+: file, .*, expected a complete gzip stream$"):
        azure.read(half)


def test_the_recorded_trace_against_the_standard_library():
    path = shared_data("azure_2023_code.csv.gz")
    rows = list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    trace = load_trace(path, use_cache=False)
    assert trace.format == "azure"
    assert trace.num_requests == trace.num_sessions == len(rows) == 8_819
    assert trace.input_len.sum() == sum(int(row["ContextTokens"]) for row in rows) == 18_059_974
    assert trace.output_len.sum() == sum(int(row["GeneratedTokens"]) for row in rows) == 245_896
    offsets_s = np.array([(time - times[0]).total_seconds() for time in times])
    assert np.abs(trace.arrival_ps / 1e12 - offsets_s).max() < 2e-6
    assert len(np.unique(trace.segment_stream)) == 8_819

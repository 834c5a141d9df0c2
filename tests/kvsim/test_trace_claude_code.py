"""Claude Code sessions: content, and who waits for whom."""

import gzip
import json

import numpy as np
import pytest

from kvsim.workload import claude_code
from kvsim.workload.trace import TraceError
from tests.support import shared_data

S = 10**12  # picoseconds


def request(t, length=64, ids=(1,), **changes):
    return {"t": t, "type": "n", "in": length, "out": 10, "hash_ids": list(ids), **changes}


def group(t, duration_ms, *requests):
    return {"t": t, "type": "subagent", "duration_ms": duration_ms, "requests": list(requests)}


def session(*requests, **changes):
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **changes}


def read(folder, *sessions):
    for number, value in enumerate(sessions):
        (folder / f"{number}.json").write_text(json.dumps(value))
    return claude_code.read(folder)


def waits(trace):
    """(index waited for or None, pause in s) of each request."""
    rows = zip(range(trace.num_requests), trace.after.tolist(), trace.delay_ps.tolist(), strict=True)
    return [(None if after == index else after, delay_ps / S) for index, after, delay_ps in rows]


def test_ids_are_local_tails_and_outputs_are_nobodys(tmp_path):
    one = session(request(0.0, 150, (5, 6)), request(9.0, 200, (5, 6, 7), api_time=1), request(12, 63, ()))
    trace = read(tmp_path, one, one)
    assert (trace.granule_len, trace.num_sessions, trace.num_requests) == (64, 2, 6)
    by_session = [[i for i in range(6) if trace.session[i] == number] for number in (0, 1)]
    names = [[trace.segments(i, 16) for i in rows] for rows in by_session]
    first, second, third = names[0]
    stream, tail = first[0][0], first[1][0]
    assert first == ((stream, 0, 8), (tail, 8, 10)), "128 named tokens, then tail and output in one stream of its own"
    assert second[0] == (stream, 0, 12)
    assert second[1][0] not in (stream, tail)
    assert third[0][1:] == (0, 4)
    streams = [{name for segments in rows for name, _, _ in segments} for rows in names]
    assert not streams[0] & streams[1], "the same ids in another session are other content"


def test_a_session_starts_at_its_own_first_request(tmp_path):
    trace = read(tmp_path, session(request(100.5), request(103.0)), session(request(7)))
    assert trace.arrival_ps.tolist() == [0, 0, 2_500 * 10**9]
    assert trace.session.tolist() == [0, 1, 0]
    assert waits(trace) == [(None, 0), (None, 0), (0, 2.5)]


def test_the_pause_is_think_time_or_follows_from_the_times(tmp_path):
    trace = read(
        tmp_path,
        session(
            request(0, api_time=3, think_time=0),
            request(10, api_time=4, think_time=6.5),  # recorded after an end that is known: 6.5
            request(20),  # no think_time: 20 - 10 - 4
            request(50, think_time=36, api_time=90),  # predecessor's end unknown: the gap, not the time since 14
            request(60),  # the recorded end lies after this start: no pause
        ),
    )
    assert waits(trace) == [(None, 0), (0, 6.5), (1, 6), (2, 30), (3, 0)]


def test_a_request_waits_for_the_group_that_ended_last_of_those_its_predecessor_started(tmp_path):
    trace = read(
        tmp_path,
        session(
            request(0, api_time=2),
            request(10, api_time=5),
            group(20, 4_000, request(0.0, api_time=1), request(2.0, api_time=1.5, think_time=0.5)),
            group(30, 14_500, request(0.0, api_time=1), request(9.0, api_time=3, think_time=8)),
            request(33, think_time=18),
        ),
    )
    # rows: parent 0 s and 10 s; second group 15.5; first group 16 and 18; second group 24.5 to 27.5; parent 33
    assert trace.arrival_ps.tolist() == [t * S // 2 for t in (0, 20, 31, 32, 36, 49, 66)]
    assert waits(trace) == [(None, 0), (0, 8), (1, 0.5), (1, 1), (3, 0.5), (2, 8), (5, 33 - 24.5 - 3)]
    assert trace.session.tolist() == [0] * 7


def test_nobody_waits_for_a_group_in_the_background(tmp_path):
    trace = read(
        tmp_path,
        session(
            request(0, api_time=2), request(10, api_time=2), group(15, 12_500, request(0.0)), request(20, think_time=8)
        ),
    )
    assert trace.arrival_ps.tolist() == [0, 5 * S // 2, 10 * S, 20 * S]
    assert waits(trace) == [(None, 0), (0, 0.5), (0, 8), (2, 8)]


def test_groups_share_their_sessions_ids(tmp_path):
    trace = read(tmp_path, session(request(0, ids=(4,)), group(9, 1_000, request(0, ids=(4,)), request(0, ids=(5,)))))
    assert trace.segments(0, 64)[0] == trace.segments(1, 64)[0] != trace.segments(2, 64)[0]


GOOD = request(4, 150, (5, 6))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (7, "1: JSON, 7, expected a JSON object"),
        ({**GOOD, "t": -1}, "1: t, -1, expected a number, 0 <= t < 9000000"),
        ({**GOOD, "t": 0.5}, "1: t, 0.5, expected at least the t of the row before it"),
        ({**GOOD, "t": "4"}, "1: t, '4', expected a number"),
        ({**GOOD, "type": "x"}, "1: type, 'x', expected 'n' or 's' or 'subagent'"),
        ({**GOOD, "type": None}, "1: type, None, expected 'n' or"),
        ({**GOOD, "in": 0, "hash_ids": []}, "1: in, 0, expected an integer, 1 <= in < 2**32"),
        ({**GOOD, "in": 150.0}, "1: in, 150.0, expected an integer"),
        ({**GOOD, "in": True, "hash_ids": []}, "1: in, True, expected an integer"),
        ({**GOOD, "out": -1}, "1: out, -1, expected an integer, 0 <= out < 2**32"),
        ({**GOOD, "hash_ids": [5]}, "1: hash_ids, 1 ids, expected 2 ids (floor(in / 64))"),
        ({**GOOD, "hash_ids": [5, 6, 7]}, "1: hash_ids, 3 ids, expected 2 ids (floor(in / 64))"),
        ({**GOOD, "hash_ids": [5, -6]}, "1: hash_ids[1], -6, expected an integer, 0 <= id < 2**64"),
        ({**GOOD, "hash_ids": [True, 6]}, "1: hash_ids[0], True, expected an integer"),
        ({**GOOD, "api_time": -1}, "1: api_time, -1, expected a number, 0 <= api_time"),
        ({**GOOD, "think_time": None}, "1: think_time, None, expected a number, 0 <= think_time"),
        ({"t": 4, "type": "n", "out": 1, "hash_ids": []}, "1: in, missing, expected an integer"),
        (group(4, None, GOOD), "1: duration_ms, None, expected a number"),
        (group(4, 5_000, GOOD), "1: duration_ms, 5000, expected a group that starts (t - duration_ms) after"),
        (group(4, 1_000), "1: requests, [], expected at least one request"),
        ({**group(4, 1_000), "requests": 3}, "1: requests, 3, expected a list of objects"),
        (group(4, 1_000, {**GOOD, "t": 1.5}), "1.0: t, 1.5, expected a start within its group's duration_ms"),
        (group(4, 1_000, group(0, 0, GOOD)), "1.0: type, 'subagent', expected 'n' or 's'"),
        (group(4, 1_000, {**GOOD, "t": 0, "out": 1.5}), "1.0: out, 1.5, expected an integer"),
    ],
)
def test_a_bad_request_is_one_line_with_its_index(tmp_path, bad, says):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, session(request(0)), session(request(1), bad, request(5)))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / '1.json'}:request {says}")
    assert "\n" not in message


def test_the_request_without_its_fault_is_read(tmp_path):
    good_group = group(4, 1_000, {**GOOD, "t": 0.5})
    assert read(tmp_path, session(request(1), GOOD, request(5)), session(request(1), good_group)).num_requests == 5


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (session(GOOD, block_size=16), "block_size, 16, expected 64"),
        (session(GOOD, block_size=64.0), "block_size, 64.0, expected 64"),
        (session(GOOD, hash_id_scope="global"), "hash_id_scope, 'global', expected 'local'"),
        ({"block_size": 64, "requests": [GOOD]}, "hash_id_scope, missing, expected 'local'"),
        ({"block_size": 64, "hash_id_scope": "local"}, "requests, missing, expected a list of objects"),
        (session(), "requests, [], expected at least one request"),
        ([], "JSON, [], expected a JSON object"),
    ],
)
def test_a_bad_session_is_one_line(tmp_path, bad, says):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, bad)
    assert str(caught.value) == f"{tmp_path / '0.json'}:1: {says}"


@pytest.mark.parametrize("levels", [505, 5000])
def test_groups_within_groups_without_end_are_one_line(tmp_path, levels):
    row, text = json.dumps(request(0)), json.dumps(request(0))
    for _ in range(levels):
        text = f'{{"t": 0, "type": "subagent", "duration_ms": 0, "requests": [{row}, {text}]}}'
    path = tmp_path / "s.json"
    path.write_text(json.dumps(session()).replace("[]", f"[{row}, {text}]"))
    with pytest.raises(
        TraceError, match=r"s\.json:1: (requests|JSON), .*expected .*(less deeply|depth limit)"
    ) as caught:
        claude_code.read(path)
    assert len(str(caught.value).replace(str(path), "")) < 300


def test_files_that_are_no_sessions(tmp_path):
    with pytest.raises(TraceError, match=r":1: folder, no session in it, expected files named \*\.json or"):
        claude_code.read(tmp_path)
    packed = gzip.compress(json.dumps(session(*[GOOD] * 5000)).encode())
    half = tmp_path / "half.json.gz"
    half.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"half\.json\.gz:1: file, .*, expected a complete gzip stream$"):
        claude_code.read(half)
    half.write_bytes(b"{")
    with pytest.raises(TraceError, match=r"half\.json\.gz:1: JSON, b'{', expected one JSON object \("):
        claude_code.read(half)


@pytest.fixture(scope="module")
def recorded():
    return claude_code.read(shared_data("claude_code"))


def test_the_recorded_sessions(recorded):
    assert (recorded.num_requests, recorded.num_sessions) == (7_146, 102)
    assert recorded.input_len.sum() == 917_619_374
    assert (recorded.num_granules == recorded.input_len // 64).all()
    starts_alone = recorded.after == np.arange(recorded.num_requests)
    assert starts_alone.sum() == 102
    assert recorded.arrival_ps[starts_alone].sum() == 0
    assert (recorded.session[recorded.after] == recorded.session).all()


def test_the_recorded_groups_run_side_by_side_and_their_parent_waits(recorded):
    """Two sessions have subagents, 6 and 3, each started within 0.9 s of the recorded end of the request before it."""
    waiting = np.flatnonzero(recorded.after != np.arange(recorded.num_requests))
    followers = np.bincount(recorded.after[waiting], minlength=recorded.num_requests)
    assert followers[followers > 1].tolist() == [3, 2, 2, 2]
    started = waiting[followers[recorded.after[waiting]] > 1]
    assert len(started) == 9
    assert recorded.delay_ps[started].max() < 0.9 * S
    assert (followers == 0).sum() == 102 + (9 - 4), "of groups side by side, only the one that ended last is waited for"


def test_pauses_never_add_up_to_more_than_the_recording(recorded):
    """With no service time at all no request is due later than it was recorded, but for seconds of rounding."""
    due_ps = recorded.arrival_ps.copy()
    for i in range(recorded.num_requests):
        if recorded.after[i] != i:
            due_ps[i] = due_ps[recorded.after[i]] + recorded.delay_ps[i]
    assert ((due_ps - recorded.arrival_ps) < 5 * S).all()

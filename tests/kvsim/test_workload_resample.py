"""A fleet of copies: what a session recorded stays, and copies share what is declared and nothing else."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvsim.workload.agentic import Agentic
from kvsim.workload.agentic import generate as agentic
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.codex import Codex
from kvsim.workload.codex import generate as codex
from kvsim.workload.load import load_trace
from kvsim.workload.resample import Resample, resample
from kvsim.workload.stats import stats
from kvsim.workload.trace import columns_of
from tests.kvsim.command import document, inside, refused, under_hash_seeds
from tests.support import shared_data

CODEX = codex(Codex(sessions=40), seed=1)


def equal(left, right):
    return all(np.array_equal(a, b) for a, b in zip(columns_of(left), columns_of(right), strict=True))


def rows_of(trace):
    """By session: its requests in order, each with its lengths, whom it waits for, pause, and start from the first."""
    rows = {}
    for index, session in enumerate(trace.session.tolist()):
        rows.setdefault(session, []).append(index)
    found = {}
    for session, own in rows.items():
        place = {row: position for position, row in enumerate(own)}
        found[session] = tuple(
            (
                int(trace.input_len[i]), int(trace.output_len[i]), place[int(trace.after[i])], int(trace.delay_ps[i]),
                int(trace.arrival_ps[i] - trace.arrival_ps[own[0]]), int(trace.num_granules[i]),
            )
            for i in own
        )  # fmt: skip
    return found


def held(trace, session, block_size=1, most=12_000):
    """The first blocks that a session's prompts hold, by name."""
    blocks = set()
    for index in np.flatnonzero(trace.session == session):
        limit = min(most, int(trace.input_len[index]) // block_size)
        for stream, start, end in trace.segments(int(index), block_size):
            blocks |= {(stream, block) for block in range(start, min(end, limit))}
    return blocks


# --- what is drawn ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 130), st.integers(0, 2**40))
def test_every_session_is_drawn_as_often_as_any_other_or_once_more(copies, seed):
    trace = agentic(Agentic(sessions=7, turns=2, common_len=0, first_len=5, turn_len=3, output_len=2), 0)
    marked = replace(trace, output_len=1 + trace.session)  # answers tell their session
    told = rows_of(resample(marked, Resample(copies), seed))
    counts = Counter(rows[0][1] for rows in told.values())
    assert sum(counts.values()) == copies == len(told)
    assert all(copies // 7 <= counts[mark] <= -(-copies // 7) for mark in range(1, 8))


@pytest.mark.parametrize("share", ["none", "system", "recorded"])
def test_a_copy_keeps_all_that_its_session_recorded(share):
    how = Resample(80, share, 4_000 if share == "system" else 0)
    copies = Counter(rows_of(resample(CODEX, how, 5)).values())
    assert copies == Counter(dict.fromkeys(rows_of(CODEX).values(), 2))


def test_starts_are_spread_and_nothing_else_moves():
    how = Resample(80, start_spread_s=50.0)
    spread, together = resample(CODEX, how, 5), resample(CODEX, Resample(80), 5)
    firsts_s = spread.arrival_ps[spread.after == np.arange(spread.num_requests)] / 1e12
    assert 0 <= firsts_s.min() < 5 and 45 < firsts_s.max() < 50
    assert Counter(rows_of(spread).values()) == Counter(rows_of(together).values())
    assert not together.arrival_ps[together.after == np.arange(together.num_requests)].any()


def percentiles(trace):
    """Of each number of a session: its sorted values."""
    sessions = rows_of(trace).values()
    return {
        "calls": np.sort([len(rows) for rows in sessions]),
        "input": np.sort([sum(row[0] for row in rows) for rows in sessions]),
        "output": np.sort([sum(row[1] for row in rows) for rows in sessions]),
        "first": np.sort([rows[0][0] for rows in sessions]),
        "last": np.sort([rows[-1][0] for rows in sessions]),
    }


def apart(left, right):
    """The largest distance between two distribution functions."""
    at = np.concatenate((left, right))
    return float(
        np.abs(np.searchsorted(left, at, "right") / len(left) - np.searchsorted(right, at, "right") / len(right)).max()
    )


@pytest.mark.parametrize("draw", ["stratified", "independent"])
def test_percentiles_per_session_are_those_recorded(draw):
    """With n independent draws a distribution function is off by less than sqrt(ln(2 / 0.001) / 2n) with probability
    0.999 (Dvoretzky, Kiefer and Wolfowitz, 1956; Massart, 1990); a stratified draw by less than one session."""
    copies = 2_000
    bound = math.sqrt(math.log(2 / 0.001) / (2 * copies)) if draw == "independent" else 1 / 40
    recorded, found = percentiles(CODEX), percentiles(resample(CODEX, Resample(copies, draw=draw), 9))
    assert all(apart(found[name], recorded[name]) <= bound for name in recorded)
    short = percentiles(resample(CODEX, Resample(30), 9))
    assert all(apart(short[name], recorded[name]) <= 10 / 40 for name in recorded)


def test_a_draw_that_forgets_long_sessions_is_rejected():
    recorded = percentiles(CODEX)
    lens = recorded["input"]
    assert apart(np.sort(np.random.default_rng(1).choice(lens[:30], 2_000)), lens) > 0.06


def test_an_independent_draw_repeats_some_and_leaves_some():
    counts = Counter(rows_of(resample(CODEX, Resample(40, draw="independent"), 3)).values())
    assert len(counts) < 40 and max(counts.values()) > 1


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_copies_that_share_nothing_share_nothing():
    copies = resample(CODEX, Resample(50), 1)
    streams = [{stream for stream, _ in held(copies, session, 4_096)} for session in range(50)]
    assert sum(map(len, streams)) == len(set().union(*streams))
    assert stats(copies)["ideal_hit_rate"] < stats(CODEX)["ideal_hit_rate"]


def test_what_is_reused_inside_a_session_is_as_recorded():
    """Of one session alone, hits do not depend on names."""
    alone = codex(Codex(sessions=1, answers="generated"), seed=3)
    for how in (Resample(1), Resample(1, "recorded"), Resample(1, "system", 500)):
        assert stats(resample(alone, how))["ideal_hit_rate"] == stats(alone)["ideal_hit_rate"]


@pytest.mark.parametrize("shared_len", [1, 100, 4_096, 11_520])
def test_a_system_prompt_is_shared_to_its_last_token_and_not_beyond(shared_len):
    trace = codex(Codex(sessions=3), seed=1)
    copies = resample(trace, Resample(6, "system", shared_len), 1)
    blocks = [held(copies, session, 1) for session in range(3)]
    assert blocks[0] & blocks[1] == blocks[1] & blocks[2] == {(0, token) for token in range(shared_len)}


def forked():
    """A session whose second request begins with 40 tokens of the first one's, and a second session."""
    builder = TraceBuilder()
    for session in (0, 1):
        main, agent = 10 * session, 10 * session + 1
        builder.start(0, None, 0, session)
        builder.hold(100, 5, [(main, 100)], main, 1)
        builder.start(1, 2 * session, 1, session)
        builder.hold(90, 5, [(main, 40), (agent, 90)], agent, 1)
    return builder.build("forked", "test", 100)


def test_a_request_with_another_system_prompt_keeps_its_own():
    copies = resample(forked(), Resample(4, "system", 60), 1)
    for request in range(4, 8):
        segments = [copies.segment_stream[i] for i in range(*copies.segment_offset[request : request + 2])]
        ends = copies.segment_end[slice(*copies.segment_offset[request : request + 2])].tolist()
        assert (segments[0], ends) == (0, [40, 90])
    for request in range(4):
        assert copies.segment_end[slice(*copies.segment_offset[request : request + 2])].tolist() == [60, 100]
    assert len({copies.segment_stream[copies.segment_offset[request + 1] - 1] for request in range(8)}) == 8


def test_what_sessions_are_recorded_to_share_stays_and_no_more():
    """The system prompt of 11,520 tokens, and of two copies of one session no more than that."""
    copies = resample(CODEX, Resample(80, "recorded"), 2)
    by_rows = {}
    for session, rows in rows_of(copies).items():
        by_rows.setdefault(rows, []).append(session)
    twins = next(iter(by_rows.values()))
    assert len(twins) == 2
    common = held(copies, twins[0], 1) & held(copies, twins[1], 1)
    assert common == {(next(iter(common))[0], token) for token in range(11_520)}
    rates = [stats(trace)["ideal_hit_rate"] for trace in (CODEX, copies)]
    assert rates[0] < rates[1] < rates[0] + 0.01, "one first prompt in eighty is new, not one in forty"


def test_an_answer_that_sessions_share_as_a_whole_stays_shared():
    builder = TraceBuilder()
    for session in (0, 1):
        builder.start(0, None, 0, session)
        builder.hold(32, 16, [(0, 32)], 0, 1)
        builder.start(1, 2 * session, 0, session)
        builder.hold(64, 16, [(0, 48), (1 + session, 64)], 1 + session, 1)
    trace = builder.build("answers", "test", 16)
    copies = resample(trace, Resample(2, "recorded"), 1)
    assert [copies.segments(request, 16) for request in range(2)] == [((0, 0, 3),)] * 2
    assert copies.segments(2, 16)[0] == copies.segments(3, 16)[0] == (0, 0, 3)
    assert copies.segments(2, 16)[1] != copies.segments(3, 16)[1]
    alone = resample(trace, Resample(2), 1)
    assert alone.segments(0, 16) != alone.segments(1, 16)


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(0, 99))
def test_any_way_to_share_keeps_the_order_of_what_is_shared_most(copies, seed):
    trace = codex(Codex(sessions=5), seed=2)
    ways = (Resample(copies), Resample(copies, "system", 902), Resample(copies, "recorded"))
    rates = [stats(resample(trace, how, seed))["ideal_hit_rate"] for how in ways]
    assert rates == sorted(rates)
    if copies > 1:
        assert rates[0] < rates[1] < rates[2]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "codex.jsonl"
    assert inside("trace", "generate", "codex", "--sessions", 4, "--out", path).returncode == 0
    return path


def test_the_command_writes_a_trace_that_is_served(recorded, tiny, tmp_path):
    path = tmp_path / "fleet.jsonl.gz"
    chosen = ("--sessions", 6, "--seed", 3, "--shared-prefix", 902, "--start-spread-s", 9)
    result = inside("trace", "resample", recorded, *chosen, "--out", path)
    assert (result.returncode, result.stdout) == (0, ""), result
    expected = resample(load_trace(recorded, use_cache=False), Resample(6, "system", 902, start_spread_s=9.0), 3)
    assert equal(load_trace(path, use_cache=False), expected)
    report = document("trace", "stats", path)
    assert (report["sessions"], report["format"]) == (6, "codex")
    assert report["reported_hit_rate"] > 0.8
    run = document("run", tiny, "--trace", path, "--set", "engine.num_gpu_blocks=20000")
    assert run["requests_completed"] == report["requests"]


PROBE = """
from hashlib import sha256
from kvsim.workload.codex import Codex, generate
from kvsim.workload.native import lines
from kvsim.workload.resample import Resample, resample
for how in (Resample(9), Resample(9, "recorded", start_spread_s=3.0), Resample(9, "system", 700, "independent")):
    print(sha256(b"".join(lines(resample(generate(Codex(sessions=4)), how, 7)))).hexdigest())
"""


def test_one_fleet_under_any_hash_seed():
    assert len(under_hash_seeds(PROBE)) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sessions", 0), "sessions = 0: expected 1 <= sessions"),
        (
            ("--sessions", 2, "--share", "system"),
            "shared_len = 0: expected 1 <= shared_len < 2**32 with share = system",
        ),
        (
            ("--sessions", 2, "--share", "recorded", "--shared-prefix", 5),
            "shared_len = 5: expected 0, or share = system",
        ),
        (("--sessions", 2, "--start-spread-s", "nan"), "start_spread_s = nan: expected 0 <= start_spread_s"),
    ],
)
def test_a_mistake_is_one_line(recorded, tmp_path, options, says):
    assert says in refused("trace", "resample", recorded, "--out", tmp_path / "t", *options)
    assert not (tmp_path / "t").exists()


def test_sessions_that_wait_for_each_other_cannot_be_drawn_alone():
    builder = TraceBuilder()
    for session in (0, 1):
        builder.start(0, 0 if session else None, 0, session)
        builder.hold(8, 1, [(session, 8)], session, 1)
    with pytest.raises(InvalidArgument, match=r"request 1 of crossed.*: expected sessions of which none waits"):
        resample(builder.build("crossed", "test", 8), Resample(2))


@pytest.mark.slow
def test_recorded_claude_code_sessions_make_a_fleet(tmp_path):
    """102 sessions become 204, read back by the reader that checks how streams are entered."""
    folder = shared_data("claude_code")
    recorded = stats(load_trace(folder))
    path = tmp_path / "fleet.jsonl.gz"
    result = inside("trace", "resample", folder, "--sessions", 204, "--shared-prefix", 12_000, "--out", path)
    assert (result.returncode, result.stdout) == (0, ""), result
    fleet = stats(load_trace(path, use_cache=False))
    assert fleet["requests"] == 2 * recorded["requests"]
    for name in ("calls", "input_tokens", "output_tokens", "first_context", "last_context"):
        assert fleet["per_session"][name]["mean"] == pytest.approx(recorded["per_session"][name]["mean"])
    assert recorded["ideal_hit_rate"] < fleet["ideal_hit_rate"] < recorded["ideal_hit_rate"] + 0.01

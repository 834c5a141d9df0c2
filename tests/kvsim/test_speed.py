"""What a run costs, counted in calls of functions: the same on every machine, however busy.

Seconds are in docs/PERFORMANCE.md, from benchmarks/bench_simulator.py; here they only have a bound of twice the goal.
"""

import cProfile
import json
import os
import pstats
import subprocess
from itertools import chain

import pytest

from kvcore.hints import NO_HINTS
from kvsim.pool.store import MooncakePool
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.source import trace_of
from tests.kvsim.command import KVSIM
from tests.support import shared_data

pytestmark = pytest.mark.slow

PUT, EXISTS = MooncakePool.put, MooncakePool.exists
TRAFFIC = {"sessions": 16, "turns": 20, "first_len": 256, "turn_len": 256, "output_len": 64}


def calls_per_request(max_jump=None, **traffic):
    """Of sessions that share a prompt of `common_len` tokens, with a pool that has it."""
    workload = TRAFFIC | {"common_len": 8_192} | traffic
    room = 2 * workload["common_len"] // 16 + 8_192
    scenario = load(
        "pool-16",
        [
            *(f"workload.{name}={value}" for name, value in workload.items()),
            f"engine.num_gpu_blocks={room}",
            f"engine.max_num_batched_tokens={max(8_192, workload['common_len'])}",
            "pool.segment_bytes_per_instance=1e12",
            "pool.lookup_deadline_ms=10_000",
        ],
    )
    trace = trace_of(scenario)
    running = simulation(scenario, trace, max_jump)
    profile = cProfile.Profile()
    profile.runcall(running.run)
    return pstats.Stats(profile).total_calls / trace.num_requests


def is_flat(costs):
    return max(costs) <= 1.1 * min(costs)


def blockwise_put(pool, group, segments, runs, now_ns, hints=NO_HINTS, writer=None):
    """The wrong put: one block after the other."""
    blocks = [(block, block + 1) for start, end in runs for block in range(start, end)]
    return tuple(chain.from_iterable(PUT(pool, group, segments, (run,), now_ns, hints, writer) for run in blocks))


def test_work_is_flat_in_context_length(monkeypatch):
    assert is_flat([calls_per_request(common_len=length) for length in (8_192, 131_072, 2_097_152)])
    monkeypatch.setattr(MooncakePool, "put", blockwise_put)
    assert not is_flat([calls_per_request(common_len=length) for length in (8_192, 131_072)])


def test_work_is_flat_in_the_length_of_answers():
    assert is_flat([calls_per_request(output_len=length) for length in (64, 1_024)])
    assert not is_flat([calls_per_request(output_len=length, max_jump=1) for length in (16, 64)])


def test_work_is_linear_in_requests(monkeypatch):
    turns = (10, 20, 40)
    assert is_flat([calls_per_request(turns=num_turns) for num_turns in turns])
    asked_before = []

    def exists_among_all(pool, *question):
        """The wrong lookup: it walks through all that was ever asked."""
        asked_before.append(question)
        for before in asked_before:
            len(before)
        return EXISTS(pool, *question)

    monkeypatch.setattr(MooncakePool, "exists", exists_among_all)
    assert not is_flat([calls_per_request(turns=num_turns) for num_turns in turns])


def test_a_request_costs_no_more_calls_than_it_did():
    # 1,142 on 2026-11-30 with Python 3.11. Who makes it dearer knows why, and says so here and in docs/PERFORMANCE.md.
    assert calls_per_request() < 1_250


def requests_and_cpu_s(trace, *settings):
    """Of a whole command, whose memory stays below its goal of a gigabyte."""
    command = [KVSIM, "run", "pool-16", "--trace", str(trace), "--json", "--no-cache", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        result = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_maxrss * 1024 < 10**9
    return result["requests_completed"] + result["requests_rejected"], usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("name", "requests_per_s"), [("mooncake_conversation_trace.jsonl.gz", 2_000), ("claude_code", 500)]
)
def test_a_whole_command_keeps_half_of_its_goal_on_any_machine_and_a_gigabyte(name, requests_per_s):
    num_requests, cpu_s = requests_and_cpu_s(shared_data(name))
    assert num_requests / cpu_s > requests_per_s / 2


def test_610_codex_sessions_on_12_instances_take_less_than_twice_their_30_s(tmp_path):
    sessions = tmp_path / "codex.jsonl.gz"
    subprocess.run([KVSIM, "trace", "generate", "codex", "--sessions", "610", "--out", sessions], check=True)
    num_requests, cpu_s = requests_and_cpu_s(sessions, "--set", "cluster.instances=12")
    assert num_requests == 20_227
    assert cpu_s < 2 * 30

"""How fast `kvsim run` is: whole commands on one core, and how their work grows with requests and with context.

    python benchmarks/bench_simulator.py --data FOLDER [--rounds N] [--quick]

FOLDER holds mooncake_conversation_trace.jsonl.gz and claude_code. Three parts, each a table:

- commands: `kvsim run ... --json --no-cache` as a process on one core, from its start to its end, reading the trace
  included. Processor time is user and system time of the process, the least of the rounds: other programs can only
  add to it. The goals are those of docs/PERFORMANCE.md.
- requests: the same kind of traffic, twice and four times as much of it;
- context: the same number of requests and of new tokens, behind a prompt of 8 thousand to 2 million tokens.

The last two count what cannot differ from run to run: calls of functions (as cProfile counts them), alarms of the
clock, steps of engines. Requests per second are what was asked for over processor time, rejected requests included.
"""

import argparse
import cProfile
import gzip
import json
import os
import pstats
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import process_time

from kvsim.run import Simulation, simulation
from kvsim.scenario import Scenario, load
from kvsim.workload.load import load_trace
from kvsim.workload.source import trace_of
from kvsim.workload.trace import Trace

KVSIM = str(Path(sys.executable).parent / "kvsim")
MIB = 1 << 20

CODEX_12 = """
[scenario]
name = "codex-12"
description = "610 sessions of Codex on SWE-bench Pro on 12 instances with a shared pool"

[model]
name = "llama-3.1-8b"

[device]
name = "h100-sxm"

[cluster]
instances = 12

[pool]
segment_bytes_per_instance = 256e9

[link]

[workload]
generator = "codex"
sessions = 610
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A run that has a goal: so many requests a second, or so many seconds in all."""

    name: str
    arguments: tuple[str, ...]
    goal_requests_per_s: float | None = None
    goal_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process took."""

    cpu_s: float
    wall_s: float
    peak_bytes: int
    requests: int
    digest: str


@dataclass(frozen=True, slots=True)
class Work:
    """What one run did, counted."""

    requests: int
    calls: int
    alarms: int
    steps: int
    cpu_s: float


def commands(data: Path, codex: Path) -> list[Command]:
    """Everything that is measured as a whole."""
    conversation, claude_code = str(data / "mooncake_conversation_trace.jsonl.gz"), str(data / "claude_code")
    return [
        Command("conversation, pool-16", ("pool-16", "--trace", conversation), goal_requests_per_s=2_000),
        Command("conversation, nopool-16", ("nopool-16", "--trace", conversation)),
        Command("Claude Code, pool-16", ("pool-16", "--trace", claude_code), goal_requests_per_s=500),
        Command("Codex 610, 12 instances", (str(codex),), goal_s=30),
        Command("blog's scaling, 100 x 30 turns, pool-16", ("pool-16",)),
    ]


def peers_commands(data: Path, folder: Path) -> list[Command]:
    """Traffic that other simulators were measured with."""
    first = folder / "first_1000.jsonl"
    with gzip.open(data / "mooncake_conversation_trace.jsonl.gz", "rt") as lines:
        first.write_text("".join(islice(lines, 1_000)))
    twelve = ("pool-16", "--set", "cluster.instances=12", "--set")
    return [
        Command("first 1,000 requests of the conversation, pool-16", ("pool-16", "--trace", str(first))),
        Command("blog's scaling, 5 x 30 turns, 12 instances", (*twelve, "workload.sessions=5")),
        Command("blog's scaling, 75 x 30 turns, 12 instances", (*twelve, "workload.sessions=75")),
    ]


def measured(command: Command) -> Cost:
    """The whole command, on the first core this process may use."""
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [KVSIM, "run", *command.arguments, "--json", "--no-cache"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stdout is not None
    result = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    requests = result["requests_completed"] + result["requests_rejected"]
    cpu_s = usage.ru_utime + usage.ru_stime
    return Cost(cpu_s, result["wall_s"], usage.ru_maxrss * 1024, requests, result["digest"])


def best(costs: list[Cost]) -> Cost:
    """The least disturbed round; all rounds have one digest."""
    assert len({cost.digest for cost in costs}) == 1, costs
    return min(costs, key=lambda cost: cost.cpu_s)


def verdict(command: Command, cost: Cost) -> str:
    """The goal, and how many times as good as that it is."""
    if command.goal_requests_per_s is not None:
        times = cost.requests / cost.cpu_s / command.goal_requests_per_s
        return f"{command.goal_requests_per_s:,.0f} requests/s: {times:.2f} times"
    if command.goal_s is not None:
        return f"under {command.goal_s:.0f} s: {command.goal_s / cost.cpu_s:.2f} times"
    return ""


def counted(scenario: Scenario, trace: Trace) -> Work:
    """The run once for its time, and once for its calls."""
    running = simulation(scenario, trace)
    begun_s = process_time()
    running.run()
    cpu_s = process_time() - begun_s
    calls = num_calls(simulation(scenario, trace))
    steps = sum(instance.num_steps for instance in running.instances)
    return Work(trace.num_requests, calls, running.clock.num_events, steps, cpu_s)


def num_calls(running: Simulation) -> int:
    """Calls of functions, Python's and built in, in a run: the same on any machine with this version of Python."""
    profile = cProfile.Profile()
    profile.runcall(running.run)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


def by_requests(data: Path) -> Iterator[tuple[str, Work]]:
    """More of the same: more of one trace, and more turns of as many sessions."""
    conversation = load_trace(data / "mooncake_conversation_trace.jsonl.gz")
    for share in (4, 2, 1):
        part = conversation.head(conversation.num_requests // share)
        yield f"conversation, {part.num_requests:,} requests", counted(load("pool-16"), part)
    for turns in (10, 20, 40):
        scenario = load("pool-16", [f"workload.turns={turns}", "workload.turn_len=512", "workload.output_len=200"])
        yield f"agentic, {turns} turns", counted(scenario, trace_of(scenario))


def by_context() -> Iterator[tuple[str, Work]]:
    """As many new tokens behind ever longer prompts, which the pool has; room for two of them in each instance."""
    for context_len in (8_192, 32_768, 131_072, 524_288, 2_097_152):
        scenario = load(
            "pool-16",
            [
                f"workload.common_len={context_len}",
                f"engine.num_gpu_blocks={2 * context_len // 16 + 8_192}",
                f"engine.max_num_batched_tokens={max(8_192, context_len)}",
                "pool.segment_bytes_per_instance=1e12",
                "pool.lookup_deadline_ms=10_000",
                "workload.sessions=16",
                "workload.turns=20",
                "workload.first_len=256",
                "workload.turn_len=256",
                "workload.output_len=64",
            ],
        )
        yield f"{context_len:,} tokens", counted(scenario, trace_of(scenario))


def show_commands(todo: list[Command], rounds: int) -> None:
    print("| command | requests | processor s | requests/s | peak MiB | goal |\n|---|---|---|---|---|---|")
    for command in todo:
        cost = best([measured(command) for _ in range(rounds)])
        cells = (
            f"{cost.requests:,} | {cost.cpu_s:.2f} | {cost.requests / cost.cpu_s:,.0f} | {cost.peak_bytes / MIB:.0f}"
        )
        print(f"| {command.name} | {cells} | {verdict(command, cost)} |", flush=True)


def show_work(title: str, rows: Iterator[tuple[str, Work]]) -> None:
    print(f"\n| {title} | requests | calls/request | alarms/request | steps | processor ms/request |")
    print("|---|---|---|---|---|---|")
    for name, work in rows:
        per = f"{work.calls / work.requests:,.0f} | {work.alarms / work.requests:.1f} | {work.steps:,}"
        print(f"| {name} | {work.requests:,} | {per} | {1000 * work.cpu_s / work.requests:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the commands only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        codex = Path(folder, "codex-12.toml")
        codex.write_text(CODEX_12)
        todo = [*commands(arguments.data, codex), *peers_commands(arguments.data, Path(folder))]
        show_commands(todo, arguments.rounds)
    if not arguments.quick:
        show_work("requests", by_requests(arguments.data))
        show_work("context", by_context())


if __name__ == "__main__":
    main()

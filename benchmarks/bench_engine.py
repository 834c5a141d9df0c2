"""The fast engine against vLLM's own scheduler in the same virtual time, on the same requests.

    python benchmarks/bench_engine.py mooncake_conversation_trace.jsonl.gz [--requests 300] [--rounds 5]

One instance of Llama-3.1-8B on one H100. Each engine serves the first requests of the trace from an empty cache;
construction is not timed, nor is vLLM's import. The fast engine also runs step by step, to tell what jumping over
decode steps brings. Rounds alternate and the median counts. All logs must be equal, event for event.
"""

import argparse
import os
import statistics
import time
from functools import partial

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from kvsim.reference import reference_simulation
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.load import load_trace

ENGINES = {
    "fast": simulation,
    "fast, step by step": partial(simulation, max_jump=1),
    "vLLM's scheduler": reference_simulation,
}


def timed(engine, scenario, trace):
    """Seconds of the run alone, and the digest of its log."""
    run = engine(scenario, trace)
    start = time.perf_counter()
    run.run()
    return time.perf_counter() - start, run.log.digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    scenario = load("nopool-16", ["cluster.instances=1"])
    trace = load_trace(arguments.trace).head(arguments.requests)
    seconds = {name: [] for name in ENGINES}
    digests = set()
    for _ in range(arguments.rounds):
        for name, engine in ENGINES.items():
            elapsed_s, digest = timed(engine, scenario, trace)
            seconds[name].append(elapsed_s)
            digests.add(digest)
    assert len(digests) == 1, f"the engines differ: {digests}"

    median_s = {name: statistics.median(each) for name, each in seconds.items()}
    slowest_s = max(median_s.values())
    print(f"{trace.num_requests} requests, {int(trace.output_len.sum()):,} tokens generated, log {digests.pop()}")
    for name, each_s in median_s.items():
        print(f"{name:<20}{trace.num_requests / each_s:>9,.0f} requests/s{slowest_s / each_s:>8,.1f} x")


if __name__ == "__main__":
    main()

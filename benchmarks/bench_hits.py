"""`kvsim hits` against KVCache.AI's kvcache-simulator (C++ core): LRU at 15 capacities, each a whole cold command.

    python -m venv .peer && .peer/bin/pip install kvcache-simulator==0.1.3
    python benchmarks/bench_hits.py mooncake_conversation_trace.jsonl.gz --peer .peer/bin/kvcache-simulator

Both commands run alternately, from Python's start to the printed JSON, kvsim without its cache of parsed traces; the
peer's core is compiled before, by a first run that is not counted. The hit tokens of both must be equal.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

CAPACITIES_BLOCKS = (
    250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 40_000, 50_000, 70_000, 90_000, 100_000, 150_000, 182_790,
)  # fmt: skip

# The peer takes GiB: of Llama-3.1-8B in bf16 (131,072 bytes a token) 16 blocks of 512 tokens are exactly one.
PEER_MODEL = "llama-3.1-8b"
BLOCKS_PER_GIB = 16


def kvsim_command(kvsim: str, trace: str) -> list[str]:
    capacities = ",".join(map(str, CAPACITIES_BLOCKS))
    return [kvsim, "hits", trace, "--capacity-blocks", capacities, "--policy", "lru", "--json", "--no-cache"]


def peer_command(peer: str, trace: str) -> list[str]:
    budgets = ",".join(str(blocks / BLOCKS_PER_GIB) for blocks in CAPACITIES_BLOCKS)
    options = ["--model", PEER_MODEL, "--block-size", "512", "--budgets-gib", budgets, "--policies", "lru"]
    return [peer, "run", "--trace", trace, *options, "--format", "json", "--no-progress"]


def kvsim_hits(report: dict) -> dict[int, int]:
    return {point["capacity_blocks"]: point["last_half_hit_tokens"] for point in report["policies"]["lru"]}


def peer_hits(report: dict) -> dict[int, int]:
    return {point["cacheBlocks"]: point["results"]["lru"]["hitTokens"] for point in report["points"]}


def timed(command: list[str]) -> tuple[float, dict]:
    """Seconds from start to exit, and the JSON it printed."""
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--kvsim", default=str(Path(sys.executable).parent / "kvsim"))
    parser.add_argument("--peer", default=shutil.which("kvcache-simulator"))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.peer is None:
        parser.error("kvcache-simulator is not on PATH; see above how to install it, then name it with --peer")

    ours, peers = kvsim_command(arguments.kvsim, arguments.trace), peer_command(arguments.peer, arguments.trace)
    compare(kvsim_hits(timed(ours)[1]), peer_hits(timed(peers)[1]))
    times_s = [(timed(ours)[0], timed(peers)[0]) for _ in range(arguments.rounds)]
    report(times_s)


def compare(ours: dict[int, int], peers: dict[int, int]) -> None:
    """The peer leaves out capacities that are not full when it starts to count; all others must agree."""
    differences = {blocks: (ours[blocks], hit) for blocks, hit in peers.items() if ours[blocks] != hit}
    assert len(peers) >= 10, peers
    assert not differences, differences
    print(f"hit tokens of the last half are equal at {len(peers)} capacities")


def report(times_s: list[tuple[float, float]]) -> None:
    for name, column in zip(("kvsim hits", "kvcache-simulator"), zip(*times_s, strict=True), strict=True):
        print(f"{name:18} median {statistics.median(column):.3f} s, best {min(column):.3f} s of {len(column)}")
    ratios = [peer_s / our_s for our_s, peer_s in times_s]
    spread = f"median of pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"kvcache-simulator takes {statistics.median(ratios):.2f} times as long ({spread})")


if __name__ == "__main__":
    main()

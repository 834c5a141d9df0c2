"""How many tokens of prompts the pool would have served, by its size: replays decision logs in the simulator.

    sweep.py --block 64 --gpu-blocks 20000 --bytes-per-token 70272 --gb 100,200,400,800 decisions.log ...

One line for each size. The logs are of engines that share the pool, recorded at the same time. A pool is simulated by
the tokens that it holds, so that any of kvsim's models will do. Needs `pip install 'kvtwin[sim]'`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROW = "{:>10} {:>11} {:>11} {:>12} {:>16}"
BYTES_PER_TOKEN = 131_072  # of the simulated model, llama-3.1-8b


def merge(paths):
    """The lines of one log with the requests of all, on the clock of the one that began first.

    Ids must mean the same in all: same granule, hashes and record_key.
    """
    logs = [[json.loads(line) for line in complete_lines(path)] for path in paths]
    headers = [log[0] for log in logs]
    for name in ("granule_len", "ids"):
        assert len({header[name] for header in headers}) == 1, f"the logs differ in {name}"
    start_ns = min(header["started_unix_ns"] for header in headers)
    lines = [{**headers[0], "started_unix_ns": start_ns}]
    for header, *rows in logs:
        line_of = {}
        for line, row in enumerate(rows, 2):
            if "prompt_len" not in row:
                continue
            row["arrived_ns"] += header["started_unix_ns"] - start_ns
            if "like" in row:
                row["like"][0] = line_of[row["like"][0]]
            lines.append(row)
            line_of[line] = len(lines)
    return lines


def complete_lines(path):
    """Without half a last line, of a process that was killed or still writes."""
    text = Path(path).read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def simulate(trace, asked, pool_bytes):
    """What kvsim says of a pool of this size."""
    pool_tokens = int(pool_bytes / asked.bytes_per_token)
    settings = {
        "cluster.instances": asked.instances,
        "engine.block_size": asked.block,
        "engine.num_gpu_blocks": asked.gpu_blocks,
        "pool.segment_bytes_per_instance": pool_tokens * BYTES_PER_TOKEN // asked.instances,
        "pool.lease_ttl_ms": asked.lease_ms,
    }
    command = [Path(sys.executable).with_name("kvsim"), "run", "pool-16", "--trace", trace, "--no-cache", "--json"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main():
    """A table, a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("--block", type=int, required=True, help="the engines' --block-size")
    parser.add_argument(
        "--gpu-blocks", type=int, required=True, help="blocks of an engine's own cache, as its log says"
    )
    parser.add_argument("--bytes-per-token", type=int, required=True, help="KV of a token, over all layers and ranks")
    parser.add_argument("--gb", required=True, help="sizes of the whole pool in GB, with commas between them")
    parser.add_argument("--lease-ms", type=int, default=10_000, help="the master's --default_kv_lease_ttl")
    asked = parser.parse_args()
    asked.instances = len(asked.logs)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "decisions.log"
        trace.write_text("".join(json.dumps(line) + "\n" for line in merge(asked.logs)), encoding="utf-8")
        print(ROW.format("pool, GB", "hit in all", "in engines", "in the pool", "objects evicted"))
        for size in asked.gb.split(","):
            result = simulate(trace, asked, float(size) * 1e9)
            shares = (f"{result[f'hit_rate{part}']:.1%}" for part in ("", "_local", "_external"))
            print(ROW.format(size, *shares, f"{result['pool']['evicted']:,}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

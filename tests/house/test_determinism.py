"""A seed names one result: the same digest under any PYTHONHASHSEED, another one for another input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES

KVSIM = Path(sys.executable).parent / "kvsim"
BLOCK_TOKENS = 512  # of the trace's format


@pytest.fixture(autouse=True)
def _command_line_is_here():
    if not (PACKAGES["kvsim"] / "cli.py").exists():
        pytest.skip("kvsim has no command line yet")


def trace(path: Path, num_requests: int) -> Path:
    """A tiny trace in Mooncake's format: sessions that share a system prompt and grow by a block a turn."""
    rows = []
    for i in range(num_requests):
        session, turn = i % 5, i // 5
        hash_ids = [0, 1, *(1000 * (session + 1) + k for k in range(turn + 1))]
        size_tokens = BLOCK_TOKENS * len(hash_ids) - 100
        rows.append({"timestamp": 200 * i, "input_length": size_tokens, "output_length": 20, "hash_ids": hash_ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def digests(scenario: str, trace_path: Path, hash_seed: int) -> tuple[str, str]:
    command = [KVSIM, "run", scenario, "--trace", trace_path, "--set", "cluster.instances=2", "--seed", "7", "--json"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "XDG_CACHE_HOME": str(trace_path.parent / "cache")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["invariants"] == "ok"
    return report["digest"], report["decisions_digest"]


@pytest.mark.parametrize("scenario", ["pool-16", "nopool-16"])
def test_one_digest_under_any_hash_seed(scenario, tmp_path):
    path = trace(tmp_path / "trace.jsonl", num_requests=30)
    assert digests(scenario, path, hash_seed=1) == digests(scenario, path, hash_seed=4242)


def test_another_trace_gives_another_digest(tmp_path):
    first = digests("pool-16", trace(tmp_path / "a.jsonl", num_requests=30), hash_seed=1)
    second = digests("pool-16", trace(tmp_path / "b.jsonl", num_requests=29), hash_seed=1)
    assert first[0] != second[0]
    assert first[1] != second[1]

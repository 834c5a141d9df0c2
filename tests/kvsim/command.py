"""Running the command line: in a process of its own, or in this one for what differs in the arguments only."""

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from kvsim.cli import app
from tests.support import PROJECT

KVSIM = str(Path(sys.executable).parent / "kvsim")

TINY = """
[scenario]
name = "tiny"
description = "as small as it gets"

[model]
name = "llama-3.1-8b"

[device]
name = "h100-sxm"

[cluster]
instances = 2

[engine]
num_gpu_blocks = 100

[workload]
generator = "agentic"
sessions = 3
turns = 3
common_len = 64
first_len = 100
turn_len = 50
output_len = 10
start_spread_s = 1.0
"""


def mooncake(path, requests):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in requests))
    return path


def kvsim(*arguments, cwd=None, **environment):
    """Run the command in a process of its own; the parsed traces that it keeps go nowhere."""
    return subprocess.run(
        [KVSIM, *map(str, arguments)],
        env={**os.environ, "XDG_CACHE_HOME": os.devnull, **environment},
        cwd=cwd,
        capture_output=True,
        timeout=60,
        encoding="utf-8",
        errors="surrogateescape",
    )


def inside(*arguments):
    """The same without a process, for what differs in the arguments only."""
    result = CliRunner(env={"XDG_CACHE_HOME": os.devnull}).invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def document(*arguments, run=inside, **environment):
    """What a successful command prints with --json: one document on standard output, nothing on the other."""
    result = run(*arguments, "--json", **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def refused(*arguments, run=inside, **environment):
    """The one line of a command that ends for a mistake of the caller's."""
    result = run(*arguments, **environment)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert len(result.stderr.splitlines()) == 1 and result.stderr.endswith("\n"), result.stderr
    assert result.stderr.removesuffix("\n").isprintable()
    return result.stderr.removesuffix("\n")


def under_hash_seeds(program):
    """What the Python program prints, in a process for each of two seeds of Python's own hashes: one output or two."""
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    }

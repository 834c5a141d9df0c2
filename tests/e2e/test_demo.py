"""`make demo-connector` runs, shows the pool's effect, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from connector.testbed import demo
from tests.support import PROJECT

COMMAND = [sys.executable, "-m", "connector.testbed.demo"]
FIRST = demo.Turn("A", 0, 0, 2_048, 0.5, [7, 8])
SECOND = demo.Turn("B", 0, 2_048, 288, 0.1, [9])
CONTROL = [FIRST, replace(SECOND, pool_len=0, computed_len=2_336, ttft_s=0.6)]

# Turn, engine, prompt, local, from the pool, computed: what the other engine computed since is in the pool.
ROWS = [
    "1 A 2,048 0 0 2,048",
    "2 B 2,336 0 2,048 288",
    "3 A 2,624 2,048 288 288",
    "4 B 2,912 2,336 288 288",
    "5 A 3,200 2,624 288 288",
    "6 B 3,488 2,912 288 288",
    "7 A 3,776 3,200 288 288",
    "8 B 4,064 3,488 288 288",
]


def alone(folder):
    """The environment of a run that can be told by its folder for temporary files."""
    return {**os.environ, "TMPDIR": str(folder)}


def left_behind(folder):
    """Process ids whose environment names the folder, and what is in it but PyTorch's cache."""
    time.sleep(0.5)
    marker, found = f"TMPDIR={folder}".encode(), []  # of an engine: a folder in it
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [environ.parent.name] if marker in environ.read_bytes() else []
        except OSError:
            continue  # gone, or not ours
    return found + [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]


@pytest.mark.engine
@pytest.mark.store
@pytest.mark.slow
def test_it_runs(tmp_path):
    ran = subprocess.run(COMMAND, cwd=PROJECT, env=alone(tmp_path), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3_000:]
    rows = [line.split() for line in ran.stdout.splitlines() if line.strip()[:1].isdigit() and "equal" in line]
    assert [row[:6] for row in rows] == [row.split() for row in ROWS]
    assert all(row[-1] == "equal" for row in rows)
    assert left_behind(tmp_path) == []


@pytest.mark.engine
@pytest.mark.store
@pytest.mark.slow
def test_nothing_is_left_when_it_is_ended(tmp_path):
    running = subprocess.Popen(COMMAND, cwd=PROJECT, env=alone(tmp_path), stderr=subprocess.PIPE, text=True)
    while "starting vLLM" not in (line := running.stderr.readline()):
        assert line, "it has ended by itself"
    assert left_behind(tmp_path) != []
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 1
    running.stderr.close()
    assert left_behind(tmp_path) == []


def test_it_says_when_the_machine_lacks_something(monkeypatch, capsys):
    monkeypatch.setattr(demo, "missing", lambda need: "vLLM is not installed" if need == "engine" else None)
    assert demo.main() == 2
    assert "cannot run the connector's demo: vLLM is not installed." in capsys.readouterr().err


def test_a_wrong_answer_and_a_useless_pool_are_failures():
    assert demo.verdict([FIRST, SECOND], CONTROL) is None
    assert "differs" in demo.verdict([FIRST, replace(SECOND, answer=[8])], CONTROL)
    assert "nothing" in demo.verdict([FIRST, CONTROL[1]], CONTROL)

"""The rooms of the house are fixed: what is new goes into one of them."""

import subprocess

from tests.support import PROJECT

ROOMS = {".ci", "benchmarks", "connector", "docs", "kvcore", "kvsim", "models", "notebooks", "tests"}
FILES = {".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"}


def strangers(paths):
    """Top-level names of the paths that are neither a room nor a known file."""
    return sorted({path.split("/")[0] for path in paths} - ROOMS - FILES)


def test_nothing_new_stands_at_the_top():
    tracked = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert strangers(tracked.split()) == [], "move it into a room, for example below connector/ or tests/"


def test_a_new_room_is_noticed():
    assert strangers(["kvcore/runs.py", "README.md", "scratch/x.py", "setup.py"]) == ["scratch", "setup.py"]

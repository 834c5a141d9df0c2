"""A scenario and a trace that take no time."""

import pytest

from tests.kvsim.command import TINY, mooncake


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def trace(tmp_path):
    return mooncake(tmp_path / "trace.jsonl", [(0, 600, 5, [1, 2]), (100, 1100, 5, [1, 2, 3])])

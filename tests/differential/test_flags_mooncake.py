"""Parameters of the simulated pool have the defaults of the real master's flags, by the table in docs/POOL.md."""

import json
import re
import subprocess

import pytest

from connector.testbed.processes import mooncake_binary
from kvsim.config.pool import PoolConfig
from tests.support import PROJECT

ROW = re.compile(r"^\| `(\w+)` \| `--(\w+)`", re.MULTILINE)
FLAG = re.compile(r"^    -(\w+) \(.*?\)\s+type: \w+\s+default: (\S+)$", re.MULTILINE | re.DOTALL)
IN_MS = {"lease_ttl_ms": 1, "session_ttl_s": 1_000}
"""Parameters whose flag is a text in milliseconds, and how many of these one of theirs is."""


def flags_of_parameters():
    """The master's flag of each parameter that has one."""
    return dict(ROW.findall((PROJECT / "docs" / "POOL.md").read_text()))


def defaults_of_flags():
    """As the installed master prints them, in a syntax that is JSON's."""
    told = subprocess.run([mooncake_binary("mooncake_master"), "--help"], capture_output=True, text=True, check=False)
    return {name: json.loads(default) for name, default in FLAG.findall(told.stdout)}


def differences(changed):
    """Parameters whose default, if some were changed, is not that of their flag."""
    told, flags = defaults_of_flags(), flags_of_parameters()
    ours = {name: PoolConfig.model_fields[name].default for name in flags} | changed
    written = {name: str(value * IN_MS[name]) if name in IN_MS else value for name, value in ours.items()}
    return [name for name, flag in flags.items() if written[name] != told[flag]]


@pytest.mark.store
def test_every_default_is_the_master_s():
    assert len(flags_of_parameters()) == 13
    assert differences({}) == []


@pytest.mark.store
@pytest.mark.parametrize(
    "wrong", [{"lease_ttl_ms": 5_000}, {"eviction_ratio": 0.1}, {"allocation_strategy": "local_first"}]
)
def test_another_default_is_found(wrong):
    assert differences(wrong) == list(wrong)

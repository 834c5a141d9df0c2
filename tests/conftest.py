"""Profiles, the environment of every run, and what is skipped where something is missing. Nothing heavier."""

import os

import pytest
from hypothesis import HealthCheck, settings

from connector.testbed.needs import missing

settings.register_profile("fast", max_examples=50, deadline=None)
settings.register_profile(
    "ci", max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fast")

# Children inherit it. Nothing leaves the machine: no model hub, no usage report, loopback only.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    MOONCAKE_REQUESTER_LOCAL_HOSTNAME="127.0.0.1",
    MC_TCP_BIND_ADDRESS="127.0.0.1",
    OMP_NUM_THREADS="1",
    PYTHONHASHSEED="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def pytest_runtest_setup(item):
    for marker in ("engine", "store"):
        reason = missing(marker) if item.get_closest_marker(marker) else None
        if reason and os.environ.get("KVTWIN_REQUIRE_ENGINE"):
            pytest.fail(f"{reason}, and KVTWIN_REQUIRE_ENGINE is set", pytrace=False)
        if reason:
            pytest.skip(reason)

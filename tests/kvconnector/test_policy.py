"""What the settings make of the decisions' policy, and of vLLM's own setting for failed loads."""

from types import SimpleNamespace

import pytest
from kvconnector.config import LoadFailure, read_config

from kvcore.admission import AdmitAll, AdmitNone
from kvcore.errors import InvalidArgument

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("kv_role", "max_load_attempts", "admission"),
    [("kv_both", 1, AdmitAll()), ("kv_producer", 0, AdmitAll()), ("kv_consumer", 1, AdmitNone())],
)
def test_a_role_is_a_policy(kv_role, max_load_attempts, admission):
    from kvconnector.connector import _policy

    policy = _policy(read_config({"master_server_address": "10.0.0.1:50051"}, kv_role, {}), 1_000)
    assert (policy.max_load_attempts, policy.admission) == (max_load_attempts, admission)
    assert policy.max_storing_blocks == 250


@pytest.mark.parametrize(
    ("in_vllm", "ours", "becomes"),
    [
        ("fail", LoadFailure.RECOMPUTE, "recompute"),
        ("recompute", LoadFailure.RECOMPUTE, "recompute"),
        ("fail", LoadFailure.FAIL, "fail"),
    ],
)
def test_vllm_s_setting_becomes_ours(in_vllm, ours, becomes):
    from kvconnector.connector import _set_load_failure_policy

    transfer = SimpleNamespace(kv_load_failure_policy=in_vllm)
    _set_load_failure_policy(transfer, ours)
    _set_load_failure_policy(transfer, ours)  # the engine builds a connector for each half
    assert transfer.kv_load_failure_policy == becomes


def test_a_conflict_that_can_be_seen_is_an_error_that_names_both():
    from kvconnector.connector import _set_load_failure_policy

    with pytest.raises(InvalidArgument, match=r"on_load_failure.*kv_load_failure_policy"):
        _set_load_failure_policy(SimpleNamespace(kv_load_failure_policy="recompute"), LoadFailure.FAIL)

"""What the settings make of the decisions' planner and policy, and of vLLM's own setting for failed loads."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from kvconnector.config import ConnectorConfig, LoadFailure, read_config
from kvconnector.policies import AdmissionKind, LoadingKind, Policies
from kvconnector.pool_config import PoolConfig
from kvconnector.pool_policy import make_planner, make_policy

from kvcore.admission import AdmitAll, AdmitCheaper, AdmitNone, AdmitSecondTouch
from kvcore.costs import Costs, PrefillCurve
from kvcore.errors import InvalidArgument
from kvcore.loading import LoadAlways, LoadCheaper, LoadInTime
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from kvcore.units import NS_PER_MS
from kvsim.config import links as link_config
from kvsim.config import pool as pool_config
from kvsim.scenario import load

WINDOWED = ModelSpec((FullAttention(16), SlidingWindow(8, 32)))
BLOCK_BYTES = (4_000, 1_000)
RATES = {"prefill_ns_per_token": 50_000, "bandwidth_bytes_per_s": 10**9}


def policy_of(extra, kv_role="kv_both", model=WINDOWED, block_bytes=BLOCK_BYTES):
    config = read_config({"master_server_address": "10.0.0.1:50051", **extra}, kv_role, {})
    return make_policy(config, make_planner(config, model), 1_000, block_bytes)


@pytest.mark.parametrize(
    ("kv_role", "max_load_attempts", "admission"),
    [("kv_both", 1, AdmitAll()), ("kv_producer", 0, AdmitAll()), ("kv_consumer", 1, AdmitNone())],
)
def test_a_role_is_a_policy(kv_role, max_load_attempts, admission):
    policy = policy_of({}, kv_role)
    assert (policy.max_load_attempts, policy.admission) == (max_load_attempts, admission)
    assert policy.max_storing_blocks == 250
    assert policy.loading == LoadAlways()


def test_policies_have_the_names_that_they_have_in_a_scenario():
    names = {field.name for field in fields(Policies)} - {"rates"}
    assert names <= set(pool_config.PoolConfig.model_fields)
    assert {"bandwidth_bytes_per_s", "latency_us"} <= set(link_config.LinkConfig.model_fields)
    assert tuple(kind.value for kind in AdmissionKind) == pool_config.ADMISSIONS
    assert tuple(kind.value for kind in LoadingKind) == pool_config.LOADINGS


def test_what_a_user_chooses_is_what_decides():
    costs = Costs(PrefillCurve(50_000), (4_000, 1_000))
    planner = make_planner(ConnectorConfig(PoolConfig("h:1")), WINDOWED)
    assert policy_of({"admission": "second_touch"}).admission == AdmitSecondTouch()
    assert policy_of({"admission": "cheaper", **RATES}).admission == AdmitCheaper(planner, costs)
    assert policy_of({"loading": "cheaper", **RATES}).loading == LoadCheaper(costs)
    in_time = {"loading": "in_time", "load_budget_ms": 30, **RATES}
    assert policy_of(in_time).loading == LoadInTime(costs, 30 * NS_PER_MS)
    assert policy_of({"admission": "cheaper", **RATES}, "kv_consumer").admission == AdmitNone()


def test_rates_are_what_computing_and_fetching_cost():
    extra = {"loading": "cheaper", **RATES, "prefill_ps_per_pair": 2_000, "latency_us": 300}
    costs = policy_of(extra).loading.costs
    assert costs.prefill_ns(0, 3) == 3 * 50_000 + 3 * 2  # pairs: 0 + 1 + 2
    assert costs.fetch_ns((((0, 2),), ((5, 6),))) == 300_000 + 2 * 4_000 + 1_000
    assert policy_of({**extra, "bandwidth_bytes_per_s": 3}).loading.costs.block_ns == (
        1_333_333_333_334,
        333_333_333_334,
    )


def test_a_tail_costs_its_whole_block():
    model = ModelSpec((FullAttention(16), Recurrent(16)), hash_unit=4, hit_unit=4)
    assert model.splits_blocks
    costs = policy_of({"loading": "cheaper", **RATES}, model=model).loading.costs
    assert len(costs.block_ns) == len(model.kinds) > 2
    assert costs.block_ns == tuple(BLOCK_BYTES[kind.group] for kind in model.kinds)


def test_one_block_that_is_cheaper_to_compute_is_not_loaded():
    """A next turn whose block in the pool ends a few tokens after what the engine holds itself."""
    loading = policy_of({"loading": "cheaper", **RATES, "latency_us": 2_000}).loading
    assert not loading.worth(64, 80, (((4, 5),), ((7, 10),)), 0)
    assert loading.worth(64, 640, (((4, 40),), ((7, 10),)), 0)
    assert policy_of({}).loading.worth(64, 80, (((4, 5),), ((7, 10),)), 0)


@pytest.mark.parametrize(
    ("written", "retention"),
    [("all", None), (None, None), (0, 0), (64, 64), ([None, 64], (None, 64)), (["all", 0], (None, 0))],
)
def test_a_retention_interval_thins_out_what_windows_store(written, retention):
    config = read_config({"master_server_address": "h:1", "retention_interval": written}, "kv_both", {})
    planner = make_planner(config, WINDOWED)
    assert planner.retention == retention
    kept = planner.store(0, 256, 250)
    assert kept[0] == ((0, 16),)
    assert (kept[1] == ((0, 32),)) == (retention is None)


@pytest.mark.parametrize("written", [-1, "none", 1.5, True, [64, "x"]])
def test_a_retention_interval_that_is_none_is_refused(written):
    with pytest.raises(InvalidArgument, match=r"retention_interval.*a list with one of these for each KV cache group"):
        policy_of({"retention_interval": written})


@pytest.mark.parametrize(("written", "message"), [(30, "multiple of 16"), ([64], "one interval for each")])
def test_a_retention_interval_that_does_not_fit_the_model_is_refused(written, message):
    with pytest.raises(InvalidArgument, match=message):
        policy_of({"retention_interval": written})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"admission": "some"}, "admission.*one of all, second_touch, cheaper"),
        ({"loading": "never"}, "loading.*one of always, cheaper, in_time"),
        ({"loading": "in_time", **RATES}, "load_budget_ms = None.*with loading"),
        ({"loading": "cheaper", **RATES, "load_budget_ms": 5}, "load_budget_ms = 5"),
        ({"loading": "cheaper"}, 'prefill_ns_per_token.*bandwidth_bytes_per_s.*loading "cheaper"'),
        ({"admission": "cheaper", "prefill_ns_per_token": 9}, 'bandwidth_bytes_per_s.*admission "cheaper"'),
        ({"loading": "cheaper", **RATES, "prefill_ns_per_token": 0}, "prefill_ns_per_token = 0"),
        ({"latency_us": 5}, 'latency_us.*nothing but with "cheaper"'),
        (RATES, 'prefill_ns_per_token.*nothing but with "cheaper"'),
        ({"loading": "cheaper", **RATES, "bandwidth_bytes_per_s": 1.5}, "bandwidth_bytes_per_s = 1.5"),
        ({"loading": "cheaper", **RATES, "bandwidth_bytes_per_s": None}, "bandwidth_bytes_per_s = None"),
        ({"latency_us": -1}, "latency_us = -1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_the_fix(extra, message):
    with pytest.raises(InvalidArgument, match=message):
        policy_of(extra)


def test_patience_is_the_simulator_s_unless_the_user_says_otherwise():
    from kvsim.pool.policy import make_policy as simulated

    scenario = load("pool-16", [])
    theirs = simulated(scenario, scenario.pool)
    ours = policy_of({})
    assert replace(theirs, max_storing_blocks=None) == replace(ours, max_storing_blocks=None)


@pytest.mark.parametrize(
    ("in_vllm", "ours", "becomes"),
    [
        ("fail", LoadFailure.RECOMPUTE, "recompute"),
        ("recompute", LoadFailure.RECOMPUTE, "recompute"),
        ("fail", LoadFailure.FAIL, "fail"),
    ],
)
@pytest.mark.engine
def test_vllm_s_setting_becomes_ours(in_vllm, ours, becomes):
    from kvconnector.connector import _set_load_failure_policy

    transfer = SimpleNamespace(kv_load_failure_policy=in_vllm)
    _set_load_failure_policy(transfer, ours)
    _set_load_failure_policy(transfer, ours)  # the engine builds a connector for each half
    assert transfer.kv_load_failure_policy == becomes


@pytest.mark.engine
def test_a_conflict_that_can_be_seen_is_an_error_that_names_both():
    from kvconnector.connector import _set_load_failure_policy

    with pytest.raises(InvalidArgument, match=r"on_load_failure.*kv_load_failure_policy"):
        _set_load_failure_policy(SimpleNamespace(kv_load_failure_policy="recompute"), LoadFailure.FAIL)

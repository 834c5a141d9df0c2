"""Both drivers' words for the same events give the same plans: the simulator's, and any interleaving whatever."""

from copy import deepcopy

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from kvconnector.config import read_config
from kvconnector.pool_policy import make_costs, make_planner, make_policy

import kvsim.pool.policy
import kvsim.run
from kvcore.memory import Experience
from kvsim.run import simulation
from tests.kvcore.pool_world import World
from tests.kvcore.test_access import Switched
from tests.kvcore.test_request_stateful import Interleavings
from tests.kvsim.small_runs import ASKS, ENGINES, Ask, engine, scenario_of, trace_of
from tests.seam.mirror import Half, Mirror

pytestmark = pytest.mark.engine

SEARCH = settings(
    max_examples=100, stateful_step_count=50, phases=[Phase.generate], database=None, derandomize=True,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(engine=ENGINES, asks=ASKS)
def test_the_simulator_and_the_connector_make_the_same_plans(engine, asks):
    run_mirrored(scenario_of(engine, "pool-16"), asks)


def run_mirrored(scenario, asks, half_type=Half):
    """Run the asks; each request of the simulator has a connector's scheduler half beside it."""
    made, twins = [], {}
    mirror = type("EngineMirror", (Mirror,), {"half_type": half_type})

    def mirrored(planner, policy, num_prompt_tokens, experience, names_of, *hints):
        def content(length):
            end = length // scenario.engine.block_size
            return end, *names_of(0, (end - 1, end))

        twin = twins.setdefault(id(experience), Experience())
        learning = (experience, names_of, *hints)
        made.append(mirror(planner, policy, num_prompt_tokens, *learning, content=content, twin=twin))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvsim.run, "KVRequest", mirrored)
        simulation(scenario, trace_of(asks)).run()
    assert all(machine.half.closed for machine in made), "both drivers have reported every plan"


# -- from the settings of each ----------------------------------------------------------------------------------------

RATES = {
    "prefill_ns_per_token": 131_000,
    "prefill_ps_per_pair": 90_000,
    "bandwidth_bytes_per_s": 10**9,
    "latency_us": 500,
}
"""A pool from which a short prefix takes longer than to compute it, and a long one does not."""

SETTINGS = [
    {"admission": "second_touch", "max_storing_share": 0.1},
    {"admission": "cheaper", "loading": "cheaper", "retention_interval": 0, **RATES},
    {"admission": "second_touch", "loading": "cheaper", "offer_ttl_ms": 50, **RATES},
    {"loading": "in_time", "load_budget_ms": 1, "lookup_deadline_ms": 1, **RATES},
]


def run_configured(given_settings, engine, asks, connector_settings=None):
    """The simulator has its planner and policy from a scenario, the connector from its own settings of the same names.

    What a prefill takes they know from elsewhere, a roofline and a measured rate: here both have the latter.
    """
    chosen = {key: value for key, value in given_settings.items() if key not in RATES}
    scenario = scenario_of(engine | {f"pool.{key}": value for key, value in chosen.items()}, "pool-16")
    config = read_config({"master_server_address": "h:1", **(connector_settings or given_settings)}, "kv_both", {})
    model, block_bytes = scenario.kv_model, scenario.block_bytes
    planner = make_planner(config, model)
    policy = make_policy(config, planner, scenario.num_gpu_blocks, block_bytes)
    half_type = type("Configured", (Half,), {"deciders": lambda self, machine: (planner, policy)})
    costs = make_costs(config.policies.rates, model, block_bytes) if config.policies.rates else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvsim.pool.policy, "make_costs", lambda scenario: costs)
        run_mirrored(scenario, asks, half_type)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(chosen=st.sampled_from(SETTINGS), engine=ENGINES, asks=ASKS)
def test_the_same_settings_make_the_same_plans_in_both(chosen, engine, asks):
    run_configured(chosen, engine, asks)


@pytest.mark.parametrize(
    ("chosen", "instead"),
    [
        (SETTINGS[0], {"max_storing_share": 0.1}),
        (SETTINGS[1], {**SETTINGS[1], "loading": "always"}),
        (SETTINGS[2], {**SETTINGS[2], "admission": "all"}),
        (SETTINGS[3], {**SETTINGS[3], "load_budget_ms": 10_000}),
    ],
)
def test_control_a_connector_with_another_setting_makes_other_plans(chosen, instead):
    engine_settings = engine(2, 16, 300, 1_024, 8_192, 0.0)
    fork = Ask("fork", of=0, cut=64, new_len=100, output_len=2, gap_us=400_000)
    with pytest.raises(AssertionError):
        run_configured(chosen, engine_settings, [Ask(new_len=160, output_len=2), fork, fork, fork], instead)


class MirroredWorld(World):
    """Every request is mirrored; a connector per engine learns what the engine learns."""

    mirror = Mirror

    def arrive(self, lineage, num_prompt, final, engine=0):
        live = super().arrive(lineage, num_prompt, final, engine)
        twin = vars(live.engine).setdefault("twin", deepcopy(live.engine.experience))
        learning = (live.engine.experience, live.names)
        content = lineage.__getitem__
        live.machine = self.mirror(
            self.planner, self.policy, num_prompt, *learning, content=lambda n: content(slice(n)), twin=twin
        )
        live.machine.half.scheduler.access = lambda: self.access
        self.allow(live)
        return live


@pytest.mark.parametrize("rules", [Interleavings, Switched])
def test_any_interleaving_gives_the_connector_the_same_plans(rules):
    run_state_machine_as_test(type("Mirrored", (rules,), {"world_type": MirroredWorld}), settings=SEARCH)


# -- controls ---------------------------------------------------------------------------------------------------------


class OneRankIsEnough(Half):
    """Takes a block for present when one of its shards is."""

    def round(self, ticket, question, present):
        super().round(ticket, question, question)


class AsksOnce(Half):
    """Ends a dialogue after its first round."""

    def round(self, ticket, question, present):
        if self.dialogues[ticket][1].dialogue.rounds == 0:
            super().round(ticket, question, present)


class ForgetsFailures(Half):
    """Reports every job as done."""

    def end_job(self, ticket, failed):
        super().end_job(ticket, ((),) * len(failed))


class NeverResets(Half):
    """Goes on under the old names."""

    def reset(self):
        pass


class NeverSwitches(Half):
    """Its access is what it was at the start."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scheduler._heed_access = lambda: None


def test_a_driver_that_does_not_heed_the_switch_is_found():
    broken = type("BrokenMirror", (Mirror,), {"half_type": NeverSwitches})
    world = type("BrokenWorld", (MirroredWorld,), {"mirror": broken})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(type("Broken", (Switched,), {"world_type": world}), settings=SEARCH)


@pytest.mark.parametrize("half", [OneRankIsEnough, AsksOnce, ForgetsFailures, NeverResets])
def test_a_driver_that_tells_something_else_is_found(half):
    broken = type("BrokenMirror", (Mirror,), {"half_type": half})
    world = type("BrokenWorld", (MirroredWorld,), {"mirror": broken})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(type("Broken", (Interleavings,), {"world_type": world}), settings=SEARCH)

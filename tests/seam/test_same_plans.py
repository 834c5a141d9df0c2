"""Both drivers' words for the same events give the same plans: the simulator's, and any interleaving whatever."""

from copy import deepcopy

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

import kvsim.run
from kvcore.memory import Experience
from kvsim.run import simulation
from tests.kvcore.pool_world import World
from tests.kvcore.test_access import Switched
from tests.kvcore.test_request_stateful import Interleavings
from tests.kvsim.small_runs import ASKS, ENGINES, scenario_of, trace_of
from tests.seam.mirror import Half, Mirror

pytestmark = pytest.mark.engine

SEARCH = settings(
    max_examples=100, stateful_step_count=50, phases=[Phase.generate], database=None, derandomize=True,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(engine=ENGINES, asks=ASKS)
def test_the_simulator_and_the_connector_make_the_same_plans(engine, asks):
    made, twins, scenario = [], {}, scenario_of(engine, "pool-16")

    def mirrored(planner, policy, num_prompt_tokens, experience, names_of, *hints):
        def content(length):
            end = length // scenario.engine.block_size
            return end, *names_of(0, (end - 1, end))

        twin = twins.setdefault(id(experience), Experience())
        learning = (experience, names_of, *hints)
        made.append(Mirror(planner, policy, num_prompt_tokens, *learning, content=content, twin=twin))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvsim.run, "KVRequest", mirrored)
        simulation(scenario, trace_of(asks)).run()
    assert all(machine.half.closed for machine in made), "both drivers have reported every plan"


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

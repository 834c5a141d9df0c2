"""Controls of test_request_stateful.py: each world has one mistake in it, and is told apart.

Most are found by the same rules in a few runs; those that a search would take long to find, by a story. A story ends
well in a world without mistake.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcore.plans import PoolPolicy
from kvcore.request import State
from tests.kvcore import request_mistakes as wrong
from tests.kvcore.driver_world import ALL, WAITING, never
from tests.kvcore.pool_world import World
from tests.kvcore.test_request_stateful import LINEAGES, MODELS, Interleavings

ANY, ONE_FULL, ONE_WINDOW, WINDOWS, STATES = MODELS, MODELS[:1], MODELS[3:4], MODELS[1:4], MODELS[5:6]
SEARCHED = {
    wrong.IgnoresFailedLoads: ONE_FULL,
    wrong.BelievesWhatItAsked: ANY,
    wrong.OffersTheWholePrompt: ANY,
    wrong.WaitsForEver: ANY,
    wrong.ForgetsOldAnswers: ANY,
    wrong.HidesRejections: ANY,
    wrong.CompletesTwice: ANY,
    wrong.StoresAllAtTheEnd: WINDOWS,
    wrong.KeepsPrefixOfWindow: ONE_WINDOW,
    wrong.StoresStatesByPosition: STATES,
    wrong.ReleasesAtTheFirstReport: ANY,
    wrong.ReleasesTwice: ANY,
    wrong.ReleasesNothing: ANY,
}

SEARCH = settings(
    max_examples=2_000,
    stateful_step_count=50,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("control", SEARCHED, ids=lambda control: control.__name__)
def test_a_mistake_is_found(control):
    rules = {"world_type": wrong.with_mistake(control), "models": SEARCHED[control]}
    with pytest.raises(AssertionError):
        run_state_machine_as_test(type(control.__name__, (Interleavings,), rules), settings=SEARCH)


# -- stories: what a search would take long to find -------------------------------------------------------------------

TEXT = LINEAGES[0]
FULL, HYBRID, STATE, DRAFT = MODELS[0], MODELS[1], MODELS[5], MODELS[6]


def run(world, live, num_tokens, grant=ALL):
    """Admit it, with whatever the pool answers, and compute up to so many tokens."""
    while live.machine.state in WAITING:
        world.advance(live, 1, grant)
        for question in world.questions:
            if question.live is live and live.machine.state is State.ASKING:
                world.answer(question)
    if live.machine.state is State.COMPUTING and num_tokens > live.num_computed:
        world.advance(live, num_tokens - live.num_computed)
    world.check()


def end(world, fails=never):
    for job in list(world.stores):
        world.end_store(job, fails)
    for job in list(world.loads):
        world.end_load(job, fails)
    world.check()


def everything(number):
    return True


def reset_while_it_computes(world):
    live = world.arrive(TEXT, 12, 12)
    run(world, live, 4)
    world.reset(world.engines[0])
    run(world, live, 12)
    end(world)


def reset_and_preempted(world):
    live = world.arrive(TEXT, 12, 12)
    run(world, live, 8)
    world.reset(world.engines[0])
    world.preempt(live)
    run(world, live, 8)
    run(world, live, 12)
    end(world)


def refused_and_touched(world):
    run(world, world.arrive(TEXT, 9, 9), 9)
    end(world, everything)
    run(world, world.arrive(TEXT, 11, 11), 11)
    end(world)


def refused_and_not_touched(world):
    live = world.arrive(TEXT, 12, 14)
    run(world, live, 4)
    end(world, everything)
    run(world, live, 10)
    end(world)


def granted_where_no_tail_is(world):
    """The window's blocks are there for a hit of 12 tokens; 6 were granted."""
    world.put_by_others(TEXT, 12)
    window_start = [(key, 0) for key in world.pool if key[1] == 1 and len(key[2]) <= 8]
    world.evict(window_start)
    live = world.arrive(TEXT, 13, 13)
    run(world, live, 0, grant=6)
    end(world)
    assert live.machine.state is State.WAITING


def granted_inside_a_block(world):
    world.put_by_others(TEXT, 8)
    live = world.arrive(TEXT, 12, 12)
    run(world, live, 0, grant=6)
    end(world)
    assert live.machine.state is State.WAITING, "there is no state after 6 tokens"


def reused_while_stored(world):
    run(world, world.arrive(TEXT, 8, 8), 8)
    world.engines[0].overwrite(100)
    end(world)


def reused_while_loaded(world):
    world.put_by_others(TEXT, 12)
    live, *others = (world.arrive(text, 17, 20) for text in LINEAGES)
    run(world, live, 0)
    world.finish(live)
    for other in others:
        run(world, other, 16, grant=0)
    end(world)


def preempted_while_it_keeps_back(world):
    live = world.arrive(TEXT, 3, 9)
    run(world, live, 7)
    world.preempt(live)
    run(world, live, 9)
    end(world)


def denied(world):
    world.put_by_others(TEXT, 12)
    live = world.arrive(TEXT, 13, 13)
    run(world, live, 0)
    end(world, everything)
    run(world, live, 13)
    end(world)


def reported_again(world):
    live = world.arrive(TEXT, 8, 8)
    run(world, live, 8)
    end(world)
    world.repeat(world.ended[0], {0, 1})


def a_hit_and_nothing_after_it(world):
    world.put_by_others(TEXT, 8)
    live = world.arrive(TEXT, 13, 13)
    run(world, live, 0)
    assert live.machine.decisions.external_hit_len == 6
    end(world)


def timed_out_while_loaded(world):
    """Others want the blocks when it has given up."""
    world.put_by_others(TEXT, 12)
    run(world, world.arrive(TEXT, 13, 13), 0)
    end(world, everything)
    for other in LINEAGES[1:]:
        run(world, world.arrive(other, 16, 16), 16, grant=0)
    end(world)


def timed_out_while_stored(world):
    run(world, world.arrive(TEXT, 8, 8), 8)
    end(world, everything)
    world.engines[0].overwrite(100)
    run(world, world.arrive(LINEAGES[3], 4, 4), 4)
    end(world)


def missed_after_its_end(world):
    world.put_by_others(TEXT, 12)
    live = world.arrive(TEXT, 13, 13)
    run(world, live, 0)
    world.finish(live)
    end(world, everything)
    run(world, world.arrive(TEXT, 13, 13), 13)
    end(world)


def denied_and_stored(world):
    """Half of it; computed instead, stored, and lost by the engine."""
    world.put_by_others(TEXT, 12)
    live = world.arrive(TEXT, 13, 13)
    run(world, live, 0)
    end(world, lambda number: number > 2)
    run(world, live, 13)
    end(world)
    world.engines[0].overwrite(100)
    run(world, world.arrive(TEXT, 13, 13), 13)
    end(world)


def begun_anew(world, num_tokens):
    """After a reset; others compute it meanwhile, and it resumes behind all of its prompt."""
    live = world.arrive(TEXT, 8, 14)
    run(world, live, 12)
    world.preempt(live)
    world.reset(world.engines[0])
    if num_tokens:
        run(world, live, num_tokens)
        world.preempt(live)
    run(world, world.arrive(TEXT, 12, 12), 12)
    run(world, live, 14)
    end(world)


def begun_anew_and_preempted_in_mid_prompt(world):
    begun_anew(world, 2)


def begun_anew_behind_its_prompt(world):
    begun_anew(world, 0)


STORIES = {
    wrong.KeepsBackAfterAReset: (begun_anew_behind_its_prompt, FULL),
    wrong.StoresThePromptOfOthers: (begun_anew_and_preempted_in_mid_prompt, FULL),
    wrong.LosesLateFailures: (missed_after_its_end, FULL),
    wrong.DeniesWhatIsStored: (denied_and_stored, FULL),
    wrong.WritesAfterItsTimeout: (timed_out_while_loaded, FULL),
    wrong.ReadsAfterItsTimeout: (timed_out_while_stored, FULL),
    wrong.SharesWhatIsForeign: (reset_while_it_computes, FULL),
    wrong.StaysForeign: (reset_and_preempted, FULL),
    wrong.RemembersOldStores: (reset_and_preempted, STATE),
    wrong.RetriesNever: (refused_and_touched, FULL),
    wrong.RetriesAlways: (refused_and_not_touched, FULL),
    wrong.SaysNothingOfUnproven: (granted_where_no_tail_is, HYBRID),
    wrong.TakesAnyState: (granted_inside_a_block, STATE),
    wrong.StoresUnpinned: (reused_while_stored, FULL),
    wrong.LoadsUnpinned: (reused_while_loaded, FULL),
    wrong.ForgetsWhatItKeptBack: (preempted_while_it_keeps_back, FULL),
    wrong.AsksForDenied: (denied, FULL),
    wrong.CountsReportsTwice: (reported_again, FULL),
    wrong.HasNoDrafts: (a_hit_and_nothing_after_it, DRAFT),
}


@pytest.mark.parametrize("control", STORIES, ids=lambda control: control.__name__)
def test_a_story_ends_well_but_with_a_mistake_in_it(control):
    story, model = STORIES[control]
    policy = PoolPolicy(20, 50, 3)
    right = World(model, policy, 24)
    story(right)
    right.drain()
    with pytest.raises(AssertionError):
        story(wrong.with_mistake(control)(model, policy, 24))

"""Many decode steps taken as one jump are exact for models of several groups too, with a pool and without."""

from collections import Counter

import pytest

from kvcore.gpu_cache import NEVER
from kvsim import decode_jump
from kvsim.invariants import check
from kvsim.scheduler import Scheduler
from tests.kvsim.small_models import FAMILIES, full_and_states, full_and_windows, random_pool_run, random_run
from tests.kvsim.test_jump import ORIGINAL_LIMIT, both, differs, seen_in

pytestmark = pytest.mark.slow

NUM_RUNS = 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("random_case", [random_run, random_pool_run])
def test_jumps_are_exact(family, random_case):
    seen = Counter()
    for seed in range(NUM_RUNS):
        runs = both(*random_case(family, seed))
        assert check(runs[0]) == check(runs[1]) == "ok"
        seen.update(seen_in(*runs))
    wanted = ("jumped", "evicted", "FINISHED") + ("LOADED", "STORED") * (random_case is random_pool_run)
    assert min(seen[what] for what in wanted) > 0, seen


# --- negative controls: each wrong jump is found ----------------------------------------------------------------------


def never(*_):
    return NEVER


def sequence_by_sequence(cache, step, num_steps):
    """Not in the order of the steps."""
    for sequence, before, _ in step.scheduled:
        for number in range(2, num_steps + 1):
            cache.advance(sequence.tables, sequence.names, before + number)


def impatient(scheduler, step):
    """As if nobody waited for a state that the step makes."""
    scheduler._awaits_state = False
    return ORIGINAL_LIMIT(scheduler, step)


WRONG = {
    "over what gives a block back": (decode_jump, "steps_before_drop", never, full_and_windows, random_run),
    "over what stores something": (decode_jump, "steps_before_store", never, full_and_windows, random_pool_run),
    "one sequence after the other": (decode_jump, "_replay", sequence_by_sequence, full_and_states, random_pool_run),
    "over a state that is awaited": (Scheduler, "jump_limit", impatient, full_and_states, random_run),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_jump_is_found(wrong, monkeypatch):
    owner, name, value, family, random_case = WRONG[wrong]
    monkeypatch.setattr(owner, name, value)
    assert any(differs(*random_case(family, seed)) for seed in range(2 * NUM_RUNS))

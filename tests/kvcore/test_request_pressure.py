"""Stores in flight pin blocks of the engine: there is a bound to how many, and what finds no room is offered later."""

import pytest

from kvcore.errors import InvalidArgument
from kvcore.group_runs import count_blocks
from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.spec import FullAttention, ModelSpec

B = 16
PLANNER = Planner(ModelSpec((FullAttention(B),)))
POLICY = PoolPolicy(max_load_attempts=0, max_storing_blocks=10)


def request(experience, name, num_blocks, local_blocks=0):
    """One that is computing its prompt; requests of one name have the same content."""
    made = KVRequest(PLANNER, POLICY, num_blocks * B, experience, lambda index, run: [name] * (run[1] - run[0]))
    made.consider(local_blocks * B, num_blocks * B, 0)
    made.granted(0, 0)
    return made


def test_what_finds_no_room_is_stored_when_it_is_touched_again():
    experience = Experience()
    first, second = request(experience, "a", 7), request(experience, "b", 7)
    store = first.computed(7 * B, 1)
    assert count_blocks(store.blocks) == experience.num_storing == 7
    assert second.computed(7 * B, 1) is None
    first.store_finished(store.ticket, PLANNER.nothing, 2)
    assert experience.num_storing == 0
    again = request(experience, "b", 8, local_blocks=7)
    assert again.computed(8 * B, 3).blocks == (((0, 8),),)


def test_a_plan_that_is_alone_passes():
    store = request(Experience(), "a", 100).computed(100 * B, 1)
    assert count_blocks(store.blocks) == 100


def test_room_comes_back_whatever_became_of_the_store():
    experience = Experience()
    made = request(experience, "a", 7)
    store = made.computed(7 * B, 1)
    made.reset()
    assert experience.num_storing == 7
    made.store_finished(store.ticket, store.blocks, 2)
    made.store_finished(store.ticket, store.blocks, 2)
    assert experience.num_storing == 0


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="max_storing_blocks"):
        PoolPolicy(max_storing_blocks=0)

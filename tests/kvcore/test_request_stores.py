"""What a request stores, one move at a time: what fills, what was refused, what it met before."""

import pytest

from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import Lookup, Offer
from kvcore.request import KVRequest
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from tests.kvcore.one_request import (
    ALL,
    HYBRID,
    POLICY,
    PROMPT,
    B,
    answer,
    blocks,
    computing,
    loading,
    machine,
    offered,
)


def test_each_block_is_stored_once():
    request = computing()
    plans = [request.computed(length, 0) for length in (B - 1, B, B + 1, 3 * B, PROMPT, PROMPT + 1)]
    assert [plan and plan.blocks for plan in plans] == [
        None, blocks((0, 1)), None, blocks((1, 3)), blocks((3, 10)), None,
    ]  # fmt: skip


def test_blocks_of_generated_tokens_follow_at_the_end():
    request, _ = computing(PROMPT)
    assert request.computed(PROMPT + 5 * B, 0) is None
    assert request.finished(PROMPT + 5 * B, 0).blocks == blocks((10, 15))


def test_blocks_that_a_window_will_leave_behind_are_stored_as_they_fill():
    request = machine(HYBRID)
    offered(request, ((), ()))
    request.granted(0, 0)
    assert request.computed(PROMPT, 0).blocks == (((0, 10),), ((0, 10),))
    assert request.computed(11 * B, 0).blocks == (((10, 11),), ((10, 11),))
    assert request.finished(11 * B + 3, 0) is None


@pytest.mark.parametrize(("local", "adopted", "full", "window"), [
    (0, 10 * B, (0, 10), (8, 10)),
    (0, 10 * B - 7, (0, 9), (7, 9)),
    (9 * B, 10 * B, (9, 10), (9, 10)),
])  # fmt: skip
def test_what_another_connector_filled_is_stored_as_far_as_a_window_has_kept_it(local, adopted, full, window):
    """Nothing that its window left behind is stored, or refused; then all goes on as ever."""
    request = machine(HYBRID)
    offered(request, ((), ()), local)
    request.granted(0, 0)
    request.adopted(adopted)
    store = request.computed(adopted, 0)
    assert store.blocks == ((full,), (window,))
    request.store_finished(store.ticket, ((), ()), 0)
    assert request.computed(11 * B, 0).blocks == (((full[1], 11),), ((full[1], 11),))
    assert not any(request.decisions.rejected)


def test_at_the_end_only_what_the_engine_still_holds_is_stored():
    """Steps that nobody told of: the window has moved on and the engine gave its blocks away."""
    request = machine(HYBRID)
    offered(request, ((), ()))
    request.granted(0, 0)
    request.computed(PROMPT, 0)
    assert request.finished(20 * B + 1, 0).blocks == (((10, 20),), ((18, 20),))


def test_what_was_saved_before_a_preemption_is_not_saved_again():
    request, _ = computing(5 * B)
    request.preempted()
    offered(request, blocks())
    request.granted(0, 0)
    assert request.computed(4 * B, 0) is None
    assert request.computed(7 * B, 0).blocks == blocks((5, 7))


def test_rejected_blocks_are_reported_and_a_later_plan_clears_them():
    request, store = computing(5 * B)
    request.store_finished(store.ticket, blocks((3, 9)), 0)
    assert (request.decisions.stored, request.decisions.rejected) == (blocks((0, 3)), blocks((3, 5)))
    request.preempted()
    _, load = loading(request, present=blocks((0, 5)))
    request.load_finished(load.ticket, ALL, 0)  # the pool has lost them all; computed again, stored again
    assert request.consider(0, PROMPT, 0) == Offer(0)
    request.granted(0, 0)
    assert request.computed(5 * B, 0).blocks == blocks((0, 5))
    assert (request.decisions.stored, request.decisions.rejected) == (blocks((0, 5)), blocks())


def test_a_store_is_reported_once_and_outlives_a_preemption():
    request, store = computing(5 * B)
    request.preempted()
    request.store_finished(store.ticket, blocks((0, 1)), 0)
    request.store_finished(store.ticket, blocks((0, 5)), 0)
    assert request.decisions.stored == blocks((1, 5))
    assert request.decisions.late_answers == 1
    request.finished(0, 0)
    assert request.closed


def test_what_a_window_leaves_at_the_grant_is_not_offered_again():
    """Refused before, and a local hit of 3 blocks; the load goes on so far that the window needs none of them."""
    experience = Experience()
    first = machine(HYBRID, experience=experience)
    offered(first, ((), ()))
    first.granted(0, 0)
    store = first.computed(3 * B, 0)
    first.store_finished(store.ticket, store.blocks, 0)
    second = machine(HYBRID, experience=experience)
    assert offered(second, (((0, 10),), ((0, 10),)), local=3 * B).num_tokens == 7 * B
    load = second.granted(7 * B, 0)
    second.load_finished(load.ticket, ((), ()), 0)
    assert second.next_store_len == 0
    assert second.computed(PROMPT, 0).blocks == (((0, 3),), ())


def test_the_last_report_of_a_block_counts():
    """Two stores of one block are under way, after a load that failed; the older one fails last."""
    request, load = loading(present=blocks((0, 5)))
    request.load_finished(load.ticket, blocks(), 0)
    old = request.computed(PROMPT, 0)
    request.preempted()
    _, load = loading(request, present=blocks((0, 7)))
    request.load_finished(load.ticket, blocks((0, 7)), 0)
    request.consider(0, PROMPT, 0)
    request.granted(0, 0)
    new = request.computed(PROMPT, 0)
    request.store_finished(old.ticket, old.blocks, 0)
    assert request.decisions.rejected == blocks((5, 10))
    request.store_finished(new.ticket, blocks(), 0)
    assert (request.decisions.stored, request.decisions.rejected) == (ALL, blocks())


def test_generated_blocks_of_a_preempted_request_are_stored_at_its_end_though_the_engine_kept_them():
    request, _ = computing(PROMPT)
    request.computed(PROMPT + 5 * B, 0)
    request.preempted()
    request.consider(14 * B, PROMPT + 5 * B, 0)
    request.granted(0, 0)
    assert request.finished(PROMPT + 5 * B, 0).blocks == blocks((10, 15))


def test_generated_blocks_that_were_refused_to_another_are_offered_in_the_next_step():
    """The other had the same text, and generated what this one finds in the engine when it resumes."""
    experience, generated = Experience(), PROMPT + 5 * B
    request, other = machine(experience=experience), machine(experience=experience)
    for each in (request, other):
        offered(each, blocks())
        each.granted(0, 0)
        each.computed(PROMPT, 0)
    request.preempted()
    store = other.finished(generated, 0)
    other.store_finished(store.ticket, store.blocks, 0)
    request.consider(12 * B, generated, 0)
    request.granted(0, 0)
    assert request.next_store_len == 0
    assert request.computed(generated, 0).blocks == blocks((10, 12))
    assert request.next_store_len is None, "the rest waits for the end"
    assert request.finished(generated, 0).blocks == blocks((12, 15))


def preempted_after_a_reset():
    request, _ = computing(PROMPT)
    request.preempted()
    request.reset()
    return request


def preempted_after_a_failed_load():
    request, _ = computing(PROMPT)
    request.preempted()
    _, load = loading(request)
    assert request.load_finished(load.ticket, ALL, 0) == 0
    return request


@pytest.mark.parametrize("begun", [preempted_after_a_reset, preempted_after_a_failed_load])
def test_nothing_is_owed_once_the_prompt_is_a_local_hit(begun):
    """It begins anew, is preempted in mid-prompt, and others have computed the rest meanwhile: they stored it."""
    request = begun()
    lookup = request.consider(0, PROMPT, 0)
    if isinstance(lookup, Lookup):
        answer(request, lookup, blocks(), 0)
        request.consider(0, PROMPT, 0)
    request.granted(0, 0)
    assert request.computed(2 * B, 0).blocks == blocks((0, 2))
    request.preempted()
    request.consider(10 * B, PROMPT + 1, 0)
    request.granted(0, 0)
    assert request.next_store_len is None
    assert request.computed(PROMPT + 1, 0) is None


def test_after_a_reset_a_local_hit_is_what_others_stored():
    """Generated blocks, which waited for the end: the pool that they were kept back from is gone."""
    request, _ = computing(PROMPT)
    request.computed(PROMPT + 5 * B, 0)
    request.preempted()
    request.reset()
    request.consider(15 * B, PROMPT + 5 * B, 0)
    request.granted(0, 0)
    assert request.computed(PROMPT + 5 * B, 0) is None
    assert request.finished(PROMPT + 5 * B, 0) is None


def test_what_was_denied_is_asked_for_again_once_it_is_stored():
    experience = Experience()
    request, load = loading(machine(experience=experience))
    request.load_finished(load.ticket, ALL, 1)
    assert machine(experience=experience).consider(0, PROMPT, 2) == Offer(0)
    request.consider(0, PROMPT, 3)
    request.granted(0, 3)
    store = request.computed(PROMPT, 3)
    request.store_finished(store.ticket, blocks((8, 10)), 4)
    assert machine(experience=experience).consider(0, PROMPT, 5).dialogue.question == blocks((0, 8))


def test_after_a_reset_all_is_stored_again_once_it_is_computed_again():
    request, _ = computing(5 * B)
    request.reset()
    assert request.computed(PROMPT, 0) is None, "begun before the reset"
    request.preempted()
    offered(request, blocks())
    request.granted(0, 0)
    assert request.computed(PROMPT, 0).blocks == ALL


def test_unaligned_lengths_and_groups_of_different_block_sizes():
    model = ModelSpec((FullAttention(32), SlidingWindow(8, 8)))
    request = KVRequest(Planner(model), POLICY, 100)
    offered_nothing = request.consider(0, 100, 0)
    answer(request, offered_nothing, ((), ()), 0)
    request.consider(0, 100, 0)
    request.granted(0, 0)
    assert request.computed(60, 0).blocks == (((0, 1),), ((3, 4),))
    assert request.computed(70, 0).blocks == (((1, 2),), ((7, 8),))
    assert request.computed(100, 0).blocks == (((2, 3),), ((11, 12),))

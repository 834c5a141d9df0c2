"""Every move of the machine up to the end of a load, legal and illegal, one at a time.

What is stored: test_request_stores.py. Interleavings: test_request_stateful.py.
"""

import pytest

from kvcore.errors import InvalidArgument
from kvcore.memory import Experience
from kvcore.plans import Load, Lookup, Offer, PoolPolicy, Store, Wait
from kvcore.request import LEGAL, State
from kvcore.spec import FullAttention, ModelSpec
from tests.kvcore.one_request import (
    ALL,
    FULL,
    HYBRID,
    POLICY,
    PROMPT,
    WINDOW,
    B,
    answer,
    blocks,
    in_state,
    loading,
    machine,
    offered,
)  # fmt: skip

DENIED_NS = Experience().denied.ttl_ns

EVENTS = {
    "consider": lambda request: request.consider(0, PROMPT, 0),
    "granted": lambda request: request.granted(0, 0),
    "load_finished": lambda request: request.load_finished(request._load.ticket, blocks(), 0),
    "computed": lambda request: request.computed(B, 0),
    "state_saved": lambda request: request.state_saved(0, B, 0),
    "preempted": lambda request: request.preempted(),
    "finished": lambda request: request.finished(0, 0),
}


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", LEGAL)
@pytest.mark.parametrize("state", State)
def test_an_event_in_the_wrong_state_is_a_bug(event, state):
    request = in_state(state)
    if event == "load_finished" and request._load is None:
        assert request.load_finished(99, blocks(), 0) is None  # a report of nothing is late, not wrong
    elif state in LEGAL[event]:
        EVENTS[event](request)
    else:
        with pytest.raises(AssertionError, match=event):
            EVENTS[event](request)


@pytest.mark.parametrize("state", State)
def test_late_and_unknown_reports_change_nothing_in_any_state(state):
    request = in_state(state)
    before = request.decisions.stored, request.decisions.loaded
    request.lookup_answered(99, 0)
    assert request.load_finished(99, blocks((0, 10)), 0) is None
    request.store_finished(99, blocks((0, 10)), 0)
    assert request.state is state
    assert (request.decisions.stored, request.decisions.loaded) == before
    assert request.decisions.late_answers == 3


@pytest.mark.parametrize("state", [state for state in State if state is not State.FINISHED])
def test_abort_in_every_state(state):
    request = in_state(state)
    load = request._load
    store = request.finished(3 * B, 0)
    assert (store is not None) == (state is State.COMPUTING)
    assert request.state is State.FINISHED
    assert request.closed == (state not in {State.LOADING, State.COMPUTING})
    if load is not None:
        assert request.load_finished(load.ticket, blocks(), 0) == 0
    if store is not None:
        request.store_finished(store.ticket, blocks(), 0)
    assert request.closed


@pytest.mark.parametrize(
    ("field", "value"), [("lookup_deadline_ns", 0), ("offer_ttl_ns", 0), ("max_load_attempts", -1)]
)
def test_impatience_below_its_bound_is_refused(field, value):
    arguments = {"lookup_deadline_ns": 1, "offer_ttl_ns": 1, field: value}
    with pytest.raises(InvalidArgument, match=field):
        PoolPolicy(**arguments)


@pytest.mark.parametrize("num_prompt", [0, -3])
def test_a_prompt_of_no_tokens_is_refused(num_prompt):
    with pytest.raises(InvalidArgument, match="num_prompt_tokens"):
        machine(num_prompt=num_prompt)


SPLIT = ModelSpec((FullAttention(16),), hash_unit=4, hit_unit=4)


@pytest.mark.parametrize(("model", "local"), [(FULL, -B), (FULL, 7), (FULL, B + 4), (SPLIT, -4), (SPLIT, 6)])
def test_a_local_hit_where_none_of_the_model_ends_is_refused(model, local):
    request = machine(model)
    with pytest.raises(InvalidArgument, match="local_hit_len"):
        request.consider(local, PROMPT, 0)
    assert request.state is State.WAITING
    with pytest.raises(InvalidArgument, match="local_hit_len"):
        request.planner.frontier(local, PROMPT)


def test_a_local_hit_inside_a_block_is_taken_where_hits_may_end_there():
    assert isinstance(machine(SPLIT).consider(B + 4, PROMPT, 0), Lookup)


# -- question and answer ----------------------------------------------------------------------------------------------


def test_ask_answer_offer_load_compute_store_finish():
    request = machine()
    lookup = request.consider(2 * B, PROMPT, now_ns=5)
    assert (lookup.ticket, lookup.dialogue.question, lookup.deadline_ns) == (1, blocks((2, 10)), 105)
    assert request.consider(2 * B, PROMPT, now_ns=6) == Wait(until_ns=105)
    answer(request, lookup, blocks((2, 7)), now_ns=7)
    assert request.consider(2 * B, PROMPT, now_ns=8) == Offer(5 * B)
    load = request.granted(5 * B, 9)
    assert load == Load(2, 7 * B, blocks((2, 7)), blocks())
    assert request.load_finished(2, blocks(), 10) == 7 * B
    assert request.granted(0, 11) is None
    assert request.computed(9 * B, 12) == Store(3, blocks((7, 9)))
    assert request.computed(PROMPT, 13) == Store(4, blocks((9, 10)))
    assert request.computed(PROMPT + 1, 14) is None
    request.store_finished(3, blocks((8, 9)), 15)
    assert request.finished(12 * B + 3, 16) == Store(5, blocks((8, 9), (10, 12))), "what was refused, and the rest"
    request.store_finished(4, blocks(), 17)
    assert not request.closed
    request.store_finished(5, blocks((10, 11)), 18)
    assert request.closed
    decisions = request.decisions
    assert (decisions.local_hit_len, decisions.external_hit_len, decisions.granted_len) == (2 * B, 5 * B, 5 * B)
    assert decisions.looked_up == blocks((2, 10))
    assert decisions.loaded == blocks((2, 7))
    assert decisions.stored == blocks((7, 10), (11, 12))
    assert decisions.rejected == blocks((10, 11))


def test_nothing_is_asked_when_nothing_can_be_gained():
    assert machine().consider(10 * B, PROMPT, 0) == Offer(0)
    assert machine().consider(0, B, 0) == Offer(0)  # one block: its last token must be computed
    assert machine(policy=PoolPolicy(1, 1, max_load_attempts=0)).consider(0, PROMPT, 0) == Offer(0)


def test_an_answer_is_cut_to_the_question():
    request = machine()
    lookup = request.consider(4 * B, PROMPT, 0)
    answer(request, lookup, blocks((0, 99)), 0)
    assert request.consider(4 * B, PROMPT, 0) == Offer(6 * B)
    assert request.granted(6 * B, 0).blocks == blocks((4, 10))


def test_an_answer_counts_once():
    request = machine()
    lookup = request.consider(0, PROMPT, 0)
    answer(request, lookup, blocks((0, 3)), 0)
    answer(request, lookup, blocks((0, 9)), 0)
    assert request.consider(0, PROMPT, 0) == Offer(3 * B)
    assert request.decisions.late_answers == 1


def test_the_deadline_ends_the_wait_and_a_late_answer_counts_until_the_request_is_admitted():
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    assert request.consider(0, PROMPT, now_ns=99) == Wait(100)
    assert request.consider(0, PROMPT, now_ns=100) == Offer(0)
    assert request.awaits(lookup.ticket)
    answer(request, lookup, blocks((0, 10)), 101)
    assert not request.awaits(lookup.ticket)
    assert request.consider(0, PROMPT, now_ns=102) == Offer(10 * B)
    assert (request.decisions.late_lookups, request.decisions.late_answers) == (1, 0)
    assert request.consider(0, PROMPT, now_ns=1_101) == Offer(10 * B), "believed from when it was told"
    assert isinstance(request.consider(0, PROMPT, now_ns=1_102), Lookup)


def test_a_late_answer_is_believed_no_longer_than_what_was_heard_of_it_first():
    """The pool leased that for so long."""
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    lookup.dialogue.present = blocks((0, 3))
    assert request.consider(0, PROMPT, now_ns=100) == Offer(3 * B)
    answer(request, lookup, blocks((0, 10)), 900)
    assert request.consider(0, PROMPT, now_ns=1_100) == Offer(10 * B)
    assert isinstance(request.consider(0, PROMPT, now_ns=1_101), Lookup)


def test_a_late_answer_is_dropped_once_the_request_is_admitted():
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    assert request.consider(0, PROMPT, now_ns=100) == Offer(0)
    request.granted(0, 101)
    assert not request.awaits(lookup.ticket)
    answer(request, lookup, blocks((0, 10)), 102)
    assert (request.decisions.late_answers, request.decisions.found) == (1, blocks())


def test_without_an_answer_the_pool_is_asked_again_once_the_miss_has_aged():
    request = machine()
    late = request.consider(0, PROMPT, now_ns=0)
    assert request.consider(0, PROMPT, now_ns=100) == Offer(0)
    assert request.consider(0, PROMPT, now_ns=1_100) == Offer(0)
    again = request.consider(0, PROMPT, now_ns=1_101)
    answer(request, late, blocks((0, 10)), 1_102)
    assert isinstance(request.consider(0, PROMPT, now_ns=1_103), Wait), "that was the answer to another question"
    answer(request, again, blocks((0, 3)), 1_104)
    assert request.consider(0, PROMPT, now_ns=1_105) == Offer(3 * B)


def test_an_answer_after_the_deadline_that_nobody_noticed_still_counts():
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    answer(request, lookup, blocks((0, 3)), 150)
    assert request.consider(0, PROMPT, now_ns=151) == Offer(3 * B)


def test_an_offer_is_repeated_until_its_lease_ends():
    request = machine()
    assert offered(request, blocks((0, 10))) == Offer(10 * B)
    assert request.consider(0, PROMPT, now_ns=1_000) == Offer(10 * B)
    again = request.consider(0, PROMPT, now_ns=1_001)
    assert isinstance(again, Lookup)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(10 * B, 0)  # the old offer does not stand any more
    answer(request, again, blocks((0, 2)), 1_002)
    assert request.consider(0, PROMPT, now_ns=1_003) == Offer(2 * B)


def test_a_request_that_is_rarely_considered_gets_its_offer():
    """Considered less often than an offer lives: the answer is offered all the same, so that the request gets on."""
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    answer(request, lookup, blocks((0, 10)), 1)
    assert request.consider(0, PROMPT, now_ns=50_000) == Offer(10 * B)


def test_a_local_hit_that_grew_lowers_the_offer():
    request = machine()
    offered(request, blocks((0, 6)))
    assert request.consider(4 * B, PROMPT, 0) == Offer(2 * B)
    assert request.granted(2 * B, 0).blocks == blocks((4, 6))
    assert machine_after_growth(10 * B).state is State.WAITING


def test_time_changes_nothing_for_a_local_hit_that_is_whole():
    """Else a driver that considers a request again when its offer grows old would do nothing else from then on."""
    grown = machine_after_growth(9 * B)
    assert grown.reconsider_at_ns == POLICY.offer_ttl_ns + 1
    assert machine_after_growth(10 * B).reconsider_at_ns is None


def machine_after_growth(local):
    request = machine()
    offered(request, blocks((0, 6)))
    assert request.consider(local, PROMPT, 0) == Offer(0)
    return request


def test_a_local_hit_that_shrank_is_asked_about_again():
    request = machine()
    lookup = request.consider(4 * B, PROMPT, 0)
    again = request.consider(2 * B, PROMPT, 0)
    assert again.dialogue.question == blocks((2, 10))
    answer(request, lookup, blocks((4, 10)), 0)
    assert request.decisions.late_answers == 1
    answer(request, again, blocks((2, 5)), 0)
    assert request.consider(2 * B, PROMPT, 0) == Offer(3 * B)
    assert isinstance(request.consider(B, PROMPT, 0), Lookup), "after the offer as well"


# -- grants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant", [0, 1, B - 1, B, B + 1, 5 * B, 10 * B - 1, 10 * B])
def test_any_grant_up_to_the_offer_is_loaded_exactly(grant):
    request, load = loading(grant=grant)
    if grant == 0:
        assert (load, request.state) == (None, State.COMPUTING)
        return
    assert load.blocks == blocks((0, -(-grant // B)))
    assert load.unproven == blocks()
    assert request.load_finished(load.ticket, blocks(), 0) == grant
    store = request.computed(PROMPT, 0)
    # The block in which a grant ends is filled by this request.
    assert (store.blocks if store else blocks()) == (blocks((grant // B, 10)) if grant < 10 * B else blocks())


@pytest.mark.parametrize("grant", [-1, 10 * B + 1])
def test_a_grant_beyond_the_offer_is_the_callers_mistake(grant):
    request = machine()
    offered(request, blocks((0, 10)))
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(grant, 0)


def test_only_the_last_offer_can_be_granted():
    """Neither one from before the preemption nor one that was withdrawn."""
    request, load = loading()
    request.load_finished(load.ticket, blocks(), 0)
    request.preempted()
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(B, 0)
    assert isinstance(request.consider(0, PROMPT, 0), Lookup)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(B, 0)
    assert request.granted(0, 0) is None


def test_the_first_admission_is_the_record():
    request, load = loading(grant=4 * B)
    request.load_finished(load.ticket, blocks(), 0)
    request.preempted()
    offered(request, blocks((5, 10)), local=5 * B, now_ns=10)
    request.granted(5 * B, 0)
    decisions = request.decisions
    assert (decisions.local_hit_len, decisions.external_hit_len, decisions.granted_len) == (0, 10 * B, 4 * B)
    assert decisions.loaded == blocks((0, 4), (5, 10))


def test_a_grant_that_ends_where_no_tail_is_proven():
    """The pool holds the window's tail of the full hit only; half of it was granted."""
    request = machine(HYBRID)
    lookup = request.consider(0, PROMPT, 0)
    answer(request, lookup, (((0, 10),), ((8, 10),)), 0)
    assert request.consider(0, PROMPT, 0) == Offer(10 * B)
    load = request.granted(5 * B, 0)
    assert load.blocks == (((0, 5),), ())
    assert load.unproven == ((), ((3, 5),))
    assert request.load_finished(load.ticket, ((), ()), 0) == 0
    assert request.decisions.late_misses == 0, "it was never promised"
    assert request.state is State.WAITING


# -- loads ------------------------------------------------------------------------------------------------------------


def test_one_group_keeps_the_prefix_before_the_first_failed_block():
    request, load = loading()
    assert request.load_finished(load.ticket, blocks((4, 5), (7, 8)), 0) == 4 * B
    assert request.state is State.COMPUTING
    assert request.decisions.late_misses == 2
    assert request.decisions.loaded == blocks((0, 4), (5, 7), (8, 10))
    assert request.computed(PROMPT, 0).blocks == blocks((4, 10)), "what was missing is stored when computed"


def test_nothing_left_waits_again_and_does_not_ask_for_what_was_denied():
    request, load = loading()
    assert request.load_finished(load.ticket, ALL, now_ns=5) == 0
    assert request.state is State.WAITING
    assert request.consider(0, PROMPT, now_ns=6) == Offer(0)
    assert request.consider(0, PROMPT, now_ns=5 + DENIED_NS).dialogue.question == ALL, "until it is forgotten"


def test_what_was_denied_is_denied_to_all_requests_of_the_engine():
    experience = Experience()
    request, load = loading(machine(experience=experience))
    assert request.load_finished(load.ticket, blocks((4, 5), (7, 8)), now_ns=5) == 4 * B
    other = machine(experience=experience)
    assert offered(other, ALL, now_ns=6) == Offer(4 * B)
    third = machine(experience=experience)
    assert third.consider(4 * B, PROMPT, now_ns=7) == Offer(0)


@pytest.mark.parametrize("failed", [(((4, 5),), ()), ((), ((8, 9),))])
def test_several_groups_start_again(failed):
    request = machine(HYBRID)
    offered(request, (((0, 10),), ((0, 10),)))
    load = request.granted(10 * B, 0)
    assert load.blocks == (((0, 10),), ((8, 10),))
    assert request.load_finished(load.ticket, failed, 0) == 0
    assert request.state is State.WAITING


def test_a_single_window_does_not_keep_tokens_whose_past_is_gone():
    request = machine(WINDOW)
    offered(request, blocks((0, 10)))
    load = request.granted(10 * B, 0)
    assert load.blocks == blocks((8, 10))
    assert request.load_finished(load.ticket, blocks((9, 10)), 0) == 0


def test_failures_of_blocks_that_were_not_to_be_loaded_are_ignored():
    request, load = loading(grant=4 * B)
    assert request.load_finished(load.ticket, blocks((7, 9)), 0) == 4 * B
    assert request.decisions.late_misses == 0


def test_a_load_is_reported_once():
    request, load = loading()
    assert request.load_finished(load.ticket, blocks(), 0) == 10 * B
    assert request.load_finished(load.ticket, blocks((0, 10)), 0) is None
    assert request.state is State.COMPUTING
    assert request.decisions.loaded == blocks((0, 10))


def test_failed_loads_are_bounded():
    request = machine()
    for attempt in range(POLICY.max_load_attempts):
        _, load = loading(request, now_ns=attempt * DENIED_NS)
        request.load_finished(load.ticket, blocks((0, 10)), attempt * DENIED_NS)
    assert request.consider(0, PROMPT, 10 * DENIED_NS) == Offer(0)
    assert request.granted(0, 10 * DENIED_NS) is None


def test_loads_that_succeed_are_not():
    request = machine()
    for _ in range(3 * POLICY.max_load_attempts):
        _, load = loading(request)
        request.load_finished(load.ticket, blocks(), 0)
        request.preempted()
    assert isinstance(request.consider(0, PROMPT, 0), Lookup)


def test_a_load_that_fails_after_its_request_has_ended_is_on_record():
    """And the other requests of the engine learn what the pool has lost."""
    request, load = loading()
    request.finished(0, 0)
    assert request.load_finished(load.ticket, blocks((4, 6)), 1) == 0
    assert request.decisions.late_misses == 2
    assert request.decisions.loaded == blocks((0, 4), (6, 10))
    assert offered(machine(experience=request.experience), ALL, now_ns=2) == Offer(4 * B)


@pytest.mark.parametrize("num_resets", [1, 2])
def test_what_a_load_misses_that_a_reset_has_outdated_teaches_nothing(num_resets):
    """The request is reset while it loads, or when it has ended, or both; the load fails after that."""
    request, load = loading()
    if num_resets == 2:
        request.reset()
    request.finished(0, 0)
    request.reset()
    assert request.load_finished(load.ticket, ALL, 1) == 0
    assert request.decisions.late_misses == 10
    assert offered(machine(experience=request.experience), ALL, now_ns=2) == Offer(10 * B)


def test_a_load_that_outlives_its_request_keeps_it_open():
    request, load = loading()
    assert request.finished(0, 0) is None
    assert not request.closed
    assert request.load_finished(load.ticket, blocks((0, 1)), 0) == 0
    assert request.closed

"""Every move of the machine, legal and illegal, one at a time. Interleavings are in test_request_stateful.py."""

import pytest

from kvcore.errors import InvalidArgument
from kvcore.planner import Planner
from kvcore.request import LEGAL, KVRequest, Load, Lookup, Offer, PoolPolicy, State, Store, Wait
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow

B = 16
FULL = ModelSpec((FullAttention(B),))
HYBRID = ModelSpec((FullAttention(B), SlidingWindow(B, window=2 * B + 1)))
WINDOW = ModelSpec((SlidingWindow(B, window=2 * B + 1),))
POLICY = PoolPolicy(lookup_deadline_ns=100, offer_ttl_ns=1_000, max_load_attempts=2)
PROMPT = 10 * B + 1


def machine(model=FULL, policy=POLICY, num_prompt=PROMPT):
    return KVRequest(Planner(model), policy, num_prompt)


def blocks(*runs):
    """One group's blocks."""
    return (runs,)


ALL = blocks((0, 10))


def offered(request, present, local=0, now_ns=0):
    """Ask, answer, offer."""
    lookup = request.consider(local, PROMPT, now_ns)
    assert isinstance(lookup, Lookup)
    request.lookup_answered(lookup.ticket, present, now_ns)
    offer = request.consider(local, PROMPT, now_ns)
    assert isinstance(offer, Offer)
    return offer


def loading(request=None, grant=None, present=ALL):
    request = request or machine()
    offer = offered(request, present)
    return request, request.granted(offer.num_tokens if grant is None else grant)


def computing(num_tokens=None):
    request = machine()
    offered(request, blocks())
    request.granted(0)
    return request if num_tokens is None else (request, request.computed(num_tokens))


def in_state(state):
    request = machine()
    if state is State.ASKING:
        request.consider(0, PROMPT, 0)
    elif state is State.OFFERED:
        offered(request, blocks((0, 10)))
    elif state is State.LOADING:
        loading(request)
    elif state is State.COMPUTING:
        return computing()
    elif state is State.FINISHED:
        request.finished(0)
    assert request.state is state
    return request


EVENTS = {
    "consider": lambda request: request.consider(0, PROMPT, 0),
    "granted": lambda request: request.granted(0),
    "load_finished": lambda request: request.load_finished(request._load.ticket, blocks()),
    "computed": lambda request: request.computed(B),
    "preempted": lambda request: request.preempted(),
    "finished": lambda request: request.finished(0),
}


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", LEGAL)
@pytest.mark.parametrize("state", State)
def test_an_event_in_the_wrong_state_is_a_bug(event, state):
    request = in_state(state)
    if event == "load_finished" and request._load is None:
        assert request.load_finished(99, blocks()) is None  # a report of nothing is late, not wrong
    elif state in LEGAL[event]:
        EVENTS[event](request)
    else:
        with pytest.raises(AssertionError, match=event):
            EVENTS[event](request)


@pytest.mark.parametrize("state", State)
def test_late_and_unknown_reports_change_nothing_in_any_state(state):
    request = in_state(state)
    before = request.decisions.stored, request.decisions.loaded
    request.lookup_answered(99, blocks((0, 10)), 0)
    assert request.load_finished(99, blocks((0, 10))) is None
    request.store_finished(99, blocks((0, 10)))
    assert request.state is state
    assert (request.decisions.stored, request.decisions.loaded) == before
    assert request.decisions.late_answers == 3


@pytest.mark.parametrize("state", [state for state in State if state is not State.FINISHED])
def test_abort_in_every_state(state):
    request = in_state(state)
    load = request._load
    store = request.finished(3 * B)
    assert (store is not None) == (state is State.COMPUTING)
    assert request.state is State.FINISHED
    assert request.closed == (state not in {State.LOADING, State.COMPUTING})
    if load is not None:
        assert request.load_finished(load.ticket, blocks()) == 0
    if store is not None:
        request.store_finished(store.ticket, blocks())
    assert request.closed


@pytest.mark.parametrize(
    ("field", "value"), [("lookup_deadline_ns", 0), ("offer_ttl_ns", 0), ("max_load_attempts", -1)]
)
def test_impatience_below_its_bound_is_refused(field, value):
    arguments = {"lookup_deadline_ns": 1, "offer_ttl_ns": 1, field: value}
    with pytest.raises(InvalidArgument, match=field):
        PoolPolicy(**arguments)


# -- question and answer ----------------------------------------------------------------------------------------------


def test_ask_answer_offer_load_compute_store_finish():
    request = machine()
    lookup = request.consider(2 * B, PROMPT, now_ns=5)
    assert lookup == Lookup(1, blocks((2, 10)))
    assert request.consider(2 * B, PROMPT, now_ns=6) == Wait(until_ns=105)
    request.lookup_answered(1, blocks((2, 7)), now_ns=7)
    assert request.consider(2 * B, PROMPT, now_ns=8) == Offer(5 * B)
    load = request.granted(5 * B)
    assert load == Load(2, 7 * B, blocks((2, 7)), blocks())
    assert request.load_finished(2, blocks()) == 7 * B
    assert request.granted(0) is None
    assert request.computed(9 * B) == Store(3, blocks((7, 9)))
    assert request.computed(PROMPT) == Store(4, blocks((9, 10)))
    assert request.computed(PROMPT + 1) is None
    request.store_finished(3, blocks((8, 9)))
    assert request.finished(12 * B + 3) == Store(5, blocks((10, 12)))
    request.store_finished(4, blocks())
    assert not request.closed
    request.store_finished(5, blocks())
    assert request.closed
    decisions = request.decisions
    assert (decisions.local_hit_len, decisions.external_hit_len, decisions.granted_len) == (2 * B, 5 * B, 5 * B)
    assert decisions.looked_up == blocks((2, 10))
    assert decisions.loaded == blocks((2, 7))
    assert decisions.stored == blocks((7, 8), (9, 12))
    assert decisions.rejected == blocks((8, 9))


def test_nothing_is_asked_when_nothing_can_be_gained():
    assert machine().consider(10 * B, PROMPT, 0) == Offer(0)
    assert machine().consider(0, B, 0) == Offer(0)  # one block: its last token must be computed
    assert machine(policy=PoolPolicy(1, 1, max_load_attempts=0)).consider(0, PROMPT, 0) == Offer(0)


def test_an_answer_is_cut_to_the_question():
    request = machine()
    lookup = request.consider(4 * B, PROMPT, 0)
    request.lookup_answered(lookup.ticket, blocks((0, 99)), 0)
    assert request.consider(4 * B, PROMPT, 0) == Offer(6 * B)
    assert request.granted(6 * B).blocks == blocks((4, 10))


def test_an_answer_counts_once():
    request = machine()
    lookup = request.consider(0, PROMPT, 0)
    request.lookup_answered(lookup.ticket, blocks((0, 3)), 0)
    request.lookup_answered(lookup.ticket, blocks((0, 9)), 0)
    assert request.consider(0, PROMPT, 0) == Offer(3 * B)
    assert request.decisions.late_answers == 1


def test_the_deadline_ends_the_wait_and_the_late_answer_is_dropped():
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    assert request.consider(0, PROMPT, now_ns=99) == Wait(100)
    assert request.consider(0, PROMPT, now_ns=100) == Offer(0)
    request.lookup_answered(lookup.ticket, blocks((0, 10)), now_ns=101)
    assert request.consider(0, PROMPT, now_ns=102) == Offer(0)
    assert (request.decisions.late_lookups, request.decisions.late_answers) == (1, 1)
    assert isinstance(request.consider(0, PROMPT, now_ns=1_101), Lookup), "asked again once the offer has aged"


def test_an_answer_after_the_deadline_that_nobody_noticed_still_counts():
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    request.lookup_answered(lookup.ticket, blocks((0, 3)), now_ns=150)
    assert request.consider(0, PROMPT, now_ns=151) == Offer(3 * B)


def test_an_offer_is_repeated_until_its_lease_ends():
    request = machine()
    assert offered(request, blocks((0, 10))) == Offer(10 * B)
    assert request.consider(0, PROMPT, now_ns=1_000) == Offer(10 * B)
    again = request.consider(0, PROMPT, now_ns=1_001)
    assert isinstance(again, Lookup)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(10 * B)  # the old offer does not stand any more
    request.lookup_answered(again.ticket, blocks((0, 2)), now_ns=1_002)
    assert request.consider(0, PROMPT, now_ns=1_003) == Offer(2 * B)


def test_a_request_that_is_rarely_considered_gets_its_offer():
    """Considered less often than an offer lives: the answer is offered all the same, so that the request gets on."""
    request = machine()
    lookup = request.consider(0, PROMPT, now_ns=0)
    request.lookup_answered(lookup.ticket, blocks((0, 10)), now_ns=1)
    assert request.consider(0, PROMPT, now_ns=50_000) == Offer(10 * B)


def test_a_local_hit_that_grew_lowers_the_offer():
    request = machine()
    offered(request, blocks((0, 6)))
    assert request.consider(4 * B, PROMPT, 0) == Offer(2 * B)
    assert request.granted(2 * B).blocks == blocks((4, 6))
    assert machine_after_growth(10 * B).state is State.OFFERED


def machine_after_growth(local):
    request = machine()
    offered(request, blocks((0, 6)))
    assert request.consider(local, PROMPT, 0) == Offer(0)
    return request


def test_a_local_hit_that_shrank_is_asked_about_again():
    request = machine()
    lookup = request.consider(4 * B, PROMPT, 0)
    again = request.consider(2 * B, PROMPT, 0)
    assert again.blocks == blocks((2, 10))
    request.lookup_answered(lookup.ticket, blocks((4, 10)), 0)
    assert request.decisions.late_answers == 1
    request.lookup_answered(again.ticket, blocks((2, 5)), 0)
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
    assert request.load_finished(load.ticket, blocks()) == grant
    store = request.computed(PROMPT)
    # The block in which a grant ends is filled by this request.
    assert (store.blocks if store else blocks()) == (blocks((grant // B, 10)) if grant < 10 * B else blocks())


@pytest.mark.parametrize("grant", [-1, 10 * B + 1])
def test_a_grant_beyond_the_offer_is_the_callers_mistake(grant):
    request = machine()
    offered(request, blocks((0, 10)))
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(grant)


def test_only_the_last_offer_can_be_granted():
    """Neither one from before the preemption nor one that was withdrawn."""
    request, load = loading()
    request.load_finished(load.ticket, blocks())
    request.preempted()
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(B)
    assert isinstance(request.consider(0, PROMPT, 0), Lookup)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        request.granted(B)
    assert request.granted(0) is None


def test_the_first_admission_is_the_record():
    request, load = loading(grant=4 * B)
    request.load_finished(load.ticket, blocks())
    request.preempted()
    offered(request, blocks((5, 10)), local=5 * B, now_ns=10)
    request.granted(5 * B)
    decisions = request.decisions
    assert (decisions.local_hit_len, decisions.external_hit_len, decisions.granted_len) == (0, 10 * B, 4 * B)
    assert decisions.loaded == blocks((0, 4), (5, 10))


def test_a_grant_that_ends_where_no_tail_is_proven():
    """The pool holds the window's tail of the full hit only; half of it was granted."""
    request = machine(HYBRID)
    lookup = request.consider(0, PROMPT, 0)
    request.lookup_answered(lookup.ticket, (((0, 10),), ((8, 10),)), 0)
    assert request.consider(0, PROMPT, 0) == Offer(10 * B)
    load = request.granted(5 * B)
    assert load.blocks == (((0, 5),), ())
    assert load.unproven == ((), ((3, 5),))
    assert request.load_finished(load.ticket, ((), ())) == 0
    assert request.decisions.late_misses == 0, "it was never promised"
    assert request.state is State.WAITING


# -- loads ------------------------------------------------------------------------------------------------------------


def test_one_group_keeps_the_prefix_before_the_first_failed_block():
    request, load = loading()
    assert request.load_finished(load.ticket, blocks((4, 5), (7, 8))) == 4 * B
    assert request.state is State.COMPUTING
    assert request.decisions.late_misses == 2
    assert request.decisions.loaded == blocks((0, 4), (5, 7), (8, 10))
    assert request.computed(PROMPT).blocks == blocks((4, 10)), "what was missing is stored when computed"


def test_nothing_left_waits_again():
    request, load = loading()
    assert request.load_finished(load.ticket, blocks((0, 1))) == 0
    assert request.state is State.WAITING
    assert isinstance(request.consider(0, PROMPT, 0), Lookup)


@pytest.mark.parametrize("failed", [(((4, 5),), ()), ((), ((8, 9),))])
def test_several_groups_start_again(failed):
    request = machine(HYBRID)
    offered(request, (((0, 10),), ((0, 10),)))
    load = request.granted(10 * B)
    assert load.blocks == (((0, 10),), ((8, 10),))
    assert request.load_finished(load.ticket, failed) == 0
    assert request.state is State.WAITING


def test_a_single_window_does_not_keep_tokens_whose_past_is_gone():
    request = machine(WINDOW)
    offered(request, blocks((0, 10)))
    load = request.granted(10 * B)
    assert load.blocks == blocks((8, 10))
    assert request.load_finished(load.ticket, blocks((9, 10))) == 0


def test_failures_of_blocks_that_were_not_to_be_loaded_are_ignored():
    request, load = loading(grant=4 * B)
    assert request.load_finished(load.ticket, blocks((7, 9))) == 4 * B
    assert request.decisions.late_misses == 0


def test_a_load_is_reported_once():
    request, load = loading()
    assert request.load_finished(load.ticket, blocks()) == 10 * B
    assert request.load_finished(load.ticket, blocks((0, 10))) is None
    assert request.state is State.COMPUTING
    assert request.decisions.loaded == blocks((0, 10))


def test_failed_loads_are_bounded():
    request = machine()
    for _ in range(POLICY.max_load_attempts):
        _, load = loading(request)
        request.load_finished(load.ticket, blocks((0, 10)))
    assert request.consider(0, PROMPT, 0) == Offer(0)
    assert request.granted(0) is None


def test_loads_that_succeed_are_not():
    request = machine()
    for _ in range(3 * POLICY.max_load_attempts):
        _, load = loading(request)
        request.load_finished(load.ticket, blocks())
        request.preempted()
    assert isinstance(request.consider(0, PROMPT, 0), Lookup)


def test_a_load_that_outlives_its_request_keeps_it_open():
    request, load = loading()
    assert request.finished(0) is None
    assert not request.closed
    assert request.load_finished(load.ticket, blocks((0, 1))) == 0
    assert request.closed


# -- stores -----------------------------------------------------------------------------------------------------------


def test_each_block_is_stored_once():
    request = computing()
    plans = [request.computed(length) for length in (B - 1, B, B + 1, 3 * B, PROMPT, PROMPT + 1)]
    assert [plan and plan.blocks for plan in plans] == [
        None, blocks((0, 1)), None, blocks((1, 3)), blocks((3, 10)), None,
    ]  # fmt: skip


def test_blocks_of_generated_tokens_follow_at_the_end():
    request, _ = computing(PROMPT)
    assert request.computed(PROMPT + 5 * B) is None
    assert request.finished(PROMPT + 5 * B).blocks == blocks((10, 15))


def test_blocks_that_a_window_will_leave_behind_are_stored_as_they_fill():
    request = machine(HYBRID)
    offered(request, ((), ()))
    request.granted(0)
    assert request.computed(PROMPT).blocks == (((0, 10),), ((0, 10),))
    assert request.computed(11 * B).blocks == (((10, 11),), ((10, 11),))
    assert request.finished(11 * B + 3) is None


def test_at_the_end_only_what_the_engine_still_holds_is_stored():
    """Steps that nobody told of: the window has moved on and the engine gave its blocks away."""
    request = machine(HYBRID)
    offered(request, ((), ()))
    request.granted(0)
    request.computed(PROMPT)
    assert request.finished(20 * B + 1).blocks == (((10, 20),), ((18, 20),))


def test_what_was_saved_before_a_preemption_is_not_saved_again():
    request, _ = computing(5 * B)
    request.preempted()
    offered(request, blocks())
    request.granted(0)
    assert request.computed(4 * B) is None
    assert request.computed(7 * B).blocks == blocks((5, 7))


def test_rejected_blocks_are_reported_and_a_later_plan_clears_them():
    request, store = computing(5 * B)
    request.store_finished(store.ticket, blocks((3, 9)))
    assert (request.decisions.stored, request.decisions.rejected) == (blocks((0, 3)), blocks((3, 5)))
    request.preempted()
    _, load = loading(request, present=blocks((0, 5)))
    request.load_finished(load.ticket, blocks((0, 1)))  # the pool has lost them all; computed again, stored again
    offered(request, blocks())
    request.granted(0)
    assert request.computed(5 * B).blocks == blocks((0, 5))
    assert (request.decisions.stored, request.decisions.rejected) == (blocks((0, 5)), blocks())


def test_a_store_is_reported_once_and_outlives_a_preemption():
    request, store = computing(5 * B)
    request.preempted()
    request.store_finished(store.ticket, blocks((0, 1)))
    request.store_finished(store.ticket, blocks((0, 5)))
    assert request.decisions.stored == blocks((1, 5))
    assert request.decisions.late_answers == 1
    request.finished(0)
    assert request.closed


def test_unaligned_lengths_and_groups_of_different_block_sizes():
    model = ModelSpec((FullAttention(32), SlidingWindow(8, 8)))
    request = KVRequest(Planner(model), POLICY, 100)
    offered_nothing = request.consider(0, 100, 0)
    request.lookup_answered(offered_nothing.ticket, ((), ()), 0)
    request.consider(0, 100, 0)
    request.granted(0)
    assert request.computed(60).blocks == (((0, 1),), ((3, 4),))
    assert request.computed(70).blocks == (((1, 2),), ((7, 8),))
    assert request.computed(100).blocks == (((2, 3),), ((11, 12),))

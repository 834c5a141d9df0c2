"""With reads or writes switched off a request asks, loads or stores nothing, goes on, and makes up for it later."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvcore.access import ALL_ACCESS, NO_ACCESS, Access, Switch
from kvcore.admission import AdmitAll, AdmitNone
from kvcore.memory import Experience
from kvcore.plans import Lookup, Offer
from kvcore.request import KVRequest, State
from tests.kvcore.one_request import ALL, POLICY, PROMPT, B, answer, blocks, loading, machine, offered
from tests.kvcore.pool_world import World
from tests.kvcore.test_request_stateful import Interleavings

NO_READS = Access(reads=Switch.OFF)
NO_WRITES = Access(writes=Switch.OFF)
ACCESSES = (ALL_ACCESS, NO_READS, NO_WRITES, NO_ACCESS)


def switch(request, access):
    request.policy = access.limit(POLICY)


def test_all_access_changes_nothing_and_two_limits_are_both_kept():
    assert ALL_ACCESS.limit(POLICY) is POLICY
    for one in ACCESSES:
        assert one.within(ALL_ACCESS) == ALL_ACCESS.within(one) == one.within(one) == one
        assert one.within(NO_ACCESS) == NO_ACCESS
        assert one.limit(one.limit(POLICY)) == one.limit(POLICY)
    assert NO_READS.within(NO_WRITES) == NO_ACCESS


# -- reads ------------------------------------------------------------------------------------------------------------


def test_with_reads_off_nothing_is_asked_and_nobody_waits():
    request = machine()
    switch(request, NO_READS)
    assert (request.consider(0, PROMPT, 0), request.reconsider_at_ns) == (Offer(0), None)
    switch(request, ALL_ACCESS)
    assert isinstance(request.consider(0, PROMPT, 1), Lookup)


def test_one_that_waits_for_an_answer_goes_on_and_hits_when_reads_are_on_again():
    request = machine()
    lookup = request.consider(0, PROMPT, 0)
    switch(request, NO_READS)
    assert request.consider(0, PROMPT, 1) == Offer(0)
    answer(request, lookup, ALL, 2)
    assert request.consider(0, PROMPT, 3) == Offer(0)
    switch(request, ALL_ACCESS)
    assert request.consider(0, PROMPT, 4) == Offer(10 * B)
    assert request.decisions.late_lookups == request.decisions.late_answers == 0


def test_an_answer_that_comes_when_the_request_has_gone_on_is_late():
    request = machine()
    lookup = request.consider(0, PROMPT, 0)
    switch(request, NO_READS)
    assert request.consider(0, PROMPT, 1) == Offer(0)
    assert request.granted(0, 1) is None
    answer(request, lookup, ALL, 2)
    assert request.decisions.late_answers == 1


def test_what_was_offered_may_still_be_granted_and_a_load_under_way_counts():
    request = machine()
    offer = offered(request, ALL)
    switch(request, NO_ACCESS)
    load = request.granted(offer.num_tokens, 0)
    assert load.blocks == ALL
    assert request.load_finished(load.ticket, blocks(), 1) == 10 * B
    assert request.state is State.COMPUTING


def test_one_whose_load_fails_with_reads_off_computes():
    request, load = loading()
    switch(request, NO_READS)
    assert request.load_finished(load.ticket, ALL, 1) == 0
    assert request.consider(0, PROMPT, 2) == Offer(0)


# -- writes -----------------------------------------------------------------------------------------------------------


def of_one_engine(experience, access=ALL_ACCESS, local=0):
    """A request that computes, of those that have the same blocks."""
    request = KVRequest(machine().planner, access.limit(POLICY), PROMPT, experience)
    if access.reads is Switch.ON:
        offered(request, blocks(), local)
    else:
        request.consider(local, PROMPT, 0)
    request.granted(0, 0)
    return request


def test_with_writes_off_nothing_is_stored_and_the_next_to_touch_it_stores_it():
    experience = Experience()
    request = of_one_engine(experience, NO_WRITES)
    assert request.computed(PROMPT, 0) is None
    assert request.finished(PROMPT + 2 * B, 0) is None
    assert request.closed
    assert (len(experience.unsaved), experience.num_storing) == (12, 0)
    again = of_one_engine(experience, local=5 * B)  # these it finds in the engine's own cache
    assert again.computed(PROMPT, 1).blocks == ALL


def test_what_was_refused_before_is_kept_in_mind_beyond_a_touch_with_writes_off():
    experience = Experience()
    request = of_one_engine(experience)
    store = request.computed(PROMPT, 0)
    request.store_finished(store.ticket, blocks((2, 4)), 1)
    switch(request, NO_WRITES)
    assert request.finished(PROMPT, 2) is None
    assert of_one_engine(experience, NO_WRITES, local=8 * B).computed(PROMPT, 3) is None
    assert of_one_engine(experience, local=8 * B).computed(PROMPT, 4).blocks == blocks((2, 4), (8, 10))


def test_a_request_that_runs_stores_what_it_fills_from_then_on():
    request = of_one_engine(Experience())
    assert request.computed(2 * B, 0).blocks == blocks((0, 2))
    switch(request, NO_WRITES)
    assert request.computed(4 * B, 0) is None
    switch(request, ALL_ACCESS)
    assert request.computed(6 * B, 0).blocks == blocks((4, 6))


def test_a_store_under_way_ends_as_it_would_have():
    request = of_one_engine(Experience())
    store = request.computed(PROMPT, 0)
    switch(request, NO_ACCESS)
    request.finished(PROMPT, 1)
    assert not request.closed
    request.store_finished(store.ticket, blocks(), 2)
    assert request.closed
    assert request.decisions.stored == ALL


def test_an_engine_that_never_stores_keeps_nothing_in_mind():
    reader = replace(POLICY, admission=AdmitNone())
    assert NO_WRITES.limit(reader) == reader
    assert NO_WRITES.limit(POLICY).stores


# -- any interleaving -------------------------------------------------------------------------------------------------


class Switched(Interleavings):
    """In an incident, too, every request ends, nothing leaks, and no plan is made that is switched off."""

    @rule(access=st.sampled_from(ACCESSES))
    def switch(self, access):
        self.world.switch(access)


SEARCH = settings(
    max_examples=60, stateful_step_count=50, phases=[Phase.generate], database=None, derandomize=True,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck), deadline=None,
)  # fmt: skip


def test_switched_at_any_time():
    run_state_machine_as_test(Switched, settings=SEARCH)


class AsksAnyway(KVRequest):
    """The policy is read when the request arrives."""

    def consider(self, local_hit_len, num_tokens, now_ns):
        self.policy = replace(self.policy, max_load_attempts=1)
        return super().consider(local_hit_len, num_tokens, now_ns)


class StoresAnyway(KVRequest):
    def computed(self, num_tokens, now_ns):
        self.policy = replace(self.policy, admission=AdmitAll())
        return super().computed(num_tokens, now_ns)


@pytest.mark.parametrize("wrong", [AsksAnyway, StoresAnyway])
def test_control_a_request_that_does_not_heed_the_switch(wrong):
    world = type("Wrong", (World,), {"machine": wrong})
    with pytest.raises(AssertionError, match="are off"):
        run_state_machine_as_test(type("Unheeded", (Switched,), {"world_type": world}), settings=SEARCH)

"""The pool's policies in a scenario: named, checked, and at work."""

import pytest

from kvcore.admission import AdmitAll, AdmitCheaper, AdmitSecondTouch
from kvcore.eviction.leaf_first import LeafFirstRuns
from kvcore.eviction.lru import LruRuns
from kvcore.eviction.session_aware import SessionAwareRuns
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.loading import LoadAlways, LoadCheaper, LoadInTime
from kvsim.clock import PS_PER_NS
from kvsim.config.pool import ADMISSIONS, EVICTIONS, LOADINGS
from kvsim.cost.roofline import Roofline
from kvsim.demo_command import DEMO
from kvsim.invariants import check
from kvsim.metrics import measure
from kvsim.pool.policy import make_costs, make_planner, make_policy
from kvsim.pool.store import MooncakePool
from kvsim.run import decisions_digest, simulation
from kvsim.scenario import load
from kvsim.sessions import Sessions
from kvsim.toml import InvalidToml
from kvsim.workload.source import trace_of

WITH = DEMO[1]
# 17 sessions in step on 4 instances: round robin sends a session's next turn to another instance.
SMALL = ["cluster.instances=4", "workload.sessions=17", "workload.turns=4", "workload.common_len=1000"]
SLOW_LINK = "link.bandwidth_bytes_per_s=1e9"  # a token of 131,072 bytes takes 131 us, to compute about 50


def policy_of(*settings):
    scenario = load(WITH, settings)
    return make_policy(scenario, scenario.pool)


def finished_run(*settings):
    scenario = load(WITH, [*SMALL, *settings])
    done = simulation(scenario, trace_of(scenario))
    done.run()
    assert check(done) == "ok"
    return done


def test_a_scenario_names_its_policies():
    assert (policy_of().admission, policy_of().loading) == (AdmitAll(), LoadAlways())
    admissions = [policy_of(f"pool.admission={name}").admission for name in ADMISSIONS]
    assert [type(policy) for policy in admissions] == [AdmitAll, AdmitSecondTouch, AdmitCheaper]
    budget = {"in_time": ["pool.load_budget_ms=70"]}
    loadings = [policy_of(f"pool.loading={name}", *budget.get(name, [])).loading for name in LOADINGS]
    assert [type(policy) for policy in loadings] == [LoadAlways, LoadCheaper, LoadInTime]
    assert loadings[-1].budget_ns == 70_000_000


def test_stores_in_flight_pin_the_share_that_they_may_in_a_connector():
    blocks = "engine.num_gpu_blocks=1003"
    assert policy_of(blocks).max_storing_blocks == 250
    assert policy_of(blocks, "pool.max_storing_share=1").max_storing_blocks == 1003
    assert policy_of(blocks, "pool.max_storing_share=1e-9").max_storing_blocks == 1


def test_what_finds_no_room_beside_other_stores_is_stored_later_or_never():
    plain, roomy, narrow = (finished_run(SLOW_LINK, f"pool.max_storing_share={share}") for share in (0.25, 1.0, 1e-9))
    assert decisions_digest(plain.decisions()) == decisions_digest(roomy.decisions())
    assert 0 < narrow.pool.store.counters.put < plain.pool.store.counters.put
    assert narrow.pool.store.counters.rejected == 0, "refused by the machines, never sent"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["pool.eviction=session"], "pool.eviction = 'session': expected a known name; did you mean session_aware?"),
        (["pool.eviction=0"], "pool.eviction = 0: expected a valid string"),
        (["pool.eviction=x"], "pool.eviction = 'x': expected one of mooncake, lru, leaf_first, session_aware"),
        (["pool.admission=second"], "pool.admission = 'second': expected a known name; did you mean second_touch?"),
        (["pool.loading=cheap"], "pool.loading = 'cheap': expected a known name; did you mean cheaper?"),
        (["pool.loading=in_time"], 'pool.load_budget_ms: expected a number of milliseconds with pool.loading'),
        (["pool.load_budget_ms=5"], "pool.load_budget_ms = 5: expected a number of milliseconds with pool.loading"),
        (["pool.session_pin=firm"], "pool.session_pin = 'firm': expected 'none', 'soft' or 'hard'"),
        (["pool.session_priority=101"], "pool.session_priority.0 = 101: expected less than or equal to 100"),
        (["pool.session_priority=[0, -1]"], "pool.session_priority.1 = -1: expected greater than or equal to 0"),
        (["pool.session_priority=[]"], "pool.session_priority = []: expected a number from 0 to 100, or a list"),
        (["pool.max_storing_share=0"], "pool.max_storing_share = 0: expected greater than 0"),
        (["pool.session_ttl_s=0"], "pool.session_ttl_s = 0: expected greater than 0"),
        (["pool.retention_interval=24"], "expected pool.retention_interval to be a multiple of 16 tokens"),
        (["pool.retention_interval=[16, 0]"], "expected 1 pool.retention_interval, one for each group, not 2"),
        (["pool.retention_interval=-16"], "pool.retention_interval = -16: expected \"all\", 0 or a number of tokens"),
        (["pool.retention_interval=true"], "pool.retention_interval = True: expected \"all\", 0"),
        (["pool.retention_interval=['some']"], "pool.retention_interval = ['some']: expected \"all\", 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_how_to_mend_it(settings, message):
    with pytest.raises(InvalidToml) as mistake:
        load(WITH, settings)
    assert message in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    ("text", "retention"),
    [("'all'", None), ("0", 0), ("64", 64), ("1e3", 1_000), ("[64]", (64,)), ("['all']", (None,))],
)
def test_retention_is_of_all_groups_or_of_each(text, retention):
    scenario = load(WITH, [f"pool.retention_interval={text}", "engine.block_size=8"])
    assert make_planner(scenario, scenario.pool).retention == retention


def test_costs_are_those_of_link_and_steps():
    scenario = load(WITH, ["engine.max_num_batched_tokens=1000", "link.latency_us=7"])
    costs = make_costs(scenario)
    one_block_ns = 16 * 131_072 * 10**9 / 9_878_424_780
    assert costs.fetch_ns((((0, 10),),)) == pytest.approx(7_000 + 10 * one_block_ns, rel=1e-4)
    steps = Roofline(scenario.llm, scenario.gpu)
    by_hand_ps = sum(steps.step_ps([chunk], 0, 0) for chunk in [(500, 1_000), (1_500, 1_000), (2_500, 1)])
    assert costs.prefill_ns(500, 2_501) == by_hand_ps // PS_PER_NS
    assert costs.prefill_ns(500, 500) == 0


def test_over_a_slow_link_hits_are_computed_instead_and_nothing_is_stored():
    always, cheaper = finished_run(SLOW_LINK), finished_run(SLOW_LINK, "pool.loading=cheaper")
    assert sum(decision.granted_len for decision in always.decisions()) > 0
    assert sum(decision.granted_len for decision in cheaper.decisions()) == 0
    assert measure(cheaper.log, 1).ttft_s.mean < measure(always.log, 1).ttft_s.mean
    assert finished_run(SLOW_LINK, "pool.admission=cheaper").pool.store.counters.put == 0


def test_over_a_fast_link_cost_changes_nothing():
    plain = decisions_digest(finished_run().decisions())
    assert decisions_digest(finished_run("pool.admission=cheaper", "pool.loading=cheaper").decisions()) == plain


def test_a_load_that_is_slower_but_in_time_is_fetched():
    late, in_time = (finished_run(SLOW_LINK, "pool.loading=in_time", f"pool.load_budget_ms={ms}") for ms in (1, 60_000))
    assert sum(decision.granted_len for decision in late.decisions()) == 0
    assert decisions_digest(in_time.decisions()) == decisions_digest(finished_run(SLOW_LINK).decisions())


def test_second_touch_stores_less_and_hits_less_without_affinity():
    plain, second = finished_run(), finished_run("pool.admission=second_touch")
    assert 0 < second.pool.store.counters.put < plain.pool.store.counters.put
    assert measure(second.log, 1).hit_rate < measure(plain.log, 1).hit_rate


def test_a_scenario_names_who_leaves_a_full_pool():
    small = "pool.segment_bytes_per_instance=5e9"
    plain, *others = (finished_run(small, f"pool.eviction={name}") for name in EVICTIONS)
    assert type(plain.pool.store) is MooncakePool and plain.pool.store.counters.evicted > 0
    policies = [type(done.pool.store._policy) for done in others]
    assert policies == [LruRuns, LeafFirstRuns, SessionAwareRuns]
    assert decisions_digest(finished_run(small).decisions()) == decisions_digest(plain.decisions())
    assert len({decisions_digest(done.decisions()) for done in (plain, *others)}) == 4


def test_who_leaves_first_is_nothing_while_there_is_room():
    roomy = {decisions_digest(finished_run(f"pool.eviction={name}").decisions()) for name in EVICTIONS}
    assert len(roomy) == 1


def test_what_a_session_pins_is_kept_until_it_ends():
    small = "pool.segment_bytes_per_instance=5e9"
    plain, pinned = finished_run(small), finished_run(small, "pool.session_pin=soft")
    assert plain.pool.store.counters.evicted > 0
    assert decisions_digest(pinned.decisions()) != decisions_digest(plain.decisions())
    assert not pinned.pool.store._pins._by_session, "every session has ended, and released what it pinned"
    assert pinned.pool.store._pins._ended == {str(session) for session in range(17)}


def test_what_a_session_pins_hard_is_evicted_never_and_what_finds_no_room_is_refused():
    small = "pool.segment_bytes_per_instance=5e9"
    plain, pinned = finished_run(small), finished_run(small, "pool.session_pin=hard")
    assert plain.pool.store.counters.rejected == 0 < pinned.pool.store.counters.rejected
    assert pinned.pool.store.counters.evicted_pinned == 0
    assert pinned.pool.store.counters.evicted < plain.pool.store.counters.evicted
    assert not pinned.pool.store._pins._by_session, "every session has ended, and released what it pinned"


def test_sessions_take_priorities_in_turn_and_those_of_more_keep_more():
    small = "pool.segment_bytes_per_instance=5e9"
    plain, alike, ranked = (
        finished_run(small),
        *(finished_run(small, f"pool.session_priority={priority}") for priority in ("7", "[0, 100]")),
    )
    assert decisions_digest(alike.decisions()) == decisions_digest(plain.decisions())
    session = trace_of(load(WITH, SMALL)).session
    loaded = [
        sum(d.granted_len for d, s in zip(ranked.decisions(), session, strict=True) if s % 2 == odd) for odd in (0, 1)
    ]
    assert 2 * loaded[0] < loaded[1]


def test_pins_change_nothing_while_there_is_room():
    roomy = decisions_digest(finished_run("pool.session_pin=soft").decisions())
    assert roomy == decisions_digest(finished_run().decisions())


def test_a_session_ends_with_the_last_of_its_requests_that_fits():
    trace = trace_of(load(WITH, ["workload.sessions=2", "workload.turns=3"]))
    longest = int((trace.input_len + trace.output_len).max())
    everything, all_but_last = (Sessions(trace, capacity, Pin.SOFT, 5) for capacity in (longest, longest - 1))
    own = [index for index in range(6) if trace.session[index] == trace.session[0]]
    assert [everything.finished(index) for index in own] == [None, None, str(trace.session[0])]
    assert [all_but_last.finished(index) for index in own[:2]] == [None, str(trace.session[0])]
    assert everything.hints(own[0]) == Hints(str(trace.session[0]), Pin.SOFT, 5)
    assert Sessions(trace, longest, Pin.HARD, None, [3]).hints(own[0]) == Hints(
        str(trace.session[0]), Pin.HARD, None, 3
    )
    ranked = Sessions(trace, longest, Pin.NONE, None, [0, 9])
    assert {ranked.hints(request) for request in range(6)} == {NO_HINTS, Hints(priority=9)}
    silent = Sessions(trace, longest, Pin.NONE, 5)
    assert [silent.finished(index) for index in own] == [None] * 3 and silent.hints(0) is NO_HINTS

"""The breaker is what its rules say of the whole history, whatever happens in which order; each rule is needed."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvcore.access import ALL_ACCESS, NO_ACCESS
from kvcore.breaker import Attempt, Breaker, BreakerState, Tolerance
from kvcore.errors import InvalidArgument

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
TOLERANCE = Tolerance(max_failures=3, min_silence_ns=100, first_probe_ns=1_000, max_probe_ns=3_000)


# -- one move at a time -----------------------------------------------------------------------------------------------


def opened(breaker, now_ns):
    """By calls that begin now and fail when it is tolerated no more."""
    while breaker.state is CLOSED:
        breaker.failed(breaker.begin(now_ns), now_ns + breaker.tolerance.min_silence_ns)
    return now_ns + breaker.tolerance.min_silence_ns


def probed(breaker, answered):
    """At the time that the breaker wants it; that time."""
    now_ns = breaker.probe_at_ns
    breaker.begin_probe(now_ns)
    if answered:
        breaker.probe_answered()
    else:
        breaker.probe_failed(now_ns)
    return now_ns


def test_it_opens_with_the_last_of_the_failures_and_lets_nothing_through():
    breaker = Breaker(TOLERANCE)
    for number in range(3):
        assert (breaker.state, breaker.access) == (CLOSED, ALL_ACCESS)
        breaker.failed(breaker.begin(100 * number), 100 * (number + 1))
    assert (breaker.state, breaker.access, breaker.probe_at_ns) == (OPEN, NO_ACCESS, 1_300)
    assert breaker.begin(400) is None
    breaker.begin_probe(1_300)
    assert (breaker.state, breaker.access, breaker.begin(1_300)) == (HALF_OPEN, NO_ACCESS, None)


def test_calls_that_are_short_of_time_all_at_once_do_not_open_it():
    breaker = Breaker(TOLERANCE)
    for now_ns in range(50):
        breaker.failed(breaker.begin(now_ns), now_ns + 1)
    assert breaker.state is CLOSED
    breaker.failed(breaker.begin(99), 100)
    assert breaker.state is OPEN


def test_probes_in_vain_come_less_and_less_often_up_to_a_bound():
    breaker = Breaker(TOLERANCE)
    times = [opened(breaker, 0), *(probed(breaker, answered=False) for _ in range(5))]
    assert [after - before for before, after in pairwise(times)] == [1_000, 2_000, 3_000, 3_000, 3_000]


def test_a_pool_that_only_answers_probes_is_asked_less_and_less_often():
    breaker = Breaker(TOLERANCE)
    opened(breaker, 0)
    waits = []
    for _ in range(4):
        now_ns = probed(breaker, answered=True)
        breaker.failed(breaker.begin(now_ns), now_ns + 100)
        assert breaker.state is OPEN, "one failure is enough"
        waits.append(breaker.probe_at_ns - now_ns - 100)
    assert waits == [2_000, 3_000, 3_000, 3_000]
    now_ns = probed(breaker, answered=True)
    breaker.succeeded(breaker.begin(now_ns))
    now_ns = opened(breaker, now_ns)
    assert breaker.probe_at_ns - now_ns == 1_000


def test_what_began_before_it_opened_says_nothing_after_it_has_closed():
    breaker = Breaker(TOLERANCE)
    slow = breaker.begin(0)
    opened(breaker, 0)
    now_ns = probed(breaker, answered=True)
    breaker.failed(slow, now_ns)
    assert breaker.state is CLOSED
    breaker.succeeded(slow)
    breaker.failed(breaker.begin(now_ns), now_ns + 100)
    assert breaker.state is OPEN, "the old success does not count either"


def test_a_pool_that_is_known_to_be_gone_need_not_fail_first():
    breaker = Breaker(TOLERANCE)
    breaker.lost(7)
    assert (breaker.state, breaker.probe_at_ns) == (OPEN, 1_007)
    breaker.lost(500)
    assert breaker.probe_at_ns == 1_007


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_failures": 0}, "max_failures = 0: expected at least 1"),
        ({"min_silence_ns": -1}, "min_silence_ns"),
        ({"first_probe_ns": 0}, "first_probe_ns"),
        ({"max_probe_ns": 999}, "max_probe_ns = 999: expected at least first_probe_ns, 1000"),
    ],
)
def test_a_tolerance_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(TOLERANCE, **change)


# -- any history ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """An event; of a call that ended also how many events had come before it began, and when that was."""

    what: str
    at_ns: int
    began: int | None = None
    began_ns: int | None = None


def expected(history, tolerance):
    """(state, when a probe is due) by the definition: from the list of failures, not from a count of them."""
    state, probe_at_ns, closed_at, on_probation = CLOSED, None, 0, False
    failures, openings = [], 0  # in a row, and since the last success
    for index, event in enumerate(history):
        counts = state is CLOSED and event.began is not None and event.began >= closed_at
        if counts and event.what == "succeeded":
            failures, openings, on_probation = [], 0, False
        elif counts:
            failures.append(event)
        enough = len(failures) >= (1 if on_probation else tolerance.max_failures)
        too_many = (
            counts and enough and event.at_ns - min(each.began_ns for each in failures) >= tolerance.min_silence_ns
        )
        if too_many or event.what == "probe failed" or (state is CLOSED and event.what == "lost"):
            state = OPEN
            probe_at_ns = event.at_ns + min(tolerance.first_probe_ns * 2**openings, tolerance.max_probe_ns)
            openings += 1
        elif event.what == "probe":
            state, probe_at_ns = HALF_OPEN, None
        elif event.what == "probe answered":
            state, closed_at, on_probation, failures = CLOSED, index + 1, True, []
    return state, probe_at_ns


class Histories(RuleBasedStateMachine):
    """Calls that overlap, end late or never, and probes whenever they are due."""

    breaker_type = Breaker

    @initialize(
        tolerance=st.builds(
            Tolerance, st.integers(1, 3), st.sampled_from((0, 5, 20)), st.just(10), st.sampled_from((10, 25, 80))
        )
    )
    def start(self, tolerance):
        self.breaker = self.breaker_type(tolerance)
        self.now_ns, self.history, self.calls = 0, [], []

    def tell(self, what, *began):
        self.history.append(Told(what, self.now_ns, *began))
        self.check()

    def check(self):
        state, probe_at_ns = expected(self.history, self.breaker.tolerance)
        assert (self.breaker.state, self.breaker.probe_at_ns) == (state, probe_at_ns)
        assert self.breaker.access is (ALL_ACCESS if state is CLOSED else NO_ACCESS)

    @rule(duration_ns=st.sampled_from((1, 3, 6, 15, 40)))
    def pass_time(self, duration_ns):
        self.now_ns += duration_ns

    @rule()
    def begin(self):
        attempt = self.breaker.begin(self.now_ns)
        assert (attempt is not None) == (self.breaker.state is CLOSED)
        if attempt is not None:
            self.calls.append((attempt, len(self.history), self.now_ns))

    @precondition(lambda self: self.calls)
    @rule(index=st.integers(0, 3), succeeded=st.sampled_from((False, False, True)))
    def end(self, index, succeeded):
        attempt, *began = self.calls.pop(index % len(self.calls))
        if succeeded:
            self.breaker.succeeded(attempt)
        else:
            self.breaker.failed(attempt, self.now_ns)
        self.tell("succeeded" if succeeded else "failed", *began)

    @rule(duration_ns=st.sampled_from((1, 6, 40)), succeeded=st.sampled_from((False, False, True)))
    def call(self, duration_ns, succeeded):
        """One that nothing comes between."""
        before = len(self.calls)
        self.begin()
        if len(self.calls) > before:
            self.pass_time(duration_ns)
            self.end(before, succeeded)

    @rule(unlucky=st.integers(0, 9))
    def lose(self, unlucky):
        if not unlucky:
            self.breaker.lost(self.now_ns)
            self.tell("lost")

    @precondition(lambda self: self.breaker.state is CLOSED and self.calls)
    @rule(unlucky=st.integers(0, 3))
    def restart(self, unlucky):
        """The pool is gone and back while calls are under way."""
        if not unlucky:
            self.breaker.lost(self.now_ns)
            self.tell("lost")
            self.probe(0)
            self.end_probe(True)

    @precondition(lambda self: self.breaker.state is OPEN)
    @rule(late_ns=st.sampled_from((0, 0, 4)))
    def probe(self, late_ns):
        self.now_ns = max(self.now_ns, self.breaker.probe_at_ns + late_ns)
        self.breaker.begin_probe(self.now_ns)
        self.tell("probe")

    @precondition(lambda self: self.breaker.state is HALF_OPEN)
    @rule(answered=st.booleans())
    def end_probe(self, answered):
        if answered:
            self.breaker.probe_answered()
        else:
            self.breaker.probe_failed(self.now_ns)
        self.tell("probe answered" if answered else "probe failed")


SEARCH = settings(
    max_examples=120, stateful_step_count=40, phases=[Phase.generate], database=None, derandomize=True,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck), deadline=None,
)  # fmt: skip


def search(breaker_type, effort=SEARCH):
    run_state_machine_as_test(type("Searched", (Histories,), {"breaker_type": breaker_type}), settings=effort)


def test_any_history_leaves_it_as_the_rules_say():
    search(Breaker)


class CountsLateReports(Breaker):
    def _counts(self, attempt):
        return self.state is CLOSED


class CountsAllFailures(Breaker):
    def succeeded(self, attempt):
        pass


class MindsNoSilence(Breaker):
    def failed(self, attempt, now_ns):
        super().failed(attempt._replace(begun_ns=-1_000), now_ns)


class TrustsAProbe(Breaker):
    def probe_answered(self):
        super().probe_answered()
        self._num_failures = 0


class HurriesAfterAProbe(Breaker):
    def probe_answered(self):
        super().probe_answered()
        self._wait_ns = self.tolerance.first_probe_ns


class NeverWaitsLonger(Breaker):
    def _open(self, now_ns):
        super()._open(now_ns)
        self._wait_ns = self.tolerance.first_probe_ns


class WaitsEverLonger(Breaker):
    def _open(self, now_ns):
        wait_ns = self._wait_ns
        super()._open(now_ns)
        self._wait_ns = 2 * wait_ns


class AsksWhileHalfOpen(Breaker):
    def begin(self, now_ns):
        return super().begin(now_ns) or (self.state is HALF_OPEN and Attempt(self._era, now_ns)) or None


@pytest.mark.parametrize(
    "wrong",
    [
        CountsLateReports, CountsAllFailures, MindsNoSilence, TrustsAProbe, HurriesAfterAProbe, NeverWaitsLonger,
        WaitsEverLonger, AsksWhileHalfOpen,
    ],
)  # fmt: skip
def test_control_a_breaker_without_one_of_the_rules(wrong):
    with pytest.raises(AssertionError):
        search(wrong, settings(SEARCH, max_examples=1_000))

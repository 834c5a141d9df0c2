"""A guarded store keeps the contract; once it does not answer it is left alone, until a probe is answered."""

import logging
import threading
import time
from dataclasses import replace

import pytest
from kvconnector.guard import GuardedStore

from kvcore.access import ALL_ACCESS, NO_ACCESS
from kvcore.breaker import Breaker, BreakerState, Tolerance
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.memory_store import MemoryStore
from kvcore.ports import StoreOutcome
from kvcore.units import NS_PER_MS
from tests.contract.store_contract import StoreContract, StoreUnderTest
from tests.contract.test_memory_store import memory_subject
from tests.kvconnector.logged import logged
from tests.kvconnector.test_transfer import HandClock, MonotonicClock

OK, MISSING, NO_SPACE, TIMEOUT, UNAVAILABLE = (
    StoreOutcome.OK, StoreOutcome.MISSING, StoreOutcome.NO_SPACE, StoreOutcome.TIMEOUT, StoreOutcome.UNAVAILABLE,
)  # fmt: skip
KEYS = [BlockKey(Namespace("n"), 0, 0, BlockHash(bytes([number + 1]))) for number in range(2)]
SOON_NS = 1 << 60
TOLERANCE = Tolerance(max_failures=2, min_silence_ns=0, first_probe_ns=5 * NS_PER_MS, max_probe_ns=20 * NS_PER_MS)


class Pool:
    """Answers every call with `outcomes`; a probe is answered when `alive`."""

    def __init__(self):
        self.outcomes, self.alive, self.calls, self.probes = [MISSING, MISSING], False, 0, 0

    def exists(self, *arguments):
        self.calls += 1
        return self.outcomes

    get = put = remove = exists

    def join(self, deadline_ns):
        return self.alive

    def answers(self, deadline_ns):
        self.probes += 1
        return self.alive

    def close(self):
        self.closed = True


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def guarded(pool):
    made = []

    def make(tolerance=TOLERANCE, clock=None):
        made.append(GuardedStore(pool, Breaker(tolerance), clock or MonotonicClock(), "worker"))
        return made[-1]

    yield make
    for store in made:
        store.close()


def calls(store):
    yield lambda: store.exists(KEYS, SOON_NS)
    yield lambda: store.remove(KEYS, SOON_NS)
    yield lambda: store.get(KEYS, [[], []], SOON_NS)
    yield lambda: store.put(KEYS, [[], []], SOON_NS)


def open_by_failing(store, pool):
    pool.outcomes = [TIMEOUT, UNAVAILABLE]
    for _ in range(TOLERANCE.max_failures):
        assert store.state is BreakerState.CLOSED
        assert store.exists(KEYS, SOON_NS) == pool.outcomes
    assert store.access == NO_ACCESS


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class TestGuardedStore(StoreContract):
    @pytest.fixture
    def subject(self):
        inner = memory_subject(MemoryStore)
        store = GuardedStore(inner.store, Breaker(), inner.clock, "worker")
        yield StoreUnderTest(store, inner.clock, inner.namespace, bytearray, bytes)
        assert store.access == ALL_ACCESS, "nothing that the contract asks for is a failure"


@pytest.mark.parametrize("number", range(4))
def test_calls_of_each_kind_count_and_are_turned_away(guarded, pool, number):
    store = guarded()
    call = list(calls(store))[number]
    pool.outcomes = [UNAVAILABLE, TIMEOUT]
    assert [call() for _ in range(2)] == [pool.outcomes] * 2
    assert store.state is not BreakerState.CLOSED
    assert [each() for each in calls(store)] == [[UNAVAILABLE, UNAVAILABLE]] * 4
    assert pool.calls == 2


@pytest.mark.parametrize("outcomes", [[MISSING, UNAVAILABLE], [NO_SPACE, NO_SPACE], [TIMEOUT, OK]])
def test_an_answer_for_one_key_is_an_answer(guarded, pool, outcomes):
    store = guarded()
    for pool.outcomes in ([TIMEOUT, TIMEOUT], outcomes) * 4:
        store.exists(KEYS, SOON_NS)
    assert store.state is BreakerState.CLOSED


def test_a_call_that_asked_nothing_says_nothing(guarded, pool):
    clock = HandClock()
    store = guarded(clock=clock)
    pool.outcomes = [TIMEOUT, TIMEOUT]
    for _ in range(5):
        store.put(KEYS, [[], []], clock.now_ns())  # too late already
    pool.outcomes = []
    for _ in range(5):
        store.exists([], SOON_NS)
    assert store.state is BreakerState.CLOSED


def test_it_closes_by_itself_when_a_probe_is_answered(guarded, pool):
    store = guarded()
    open_by_failing(store, pool)
    until(lambda: pool.probes >= 3)
    assert store.state is not BreakerState.CLOSED
    pool.alive, pool.outcomes = True, [OK, MISSING]
    until(lambda: store.state is BreakerState.CLOSED)
    assert (pool.calls, store.access) == (2, ALL_ACCESS)
    assert store.exists(KEYS, SOON_NS) == [OK, MISSING]
    probes = pool.probes
    time.sleep(0.05)
    assert pool.probes == probes, "one that answers is not probed"


def test_a_pool_that_cannot_be_joined_is_not_asked_until_it_is_there(guarded, pool):
    store = guarded()
    assert not store.join(SOON_NS)
    assert store.exists(KEYS, SOON_NS) == [UNAVAILABLE] * 2
    pool.alive = True
    until(lambda: store.state is BreakerState.CLOSED)
    assert store.exists(KEYS, SOON_NS) == [MISSING] * 2
    assert pool.calls == 1
    assert store.join(SOON_NS)


def test_no_probe_comes_before_its_time(guarded, pool):
    clock = HandClock()
    store = guarded(clock=clock)
    open_by_failing(store, pool)
    time.sleep(0.03)
    assert (store.state, pool.probes) == (BreakerState.OPEN, 0)
    pool.alive = True
    clock.pass_ms(5)
    until(lambda: store.state is BreakerState.CLOSED)


def test_while_a_probe_hangs_calls_are_turned_away_at_once(guarded, pool):
    store = guarded()
    probing, may_end = threading.Event(), threading.Event()

    def answers(deadline_ns):
        probing.set()
        return may_end.wait(5)

    pool.answers = answers
    open_by_failing(store, pool)
    assert probing.wait(5)
    start = time.monotonic()
    assert store.exists(KEYS, SOON_NS) == [UNAVAILABLE] * 2
    assert time.monotonic() - start < 0.5
    assert (store.state, pool.calls) == (BreakerState.HALF_OPEN, 2)
    may_end.set()
    until(lambda: store.state is BreakerState.CLOSED)


def test_after_close_nothing_is_probed(guarded, pool):
    store = guarded()
    open_by_failing(store, pool)
    store.close()
    assert (pool.closed, store._prober.is_alive()) == (True, False)
    probes = pool.probes
    time.sleep(0.05)
    assert pool.probes == probes


def test_the_log_has_each_change_and_whose_it_is(guarded, pool):
    with logged("kvconnector.guard", logging.DEBUG) as said:
        store = guarded(replace(TOLERANCE, first_probe_ns=100 * NS_PER_MS, max_probe_ns=100 * NS_PER_MS))
        open_by_failing(store, pool)
        until(lambda: pool.probes >= 2)
        pool.alive = True
        until(lambda: store.state is BreakerState.CLOSED)
        until(lambda: "again" in said[-1])
    assert said[:4] == [
        "kvtwin: worker half: the pool does not answer and is not asked any more, only probed",
        "kvtwin: worker half: the pool is probed",
        "kvtwin: worker half: the pool does not answer the probe",
        "kvtwin: worker half: the pool is probed",
    ]
    assert said[-1] == "kvtwin: worker half: the pool answers and is asked again"

"""Of what took long to read, that is believed which is in the pool afterwards: the rest may be other bytes."""

import pytest
from kvconnector.pool_config import PoolConfig
from kvconnector.store import DOUBTFUL_NS, MooncakeStore

from kvcore.units import NS_PER_MS
from tests.kvconnector.test_store import KEY, MISSING, OK, SOON_NS, UNAVAILABLE, Client, library
from tests.kvconnector.test_store import client as client  # fixtures
from tests.kvconnector.test_store import clock as clock
from tests.kvconnector.test_store import master as master
from tests.kvconnector.test_store import own_environment as own_environment


class SlowClient(Client):
    """Its reads take as long as it is told to, and succeed; `there` is what it says afterwards."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.takes_ms, self.there = clock, 0, []

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        self.clock.pass_ms(self.takes_ms)
        return [sum(each) for each in sizes]

    def batch_is_exist(self, names):
        self.calls.append(("exists", names))
        return self.there


@pytest.fixture
def slow(clock):
    return SlowClient(clock)


@pytest.fixture
def store(master, slow, clock):
    return MooncakeStore(PoolConfig(master), clock, library(lambda: slow))


@pytest.mark.parametrize(("there", "outcome"), [([1], OK), ([0], MISSING), ([-900], UNAVAILABLE), ([], UNAVAILABLE)])
def test_what_a_slow_read_found_is_asked_for_again(store, slow, there, outcome):
    slow.takes_ms, slow.there = DOUBTFUL_NS // NS_PER_MS, there
    assert store.get([KEY], [[(64, 8)]], SOON_NS) == [outcome]
    assert store.counts["get", outcome] == 1


def test_a_read_in_time_costs_no_question(store, slow):
    slow.takes_ms = DOUBTFUL_NS // NS_PER_MS - 1
    assert store.get([KEY], [[(64, 8)]], SOON_NS) == [OK]
    assert ("exists", ["n-g0-r0-01"]) not in slow.calls


def test_what_is_lost_stays_lost_though_it_is_there(store, slow):
    slow.takes_ms, slow.there = 10_000, [1]
    slow.batch_get_into_multi_buffers = lambda names, addresses, sizes: slow.clock.pass_ms(200) or [-707]
    assert store.get([KEY], [[(64, 8)]], SOON_NS) == [MISSING]


@pytest.mark.parametrize(("answer", "outcome"), [(0, OK), (17, OK), (-900, UNAVAILABLE)])
def test_removal_by_pattern_heeds_leases_and_says_whether_it_was_done(store, slow, answer, outcome):
    slow.remove_by_regex = lambda pattern, force=False: slow.calls.append((pattern, force)) or answer
    assert store.remove_like("^n[-@]") is outcome
    assert slow.calls[-1] == ("^n[-@]", False)

"""What a reset leaves in the pool is removed when nobody can miss it, in the background, and never by force."""

import threading

import pytest

from kvcore.ports import StoreOutcome
from tests.kvconnector.test_events import engines as engines  # a fixture
from tests.kvconnector.test_events import make_engine

pytestmark = pytest.mark.engine


class Pool:
    """Notes what is to be removed; `answers` is set when it may answer."""

    def __init__(self):
        self.patterns, self.answers, self.closed = [], threading.Event(), False
        self.outcome = StoreOutcome.OK

    def remove_like(self, pattern):
        self.patterns.append(pattern)
        self.answers.wait(10)
        return self.outcome

    def close(self):
        self.closed = True


@pytest.fixture
def connector(engines):
    engine, _ = make_engine(engines)
    engine.connector._store = Pool()
    return engine.connector


def wait_for(holds):
    event = threading.Event()
    for _ in range(500):
        if holds():
            return
        event.wait(0.01)
    raise AssertionError("never")


def namespace_of(connector):
    return connector._scheduler.namespace


def test_what_others_may_share_is_left_and_what_was_this_engine_s_alone_goes(connector):
    shared = namespace_of(connector)
    assert connector.reset_cache() is True
    own = namespace_of(connector)
    assert own != shared
    assert connector._store.patterns == []
    assert connector.reset_cache() is True  # though the pool does not answer
    wait_for(lambda: connector._store.patterns == [f"^{own}[-@]"])
    assert namespace_of(connector) not in (own, shared)


def test_an_engine_that_ends_takes_its_own_along(connector):
    connector.reset_cache()
    connector._store.answers.set()
    connector.shutdown()
    assert connector._store.patterns == [f"^{namespace_of(connector)}[-@]"]
    assert connector._store.closed


def test_an_engine_that_ends_waits_a_second_for_it_and_leaves_the_client_alone_that_is_in_the_call(connector):
    connector.reset_cache()
    connector.shutdown()
    assert not connector._store.closed
    connector._store.answers.set()


def test_a_removal_that_failed_is_in_the_log(connector, caplog):
    connector._store.outcome = StoreOutcome.UNAVAILABLE
    connector._store.answers.set()
    connector.reset_cache()
    own = namespace_of(connector)
    with caplog.at_level("WARNING"):
        connector.reset_cache()
        wait_for(lambda: f"{own} was not emptied" in caplog.text)

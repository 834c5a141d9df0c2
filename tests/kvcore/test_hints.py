"""What a hint may say, and that every store of a request carries it."""

import pytest

from kvcore.errors import InvalidArgument
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy, Store
from kvcore.request import KVRequest
from tests.kvcore.one_request import FULL, PROMPT, B, blocks, computing, offered

PINNED = Hints("session", Pin.SOFT, ttl_ns=5, priority=3)


def stores_of(request):
    offered(request, blocks())
    request.granted(0, 0)
    plans = [request.computed(2 * B, 0), request.computed(PROMPT, 0), request.finished(PROMPT + 2 * B, 0)]
    assert all(isinstance(plan, Store) for plan in plans)
    return plans


def test_every_store_carries_the_hints_of_its_request():
    request = KVRequest(Planner(FULL), PoolPolicy(), PROMPT, hints=PINNED)
    assert [plan.hints for plan in stores_of(request)] == [PINNED] * 3


def test_hints_change_no_decision():
    plain = stores_of(KVRequest(Planner(FULL), PoolPolicy(), PROMPT))
    hinted = stores_of(KVRequest(Planner(FULL), PoolPolicy(), PROMPT, hints=PINNED))
    assert [plan.blocks for plan in plain] == [plan.blocks for plan in hinted]


def test_without_hints_there_are_none():
    _, store = computing(5 * B)
    assert store.hints is NO_HINTS
    assert NO_HINTS == Hints(session=None, pin=Pin.NONE, ttl_ns=None, priority=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hints(pin=Pin.SOFT, ttl_ns=-1), "ttl_ns = -1: expected at least 0, or None"),
        (lambda: Hints(ttl_ns=5), "ttl_ns = 5: expected None with pin NONE: only a soft pin ends by itself"),
        (lambda: Hints(pin=Pin.HARD, ttl_ns=5), "ttl_ns = 5: expected None with pin HARD"),
        (lambda: Hints(priority=101), r"priority = 101: expected 0 \(gone first\) to 100"),
        (lambda: Hints(priority=-1), "priority = -1"),
    ],
)
def test_what_the_user_gets_wrong(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()

"""What every eviction policy of the simulated pool must leave to the master: asserted of one policy and any case."""

from copy import deepcopy

from hypothesis import strategies as st

from kvcore.hints import Pin
from kvsim.pool.extents import Extents
from kvsim.pool.pins import SoftPins
from kvsim.pool.store import MooncakePool
from tests.kvsim.test_store import calls, contents
from tests.kvsim.test_store_hints import HINTS, SHAPES

CASES = st.tuples(st.lists(st.tuples(calls(), HINTS), max_size=30), SHAPES)
"""Calls with hints, and (capacity, lease time, watermark, ratio, whether soft pins stay)."""


def pool_of(make, shape):
    capacity, ttl_ns, watermark, ratio, stay = shape
    return make(capacity, (1, 1), ttl_ns, watermark, ratio, SoftPins.STAY if stay else SoftPins.GO_LAST)


def replayed(store, script):
    """(call, hints, now, what was held before it, answer, what is held after it) of each call."""
    now = 0
    for (method, group, segments, runs, pause), hints in script:
        now += pause
        before = contents(store)
        extra = (hints,) if method == "put" else ()
        answer = getattr(store, method)(group, segments, runs, now, *extra)
        store.audit()
        yield (method, group, segments, runs), hints, now, before, answer, contents(store)


def names(group, segments, runs):
    owner = {block: stream for stream, start, end in segments for block in range(start, end)}
    return {(group, owner[block], block) for start, end in runs for block in range(start, end)}


def never_evicts_what_is_leased(make, case):
    script, shape = case
    leased_until = {}
    for (method, group, segments, _), _, now, before, answer, after in replayed(pool_of(make, shape), script):
        if method in ("exists", "get"):
            leased_until.update(dict.fromkeys(names(group, segments, answer), now + shape[1]))
        if method == "put":
            assert {name for name in before - after if now < leased_until.get(name, now)} == set()


def never_evicts_what_is_pinned_hard(make, case):
    script, shape = case
    pinned = set()
    for (method, group, segments, runs), hints, _, before, answer, after in replayed(pool_of(make, shape), script):
        if method == "put":
            assert pinned <= after
            new = names(group, segments, runs) - before - names(group, segments, answer)
            pinned |= new if hints.pin is Pin.HARD else set()
        if method == "remove":
            pinned -= names(group, segments, answer)


def evicts_as_many_as_the_master(make, case):
    """And as many of the pinned ones, from one and the same state, whatever led to it."""
    script, shape = case
    store = pool_of(make, shape)
    now = 0
    for (method, group, segments, runs, pause), hints in script:
        now += pause
        if method == "put":
            master = as_the_master_would(store)
            refused = [pool.put(group, segments, runs, now, hints) for pool in (store, master)]
            assert refused[0] == refused[1]
            assert (store.num_objects, store.counters) == (master.num_objects, master.counters)
        else:
            getattr(store, method)(group, segments, runs, now)


def is_determined_by_its_calls(make, case):
    script, shape = case
    first, second = ([held for *_, held in replayed(pool_of(make, shape), script)] for _ in range(2))
    assert first == second


def as_the_master_would(store):
    """A copy of the pool that goes on as Mooncake's master: the same objects, leases and pins."""
    master = MooncakePool.__new__(MooncakePool)
    master.__dict__ = {name: deepcopy(value) for name, value in vars(store).items() if name not in OF_THE_POLICY}
    master._extents = Extents()
    for lineage, extent in store._extents:
        master._extents.add(lineage, extent)
    return master


OF_THE_POLICY = ("_policy", "_extents")
RULES = [
    never_evicts_what_is_leased,
    never_evicts_what_is_pinned_hard,
    evicts_as_many_as_the_master,
    is_determined_by_its_calls,
]

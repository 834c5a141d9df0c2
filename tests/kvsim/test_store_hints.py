"""Pins, priorities and ends of sessions in the simulated pool: by example, and against a pool of single blocks."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import runs as runs_of
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.types import GroupId
from kvsim.pool.pins import DEFAULT_SOFT_PIN_TTL_NS, SoftPins
from kvsim.pool.store import MooncakePool
from tests.kvsim.test_store import SEQUENCES, BlockPool, by_lease, calls, contents, sequence

G = GroupId(0)
SOFT = Hints("a", Pin.SOFT)


def pool(capacity_blocks=10, ratio=0.1, soft_pins=SoftPins.GO_LAST, ttl_ns=0):
    return MooncakePool(capacity_blocks, (1,), ttl_ns, 1.0, ratio, soft_pins)


def put(store, stream, num_blocks, now_ns, hints=NO_HINTS):
    return runs_of.num_blocks(store.put(G, sequence((stream, num_blocks)), ((0, num_blocks),), now_ns, hints))


def held(store, stream):
    return runs_of.num_blocks(store.holds(G, sequence((stream, 100)), ((0, 100),)))


def test_soft_pinned_blocks_go_when_the_others_do_not_suffice():
    store = pool()
    put(store, 1, 4, 0, SOFT)
    put(store, 2, 6, 1)
    assert put(store, 3, 5, 2) == 0
    assert (held(store, 1), held(store, 2)) == (4, 1), "the older ones stay: they are pinned"
    assert put(store, 4, 8, 3) == 0
    assert held(store, 1) == 2 and store.counters.evicted_pinned == 2
    store.audit()


def test_a_pass_takes_pinned_ones_up_to_half_its_share_only():
    store = pool(capacity_blocks=100, ratio=0.4)
    put(store, 1, 95, 0, SOFT)
    put(store, 2, 5, 1)
    put(store, 3, 1, 2)
    # 100 objects, a share of 40; 5 are not pinned, and pinned ones are taken up to 20.
    assert (held(store, 1), held(store, 2), store.counters.evicted_pinned) == (80, 0, 15)


def test_where_they_may_not_go_a_put_is_refused():
    store = pool(soft_pins=SoftPins.STAY)
    put(store, 1, 8, 0, SOFT)
    assert put(store, 2, 5, 1) == 3
    assert held(store, 1) == 8
    store.audit()


def test_hard_pinned_blocks_stay_until_they_are_removed():
    store = pool()
    put(store, 1, 10, 0, Hints(pin=Pin.HARD))
    assert put(store, 2, 1, DEFAULT_SOFT_PIN_TTL_NS * 100) == 1
    store.audit()
    store.remove(G, sequence((1, 10)), ((0, 10),), DEFAULT_SOFT_PIN_TTL_NS * 100)
    assert put(store, 2, 1, DEFAULT_SOFT_PIN_TTL_NS * 100) == 0


@pytest.mark.parametrize(("ttl_ns", "pinned_until"), [(7, 7), (None, DEFAULT_SOFT_PIN_TTL_NS), (0, 0)])
def test_a_soft_pin_ends_after_its_time_and_no_read_prolongs_it(ttl_ns, pinned_until):
    for now_ns, stays in [(pinned_until - 1, True), (pinned_until, False)]:
        if now_ns < 2:
            continue
        store = pool()
        put(store, 1, 5, 0, Hints("a", Pin.SOFT, ttl_ns))
        put(store, 2, 5, 1)
        store.exists(G, sequence((1, 5)), ((0, 5),), 1)
        store.get(G, sequence((2, 5)), ((0, 5),), 2)
        put(store, 3, 2, now_ns)
        assert (held(store, 1) == 5) is stays


def test_a_put_of_what_is_there_pins_nothing():
    store = pool()
    put(store, 1, 5, 0)
    put(store, 1, 5, 1, SOFT)
    put(store, 2, 5, 2)
    put(store, 3, 3, 3)
    assert held(store, 1) == 2


def test_of_blocks_pinned_alike_those_of_less_priority_go_first():
    store = pool()
    put(store, 1, 4, 0, Hints(priority=2))
    put(store, 2, 3, 1, Hints(priority=1))
    put(store, 3, 3, 2, Hints(pin=Pin.SOFT))
    put(store, 4, 4, 3, Hints(priority=3))
    assert [held(store, stream) for stream in (1, 2, 3)] == [3, 0, 3]


def test_the_end_of_a_session_releases_what_it_pinned():
    store = pool(capacity_blocks=12)
    put(store, 1, 4, 0, SOFT)
    put(store, 2, 4, 1, Hints("b", Pin.SOFT))
    put(store, 3, 4, 2, Hints("a", Pin.HARD))
    store.end_session("a")
    store.end_session("never seen")
    put(store, 4, 7, 3, SOFT)  # was under way
    store.audit()
    assert [held(store, stream) for stream in (1, 2, 3)] == [0, 4, 1]
    put(store, 5, 6, 4)
    assert (held(store, 2), held(store, 4)) == (4, 2), "what came after the end is not pinned either"


# -- the oracle: one object per block ----------------------------------------------------------------------------------


class HintedBlocks(BlockPool):
    """Pins and priorities an object at a time."""

    def __init__(self, capacity, ttl, watermark, ratio, stay):
        super().__init__(capacity, ttl, watermark, ratio, by_lease)
        self.stay = stay
        self.marks = {}  # name -> (pin, until, priority, session)
        self.ended = set()

    def put(self, group, segments, runs, now, hints=NO_HINTS):
        before = {*self.objects}
        # Evictions of one put see the pins of the others only: mark first what may come.
        until = now + (DEFAULT_SOFT_PIN_TTL_NS if hints.ttl_ns is None else hints.ttl_ns)
        pin = Pin.NONE if hints.session in self.ended else hints.pin
        for name in self.names(group, segments, runs):
            if name not in before:
                self.marks[name] = (pin, until, hints.priority, hints.session)
        return super().put(group, segments, runs, now)

    def end_session(self, session):
        self.ended.add(session)
        for name, (_, until, priority, owner) in self.marks.items():
            if owner == session:
                self.marks[name] = (Pin.NONE, until, priority, owner)

    def pin_of(self, name):
        pin, until, _, _ = self.marks[name]
        return Pin.NONE if pin is Pin.SOFT and until <= self.now else pin

    def evict(self):
        used_ratio = Fraction(len(self.objects), self.capacity)
        share = max(self.ratio, used_ratio - self.watermark + self.ratio)
        num_objects = sum(self.pin_of(name) is not Pin.HARD for name in self.objects)
        least = ceil(num_objects * max(share / 2, used_ratio - self.watermark))
        evicted = self.evict_of(Pin.NONE, ceil(num_objects * share))
        if not self.stay and evicted < least:
            evicted += self.evict_of(Pin.SOFT, least - evicted)
        return evicted

    def evict_of(self, pin, goal):
        going = [name for name, (lease, _, _) in self.objects.items() if lease <= self.now and self.pin_of(name) is pin]
        going.sort(key=lambda name: (self.marks[name][2], self.order(name, *self.objects[name])))
        for name in going[:goal]:
            del self.objects[name]
        return len(going[:goal])


class ForgetsEnds(HintedBlocks):
    def end_session(self, session):
        self.ended.add(session)


class NeverEnds(HintedBlocks):
    def pin_of(self, name):
        return self.marks[name][0]


class NoPriority(HintedBlocks):
    def put(self, group, segments, runs, now, hints=NO_HINTS):
        return super().put(group, segments, runs, now, Hints(hints.session, hints.pin, hints.ttl_ns))


class SoftIsNothing(HintedBlocks):
    def pin_of(self, name):
        pin = super().pin_of(name)
        return Pin.NONE if pin is Pin.SOFT else pin


HINTS = st.sampled_from(
    [
        NO_HINTS,
        NO_HINTS,
        Hints("a", Pin.SOFT),
        Hints("b", Pin.SOFT, ttl_ns=4),
        Hints("a", Pin.SOFT, priority=2),
        Hints("b", Pin.HARD),
        Hints(priority=1),
    ]
)
SCRIPTS = st.lists(st.tuples(calls(), HINTS, st.sampled_from([None, None, None, None, "a", "b"])), max_size=30)
SHAPES = st.tuples(
    st.integers(1, 25), st.sampled_from([0, 2]), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.05, 0.3, 1.0]),
    st.booleans(),
)  # fmt: skip


def agree(script, shape, oracle_of, pool_of=MooncakePool):
    capacity, ttl, watermark, ratio, stay = shape
    soft_pins = SoftPins.STAY if stay else SoftPins.GO_LAST
    subject, oracle = pool_of(capacity, (1, 1), ttl, watermark, ratio, soft_pins), oracle_of(*shape)
    now = 0
    for (method, group, segments, runs, pause), hints, ending in script:
        now += pause
        extra = (hints,) if method == "put" else ()
        answers = [getattr(each, method)(group, segments, runs, now, *extra) for each in (subject, oracle)]
        if ending is not None:
            subject.end_session(ending)
            oracle.end_session(ending)
        subject.audit()
        if answers[0] != answers[1] or subject.num_objects != len(oracle.objects):
            return False
    return contents(subject) == {*oracle.objects}


@given(SCRIPTS, SHAPES)
def test_equals_the_pool_of_single_blocks(script, shape):
    assert agree(script, shape, HintedBlocks)


def room_is_needed(hints, ending=None):
    """The oldest blocks have these hints; then others fill the pool, and then some more."""
    return [
        (("put", G, SEQUENCES[3], ((0, 6),), 0), hints, ending),
        (("put", G, SEQUENCES[4], ((0, 6),), 10), NO_HINTS, None),
        (("put", G, SEQUENCES[0], ((0, 4),), 1), NO_HINTS, None),
    ]


@pytest.mark.parametrize(
    ("wrong", "script"),
    [
        (SoftIsNothing, room_is_needed(SOFT)),
        (NeverEnds, room_is_needed(Hints("b", Pin.SOFT, ttl_ns=4))),
        (ForgetsEnds, room_is_needed(SOFT, ending="a")),
        (NoPriority, room_is_needed(Hints(priority=1))),
    ],
)
def test_the_comparison_rejects_other_rules(wrong, script):
    shape = (12, 0, 1.0, 0.05, False)
    assert agree(script, shape, HintedBlocks)
    assert not agree(script, shape, wrong)

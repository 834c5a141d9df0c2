"""Eviction policies against plain definitions of what they are, and what a new one takes."""

from collections import OrderedDict
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.eviction.fifo import Fifo
from kvcore.eviction.lru import Lru
from kvcore.eviction.opt import OracleOpt
from kvcore.eviction.policy import BoundedCache, Order

uses = st.lists(st.integers(0, 5), max_size=30)


def hits(cache, keys):
    """Whether each single-block request hit."""
    return [cache.request([key]) == 1 for key in keys]


def lru_hits(keys, capacity_blocks):
    """A key hits when fewer than `capacity_blocks` others were used since."""
    found = []
    for now, key in enumerate(keys):
        before = [i for i in range(now) if keys[i] == key]
        found.append(bool(before) and len(set(keys[before[-1] + 1 : now])) < capacity_blocks)
    return found


def fifo_hits(keys, capacity_blocks):
    """A key hits when fewer than `capacity_blocks` others have entered after it did."""
    entered: list[int] = []
    found = []
    for key in keys:
        found.append(key in entered[len(entered) - min(len(entered), capacity_blocks) :])
        if not found[-1]:
            entered.append(key)
    return found


@given(uses, st.integers(0, 5))
def test_lru_and_fifo_are_what_their_definitions_say(keys, capacity_blocks):
    lru, fifo = (hits(BoundedCache(capacity_blocks, policy()), keys) for policy in (Lru, Fifo))
    assert lru == lru_hits(keys, capacity_blocks)
    assert fifo == fifo_hits(keys, capacity_blocks)


def test_each_definition_rejects_the_other_policy():
    keys = [0, 1, 0, 2, 0]
    assert hits(BoundedCache(2, Fifo()), keys) != lru_hits(keys, 2)
    assert hits(BoundedCache(2, Lru()), keys) != fifo_hits(keys, 2)


def best_possible(keys, capacity_blocks):
    """Most hits that any choice of evictions (also of the key that just entered) reaches; by trying all of them."""
    states = {frozenset(): 0}
    for key in keys:
        following: dict[frozenset[int], int] = {}
        for held, count in states.items():
            after = held | {key}
            choices = [after] if len(after) <= capacity_blocks else [after - {gone} for gone in after]
            for choice in choices:
                following[choice] = max(following.get(choice, 0), count + (key in held))
        states = following
    return max(states.values())


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 4))
def test_the_oracle_reaches_the_best_possible(keys, capacity_blocks):
    assert sum(hits(BoundedCache(capacity_blocks, OracleOpt(keys)), keys)) == best_possible(keys, capacity_blocks)


def test_lru_is_not_the_best_possible():
    keys = [0, 1, 2, 0, 1, 2]
    assert sum(hits(BoundedCache(2, Lru()), keys)) < best_possible(keys, 2)


def test_the_oracle_is_told_every_use():
    with pytest.raises(AssertionError):
        hits(BoundedCache(2, OracleOpt([0, 1])), [1])


POLICIES = {"lru": lambda _keys: Lru(), "fifo": lambda _keys: Fifo(), "opt": OracleOpt}


@pytest.mark.parametrize("name", POLICIES)
@given(uses, st.integers(0, 4), st.data())
def test_a_cache_holds_its_capacity_at_most_and_only_what_entered(name, keys, capacity_blocks, data):
    cache = BoundedCache(capacity_blocks, POLICIES[name](keys))
    for now, key in enumerate(keys):
        cache.request([key])
        gone = data.draw(st.sampled_from(range(6)))
        cache.discard(gone)
        assert gone not in cache
        held = [other for other in range(6) if other in cache]
        assert len(held) == len(cache) <= capacity_blocks
        assert set(held) <= set(keys[: now + 1])


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_is_looked_up_as_one_prefix_before_its_blocks_are_used(name):
    requests = [(1, 2, 3), (1, 2, 4), (1, 5, 3), (9, 2, 3)]
    order = reversed if POLICIES[name]([]).order is Order.LEAF_FIRST else iter
    cache = BoundedCache(10, POLICIES[name]([key for keys in requests for key in order(keys)]))
    assert [cache.request(keys) for keys in requests] == [0, 2, 1, 0], (
        "block 3 of the last one is held but not a prefix"
    )


def test_lru_gives_up_a_prompts_leaf_first_and_fifo_its_root():
    lru, fifo = BoundedCache(2, Lru()), BoundedCache(2, Fifo())
    lru.request((1, 2, 3))
    fifo.request((1, 2, 3))
    assert [key in lru for key in (1, 2, 3)] == [True, True, False]
    assert [key in fifo for key in (1, 2, 3)] == [False, True, True]


def test_a_negative_capacity_is_the_callers_mistake():
    with pytest.raises(InvalidArgument, match="capacity_blocks = -1: expected at least 0"):
        BoundedCache(-1, Lru())


class Clock:
    """A new policy: second chance. All that it takes."""

    order: ClassVar[Order] = Order.LEAF_FIRST

    def __init__(self):
        self.used = OrderedDict()

    def enter(self, key):
        self.used[key] = False

    def use(self, key):
        self.used[key] = True

    def evict(self):
        while True:
            key, used = self.used.popitem(last=False)
            if not used:
                return key
            self.used[key] = False

    def leave(self, key):
        del self.used[key]


def test_a_new_policy_is_one_small_class():
    keys = [1, 2, 1, 3, 1, 2]
    assert hits(BoundedCache(2, Clock()), keys) == [False, False, True, False, True, False]
    assert fifo_hits(keys, 2) == [False, False, True, False, False, False], "without the second chance"

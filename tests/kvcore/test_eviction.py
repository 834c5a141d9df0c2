"""Eviction policies against plain definitions of what they are, and what a new one takes."""

from collections import OrderedDict
from fractions import Fraction
from itertools import count as numbers
from typing import ClassVar

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.eviction.fifo import Fifo
from kvcore.eviction.leaf_first import LeafFirst
from kvcore.eviction.lru import Lru
from kvcore.eviction.policy import BoundedCache, Order
from kvcore.eviction.session_aware import MAX_TURN, SessionAware, SessionAwareRuns
from tests.kvcore.oracle_opt import OracleOpt

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


POLICIES = {
    "lru": lambda _keys: Lru(),
    "fifo": lambda _keys: Fifo(),
    "leaf": lambda _keys: LeafFirst(),
    "session": lambda _keys: SessionAware(),
    "opt": OracleOpt,
}


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


# -- leaves first ------------------------------------------------------------------------------------------------------

paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda steps: tuple(tuple(steps[: end + 1]) for end in range(len(steps)))
)
"""A prompt's blocks, each named by all up to it: prompts are branches of one tree."""

tiered = st.lists(st.tuples(paths, st.integers(0, 4)), max_size=25)
"""Prompts, and how many leading blocks of each a faster tier has."""


def served(policy, requests, capacity_blocks):
    """Hits of each request and what is held after it."""
    cache = BoundedCache(capacity_blocks, policy)
    found = []
    for keys, local_blocks in requests:
        hit_blocks = cache.request(keys, min(local_blocks, len(keys)))
        found.append((hit_blocks, {key for keys, _ in requests for key in keys if key in cache}))
    return found


class LeafFirstByDefinition:
    """Of all held keys that nothing held extends, the one whose last use is longest ago; by looking at all of them."""

    order = Order.LEAF_FIRST

    def __init__(self):
        self.uses = []
        self.held = set()

    def arrive(self, number):
        pass

    def enter(self, key, parent):
        assert parent == (key[:-1] or None)
        self.held.add(key)
        self.uses.append(key)

    def use(self, key):
        self.uses.append(key)

    def leave(self, key):
        self.held.remove(key)

    def evict(self):
        leaves = {key for key in self.held if not any(other[:-1] == key for other in self.held)}
        last_use = {key: now for now, key in enumerate(self.uses)}
        gone = min(leaves, key=last_use.__getitem__)
        self.held.remove(gone)
        return gone


@given(tiered, st.integers(0, 8))
def test_leaf_first_is_what_its_definition_says(requests, capacity_blocks):
    assert served(LeafFirst(), requests, capacity_blocks) == served(LeafFirstByDefinition(), requests, capacity_blocks)


@given(st.lists(paths, max_size=25), st.integers(0, 8))
def test_of_whole_prompts_leaf_first_is_lru(prompts, capacity_blocks):
    whole = [(keys, 0) for keys in prompts]
    assert served(LeafFirst(), whole, capacity_blocks) == served(Lru(), whole, capacity_blocks)


def test_below_a_faster_tier_lru_keeps_leaves_without_their_root():
    """The root is used in the faster tier for long; when that one loses it, leaf first still has the whole prompt."""
    path = ((1,), (1, 2), (1, 2, 3))
    requests = [(path, 0), (((5,),), 0), (path, 1), (((6,),), 0), (path, 0)]
    lru, leaf = served(Lru(), requests, 4), served(LeafFirst(), requests, 4)
    assert (lru[-1][0], leaf[-1][0]) == (0, 3)
    assert lru[-2][1] >= {(1, 2), (1, 2, 3)} and (1,) not in lru[-2][1], "two blocks that no request can use"


# -- sessions ----------------------------------------------------------------------------------------------------------


class SessionAwareByDefinition:
    """Counts everything anew from the whole history, exactly."""

    order = Order.LEAF_FIRST

    def __init__(self):
        self.uses = []  # (key, turn, request)
        self.held = set()
        self.now = 0

    def arrive(self, number):
        assert number == self.now + 1
        self.now = number

    def enter(self, key, parent):
        self.held.add(key)
        self.use(key)

    def use(self, key):
        turn = min(sum(key == used for used, _, _ in self.uses), MAX_TURN - 1)
        self.uses.append((key, turn, self.now))

    def leave(self, key):
        self.held.remove(key)

    def worth(self, key):
        last = {used: (number, turn, at) for number, (used, turn, at) in enumerate(self.uses)}
        number, turn, used_at = last[key]
        waits = []
        for index, (used, of_turn, at) in enumerate(self.uses):
            later = [back for other, _, back in self.uses[index + 1 :] if other == used]
            if of_turn == turn and later:
                waits.append(later[0] - at)
        chance = Fraction(len(waits) + 1, sum(of_turn == turn for _, of_turn, _ in self.uses) + 2)
        mean_wait = Fraction(sum(waits) + 1, len(waits) + 1)
        return chance / (mean_wait + self.now - used_at), turn, number

    def evict(self):
        gone = min(self.held, key=self.worth)
        self.held.remove(gone)
        return gone


@given(tiered.map(lambda requests: requests[:14]), st.integers(1, 6))
def test_session_aware_is_what_its_definition_says(requests, capacity_blocks):
    by_definition = served(SessionAwareByDefinition(), requests, capacity_blocks)
    assert served(SessionAware(), requests, capacity_blocks) == by_definition


class WithoutItsChildren(LeafFirst):
    """Takes every key for a leaf."""

    def enter(self, key, parent):
        super().enter(key, None)


class ForgetsWhatItEvicted(SessionAware):
    def __init__(self):
        super().__init__(memory_blocks=0)


class AgeAlone(SessionAware):
    """Every block is in its first turn."""

    def use(self, key):
        self.leave(key)
        self._begin(key, 0)


WRONG = [
    (LeafFirstByDefinition, WithoutItsChildren),
    (LeafFirstByDefinition, Lru),
    (SessionAwareByDefinition, ForgetsWhatItEvicted),
    (SessionAwareByDefinition, AgeAlone),
    (SessionAwareByDefinition, Lru),
]


@pytest.mark.parametrize(("definition", "wrong"), WRONG)
def test_each_definition_rejects_another_policy_too(definition, wrong):
    def differ(requests):
        return served(definition(), requests, 3) != served(wrong(), requests, 3)

    find(tiered, differ, settings=settings(max_examples=2_000, phases=[Phase.generate], derandomize=True))


def sessions_among_strangers(num_rounds):
    """Two sessions that go on for ever, and three strangers after each of their turns."""
    strangers = numbers(100)
    for turn in range(num_rounds):
        for session in (1, 2):
            yield (tuple((session, block) for block in range(turn // 8 + 1)), 0)
            for _ in range(3):
                yield (((next(strangers),),), 0)


def test_session_aware_learns_that_strangers_do_not_return():
    requests = list(sessions_among_strangers(24))
    lru, aware = ([hit for hit, _ in served(policy, requests, 7)] for policy in (Lru(), SessionAware()))
    assert sum(aware) > 2 * sum(lru)


def test_what_it_remembers_of_evicted_blocks_is_bounded():
    policy = SessionAware(memory_blocks=5)
    cache = BoundedCache(2, policy)
    for name in range(50):
        cache.request([name])
    assert len(policy._gone) == 5


def test_in_runs_it_remembers_the_lineages_used_last():
    policy = SessionAwareRuns(memory_lineages=5)
    for name in range(50):
        policy.arrive(name)
        policy.use([((0, 0), 0, 3), ((0, name), 5, 9)])
    assert [*policy._notes] == [(0, name) for name in (46, 47, 48, 0, 49)]
    assert [*policy.turns_in((0, 0), 2, 7)] == [(2, 3, MAX_TURN - 1), (3, 5, 0), (5, 7, 0)]
    assert [*policy.turns_in((0, 7), 5, 9)] == [(5, 9, 0)], "forgotten"


def test_in_runs_stretches_of_one_turn_become_one():
    policy = SessionAwareRuns()
    for call, (start, end) in enumerate([(0, 4), (4, 8), (8, 20)]):
        policy.arrive(call)
        policy.use([((0, 1), start, end)])
    policy.arrive(3)
    policy.touch([((0, 1), 0, 20)])
    assert len(policy._notes[0, 1]) == 1
    policy.use([((0, 1), 6, 10)])
    assert [*policy.turns_in((0, 1), 0, 20)] == [(0, 6, 0), (6, 10, 1), (10, 20, 0)]


class Clock:
    """A new policy: second chance. All that it takes."""

    order: ClassVar[Order] = Order.LEAF_FIRST

    def __init__(self):
        self.used = OrderedDict()

    def arrive(self, number):
        pass

    def enter(self, key, parent):
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

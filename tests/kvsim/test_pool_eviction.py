"""Eviction policies in the simulated pool: what each is, block by block, and that it is that of `kvcore.eviction`."""

from fractions import Fraction

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from kvcore import runs as runs_of
from kvcore.eviction.fifo import Fifo
from kvcore.eviction.leaf_first import LeafFirst, LeafFirstRuns
from kvcore.eviction.lru import Lru, LruRuns
from kvcore.eviction.runs import Reach
from kvcore.eviction.session_aware import MAX_TURN, SessionAware, SessionAwareRuns
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.types import GroupId
from kvsim.pool.pins import SoftPins
from kvsim.pool.policy_pool import PolicyPool
from kvsim.pool.store import MooncakePool
from tests.kvsim.test_store import SEQUENCES, BlockPool, calls, contents, sequence
from tests.kvsim.test_store_hints import SCRIPTS, SHAPES, HintedBlocks, agree

G = GroupId(0)


def pool_with(policy, *shape):
    return PolicyPool(*shape, policy())


def small(policy, capacity_blocks=10, ttl_ns=0):
    return pool_with(policy, capacity_blocks, (1,), ttl_ns, 1.0, 0.1, SoftPins.GO_LAST)


def put(store, segments, start, end, now_ns):
    return runs_of.num_blocks(store.put(G, segments, ((start, end),), now_ns))


def held(store, segments):
    return store.holds(G, segments, ((0, segments[-1][2]),))


# -- by example --------------------------------------------------------------------------------------------------------

LONG, OTHER, THIRD = sequence((1, 6)), sequence((2, 6)), sequence((3, 6))


HEAD_IS_LOST = ((0, 1), (3, 6))
TAIL_IS_LOST = ((0, 4),)


@pytest.mark.parametrize(
    ("policy", "left"),
    [(None, HEAD_IS_LOST), (LruRuns, HEAD_IS_LOST), (LeafFirstRuns, TAIL_IS_LOST), (SessionAwareRuns, TAIL_IS_LOST)],
)
def test_of_a_prompt_put_in_two_chunks_the_master_and_lru_lose_the_first(policy, left):
    store = MooncakePool(10, (1,), 0, 1.0, 0.1) if policy is None else small(policy)
    put(store, LONG, 0, 3, 0)
    put(store, LONG, 3, 6, 1)
    put(store, OTHER, 0, 4, 2)
    assert put(store, THIRD, 0, 2, 3) == 0
    assert held(store, LONG) == left and held(store, OTHER) == ((0, 4),)


def test_the_roots_that_a_faster_tier_has_stay_young_with_what_extends_them():
    for policy, left in [(LruRuns, ((3, 6),)), (LeafFirstRuns, ((0, 6),))]:
        store = small(policy)
        put(store, LONG, 0, 6, 0)
        put(store, OTHER, 0, 4, 1)
        store.exists(G, LONG, ((3, 6),), 2)
        put(store, THIRD, 0, 3, 3)
        assert held(store, LONG) == left


@pytest.mark.parametrize(
    ("policy", "ttl_ns", "left"),
    [
        (LruRuns, 10, (HEAD_IS_LOST, ((0, 4),))),
        (LeafFirstRuns, 0, (TAIL_IS_LOST, ((0, 4),))),
        (LeafFirstRuns, 10, (((0, 6),), ((0, 2),))),
        (SessionAwareRuns, 10, (((0, 6),), ((0, 2),))),
    ],
)
def test_a_prefix_does_not_go_before_its_leased_tail(policy, ttl_ns, left):
    store = small(policy, ttl_ns=ttl_ns)
    put(store, LONG, 0, 6, 0)
    store.exists(G, LONG, ((3, 6),), 2)
    put(store, OTHER, 0, 4, 3)
    assert put(store, THIRD, 0, 2, 4) == 0
    assert (held(store, LONG), held(store, OTHER)) == left


def test_a_prefix_may_go_before_a_tail_that_alone_is_pinned():
    """Pins are the master's: a put pins what it brings, and a put of what is there pins nothing."""
    store = small(LeafFirstRuns)
    put(store, LONG, 0, 3, 0)
    store.put(G, LONG, ((3, 6),), 1, Hints(pin=Pin.HARD))
    put(store, OTHER, 0, 4, 2)
    store.exists(G, OTHER, ((0, 4),), 3)
    put(store, THIRD, 0, 2, 4)
    assert held(store, LONG) == HEAD_IS_LOST


def test_a_prefix_may_go_before_a_leased_tail_when_the_gap_between_was_filled_later():
    store = small(LeafFirstRuns, ttl_ns=10)
    put(store, LONG, 0, 2, 0)
    put(store, LONG, 3, 6, 0)
    store.exists(G, LONG, ((3, 6),), 1)
    put(store, LONG, 2, 3, 2)
    put(store, OTHER, 0, 4, 3)
    put(store, THIRD, 0, 2, 4)
    assert held(store, LONG) == HEAD_IS_LOST


def test_session_aware_keeps_what_returns():
    """Strangers come and go, and one prompt returns after every fourth of them, when by age it is gone."""
    stores = [small(policy) for policy in (LruRuns, SessionAwareRuns)]
    for store in stores:
        for now in range(10, 60):
            put(store, sequence((now, 3)), 0, 3, now)
            if now % 4 == 0:
                store.exists(G, LONG, ((0, 4),), now)
                put(store, LONG, 0, 4, now)
    by_age, by_turn = (store.counters.found for store in stores)
    assert by_age == 0 and by_turn > 24, "of 48 blocks"


@pytest.mark.parametrize("policy", [LruRuns, LeafFirstRuns, SessionAwareRuns])
def test_work_is_in_runs_not_in_blocks(policy):
    million = 10**9
    store = pool_with(policy, 30 * million, (1,), 10, 0.9, 0.05, SoftPins.GO_LAST)
    for turn in range(1, 100):
        segments = sequence((turn % 3, million * turn))
        found = store.exists(G, segments, ((0, million * turn),), turn)
        store.put(G, segments, runs_of.subtract(((0, million * turn),), found), turn)
    assert store.counters.evicted > 30 * million
    store.audit()


def test_queues_do_not_grow_with_the_number_of_calls():
    store = small(SessionAwareRuns, 20)
    for now in range(2_000):
        store.exists(G, LONG, ((0, 6),), now)
        put(store, LONG, 0, 6, now)
        put(store, sequence((now + 10, 6)), 0, 6, now)
    store.audit()
    extents = store._extents
    assert sum(1 for _ in extents._queued()) <= 6 * extents._num_extents + 128


def test_a_rank_that_is_empty_by_now_is_no_obstacle():
    """Its queue goes when the queues are built anew, which may be while the ranks are gone through."""
    store = small(LruRuns, 20)
    store.put(G, sequence((7, 18)), ((0, 18),), 0, Hints(pin=Pin.HARD))
    store.put(G, THIRD, ((0, 2),), 0, Hints(priority=1))
    store.remove(G, THIRD, ((0, 2),), 0)
    store._extents._num_offered = 10_000
    assert put(store, LONG, 0, 5, 1) == 3
    store.audit()


# -- by definition: one object per block -------------------------------------------------------------------------------


class ByAge(HintedBlocks):
    """The block unused for longest goes, of one call's the deepest."""

    def __init__(self, *shape):
        super().__init__(*shape)
        self.order = self.key

    def key(self, name, lease, grant, used):
        return grant, -name[2]


class WithItsPrefix(ByAge):
    """Used, and leased, is also what is held before a used block, up to the first that is not."""

    def exists(self, group, segments, runs, now):
        found = super().exists(group, segments, runs, now)
        self.looked_up(self.names(group, segments, found))
        self.reach(group, segments, found, now + self.ttl)
        return found

    def get(self, group, segments, runs, now):
        found = super().exists(group, segments, runs, now)
        self.touched(self.names(group, segments, found))
        self.reach(group, segments, found, now + self.ttl)
        return found

    def entered(self, group, segments, names):
        self.looked_up(names)
        self.reach(group, segments, runs_of.from_blocks(block for _, _, block in names), 0)

    def reach(self, group, segments, runs, leased_until):
        reached = set()
        for start, _ in runs:
            for name in reversed(self.names(group, segments, ((0, start),))):
                if name not in self.objects:
                    break
                reached.add(name)
        reached -= {*self.names(group, segments, runs)}
        for name in reached:
            lease, _, used = self.objects[name]
            self.objects[name] = (max(lease, leased_until), self.grant, used)
        self.touched(reached)

    def looked_up(self, names):
        """For policies that count uses."""

    def touched(self, names):
        """For policies that know more than the last call."""


class WithItsPrefixUnleased(WithItsPrefix):
    def reach(self, group, segments, runs, leased_until):
        super().reach(group, segments, runs, 0)


class ByTurn(WithItsPrefix):
    """Counts everything anew from all that happened: (name, call, its turn, or None for a touch)."""

    max_turn = MAX_TURN

    def __init__(self, *shape):
        super().__init__(*shape)
        self.story = []

    def looked_up(self, names):
        turns = {name: turn for name, _, turn in self.story if turn is not None}
        self.story += [(name, self.grant, min(turns.get(name, -1) + 1, self.max_turn - 1)) for name in names]

    def touched(self, names):
        self.story += [(name, self.grant, None) for name in names]

    def waits(self):
        """(turn, wait) of each return: from when a block was last young until it was used again."""
        young = {}
        for name, call, turn in self.story:
            if turn is not None and name in young:
                yield young[name][0], call - young[name][1]
            young[name] = (young[name][0] if turn is None else turn, call)

    def evict(self):
        self.all_waits = list(self.waits())
        self.turns = {name: turn for name, _, turn in self.story if turn is not None}
        return super().evict()

    def key(self, name, lease, grant, used):
        turn = self.turns[name]
        waits = [wait for of, wait in self.all_waits if of == turn]
        chance = Fraction(len(waits) + 1, sum(of == turn for _, _, of in self.story) + 2)
        worth = chance / (Fraction(sum(waits) + 1, len(waits) + 1) + self.grant - grant)
        return worth, turn, grant, -name[2]


DEFINITIONS = {LruRuns: ByAge, LeafFirstRuns: WithItsPrefix, SessionAwareRuns: ByTurn}


@pytest.mark.parametrize("policy", DEFINITIONS)
@given(SCRIPTS, SHAPES)
def test_each_policy_is_what_its_definition_says(policy, script, shape):
    assert agree(script, shape, DEFINITIONS[policy], lambda *fitting: pool_with(policy, *fitting))


class OneTurn(ByTurn):
    max_turn = 1


class ForgetsWhatIsGone(ByTurn):
    def evict(self):
        count = super().evict()
        self.story = [event for event in self.story if event[0] in self.objects]
        return count


class LeasedGoToo(ByAge):
    def evict_of(self, pin, goal):
        self.objects = {name: (0, *rest) for name, (_, *rest) in self.objects.items()}
        return super().evict_of(pin, goal)


class PinsAreNothing(ByAge):
    def pin_of(self, name):
        pin = super().pin_of(name)
        return type(pin).NONE


def script_of(*steps):
    """Puts and lookups (method, sequence, start, end, pause) without hints."""
    return [
        ((method, G, SEQUENCES[index], ((start, end),), pause), NO_HINTS, None)
        for method, index, start, end, pause in steps
    ]


IN_TWO_CHUNKS = script_of(("put", 3, 0, 3, 0), ("put", 3, 3, 6, 1), ("put", 4, 0, 6, 1), ("put", 0, 0, 2, 1))
LOOKED_UP = script_of(("put", 3, 0, 6, 0), ("exists", 3, 0, 6, 0), ("put", 4, 0, 6, 1), ("put", 0, 0, 2, 9))
TAIL_LOOKED_UP = script_of(("put", 3, 0, 6, 0), ("exists", 3, 3, 6, 0), ("put", 4, 0, 6, 1), ("put", 0, 0, 2, 0))
TIGHT = (12, 2, 1.0, 0.05, False)


@pytest.mark.parametrize(
    ("policy", "wrong", "script"),
    [
        (LruRuns, HintedBlocks, LOOKED_UP),
        (LruRuns, WithItsPrefix, IN_TWO_CHUNKS),
        (LeafFirstRuns, HintedBlocks, IN_TWO_CHUNKS),
        (LeafFirstRuns, ByAge, IN_TWO_CHUNKS),
        (LeafFirstRuns, WithItsPrefixUnleased, TAIL_LOOKED_UP),
    ],
)
def test_the_comparison_rejects_other_orders(policy, wrong, script):
    assert agree(script, TIGHT, DEFINITIONS[policy], lambda *fitting: pool_with(policy, *fitting))
    assert not agree(script, TIGHT, wrong, lambda *fitting: pool_with(policy, *fitting))


FIRST = settings(max_examples=5_000, phases=[Phase.generate], derandomize=True)


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        (LruRuns, LeasedGoToo),
        (LruRuns, PinsAreNothing),
        (SessionAwareRuns, WithItsPrefix),
        (SessionAwareRuns, OneTurn),
        (SessionAwareRuns, ForgetsWhatIsGone),
    ],
)
def test_the_comparison_rejects_other_definitions(policy, wrong):
    def differ(case):
        return not agree(*case, wrong, lambda *fitting: pool_with(policy, *fitting))

    find(st.tuples(SCRIPTS, SHAPES), differ, settings=FIRST)


# -- the policies of kvcore.eviction, key by key -----------------------------------------------------------------------


class TouchedSessionAware(SessionAware):
    """What a tier that is asked in several calls adds: young again in its turn."""

    def touch(self, key):
        since = self._held[self._turn[key]]
        del since[key]
        since[key] = self._now


class Keyed(BlockPool):
    """One object per block; a policy that knows keys says who goes. Nothing is leased or pinned."""

    reach = Reach.BLOCK
    policy_of = Lru

    def __init__(self, capacity, watermark, ratio):
        super().__init__(capacity, 0, watermark, ratio, None)
        self.policy = self.policy_of()
        self.read = getattr(self.policy, "touch", self.policy.use)

    def tick(self, now):
        super().tick(now)
        self.policy.arrive(self.grant)

    def exists(self, group, segments, runs, now):
        found = super().exists(group, segments, runs, now)
        self.tell(group, segments, found, self.policy.use)
        return found

    def get(self, group, segments, runs, now):
        found = super().exists(group, segments, runs, now)
        self.tell(group, segments, found, self.read)
        return found

    def entered(self, group, segments, names):
        path = self.names(group, segments, ((0, segments[-1][2]),))
        runs = runs_of.from_blocks(block for _, _, block in names)
        self.tell(group, segments, runs, lambda name: self.policy.enter(name, path[name[2] - 1] if name[2] else None))

    def tell(self, group, segments, runs, event):
        """The blocks of `runs` and what the policy reaches, deepest first."""
        own = {*self.names(group, segments, runs)}
        young = False
        for name in reversed(self.names(group, segments, ((0, runs[-1][1]),)) if runs else []):
            if name in own:
                event(name)
            elif young and name in self.objects and self.reach is Reach.PREFIX:
                self.read(name)
            young = name in self.objects and (young or name in own)

    def remove(self, group, segments, runs, now):
        gone = super().remove(group, segments, runs, now)
        for name in self.names(group, segments, gone):
            self.policy.leave(name)
        return gone

    def evict(self):
        share = max(self.ratio, Fraction(len(self.objects), self.capacity) - self.watermark + self.ratio)
        goal = min(len(self.objects), -(-len(self.objects) * share.numerator // share.denominator))
        for _ in range(goal):
            del self.objects[self.policy.evict()]
        return goal


class KeyedLeafFirst(Keyed):
    """Knows which block extends which, so that it needs no reach."""

    policy_of = LeafFirst


class KeyedSessionAware(Keyed):
    policy_of = TouchedSessionAware
    reach = Reach.PREFIX


class KeyedFifo(Keyed):
    policy_of = Fifo


class KeyedSessionAwareWithoutReach(KeyedSessionAware):
    reach = Reach.BLOCK


class KeyedForgetful(KeyedSessionAware):
    def policy_of(self):
        return TouchedSessionAware(memory_blocks=0)


KEYED = {LruRuns: Keyed, LeafFirstRuns: KeyedLeafFirst, SessionAwareRuns: KeyedSessionAware}
FREE = st.tuples(st.integers(1, 30), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.05, 0.3, 1.0]))


def disagreement(policy, keyed_of, script, shape):
    """Index of the first call that the pools answer differently or after which they hold different blocks, or None."""
    capacity, watermark, ratio = shape
    subject = pool_with(policy, capacity, (1, 1), 0, watermark, ratio, SoftPins.GO_LAST)
    return first_difference(subject, keyed_of(*shape), script)


def first_difference(subject, other, script):
    """Of a pool and another one, or one of single blocks."""
    now = 0
    for index, (method, group, segments, runs, pause) in enumerate(script):
        now += pause
        answers = [getattr(store, method)(group, segments, runs, now) for store in (subject, other)]
        subject.audit()
        if answers[0] != answers[1] or contents(subject) != held_by(other):
            return index
    return None


def held_by(store):
    return contents(store) if isinstance(store, MooncakePool) else {*store.objects}


def without_removals(script):
    return [call for call in script if call[0] != "remove"]


@pytest.mark.parametrize("policy", KEYED)
@given(st.lists(calls(), max_size=40), FREE)
def test_each_policy_is_the_one_that_knows_keys(policy, script, shape):
    """Leaf first only while nothing is removed, see below."""
    if policy is LeafFirstRuns:
        script = without_removals(script)
    assert disagreement(policy, KEYED[policy], script, shape) is None


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        (LruRuns, KeyedFifo),
        (LruRuns, KeyedLeafFirst),
        (LeafFirstRuns, Keyed),
        (SessionAwareRuns, Keyed),
        (SessionAwareRuns, KeyedSessionAwareWithoutReach),
        (SessionAwareRuns, KeyedForgetful),
    ],
)
def test_the_comparison_rejects_other_policies(policy, wrong):
    def differ(case):
        return disagreement(policy, wrong, without_removals(case[0]), case[1]) is not None

    find(st.tuples(st.lists(calls(), max_size=40), FREE), differ, settings=FIRST)


def test_what_a_removal_leaves_is_old_at_once_for_the_tree_only():
    script = [
        ("put", G, SEQUENCES[3], ((0, 2),), 0),
        ("put", G, SEQUENCES[4], ((0, 4),), 1),
        ("put", G, SEQUENCES[3], ((2, 4),), 1),
        ("remove", G, SEQUENCES[3], ((2, 4),), 1),
        ("put", G, SEQUENCES[0], ((0, 3),), 1),
    ]
    assert disagreement(LeafFirstRuns, KeyedLeafFirst, script, (8, 1.0, 0.05)) == 4


# -- what is the same --------------------------------------------------------------------------------------------------


def master_and_lru(script, ttl, capacity=12):
    shape = (capacity, (1, 1), ttl, 0.9, 0.1, SoftPins.GO_LAST)
    return first_difference(MooncakePool(*shape), pool_with(LruRuns, *shape), script)


@given(st.lists(calls(), max_size=40), st.integers(1, 30))
def test_without_leases_the_masters_order_is_lru(script, capacity):
    assert master_and_lru(script, 0, capacity) is None


@example([("exists", G, SEQUENCES[0], ((0, 8),), 1)] * 3)
@given(st.lists(calls().filter(lambda call: call[0] != "put"), max_size=20))
def test_lookups_alone_keep_them_the_same_whatever_the_lease(lookups):
    filled = [("put", G, SEQUENCES[0], ((0, 8),), 0), *lookups, ("put", G, SEQUENCES[4], ((0, 12),), 100)]
    assert master_and_lru(filled, 5) is None


def test_they_part_where_a_put_is_younger_than_a_lookup():
    assert master_and_lru([
        ("put", G, SEQUENCES[0], ((0, 5),), 0),
        ("exists", G, SEQUENCES[0], ((0, 5),), 1),
        ("put", G, SEQUENCES[3], ((0, 5),), 2),
        ("put", G, SEQUENCES[4], ((0, 3),), 100),
    ], 10) == 3  # fmt: skip

"""Routing policies, each against what it is for; wrong ones are rejected by the same words."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.routing.least_loaded import LeastLoaded
from kvcore.routing.pool_aware import PoolAware
from kvcore.routing.prefix_aware import PrefixAware
from kvcore.routing.prefix_index import PrefixIndex
from kvcore.routing.round_robin import RoundRobin
from kvcore.routing.router import Arrival, InstanceId, Snapshot, least
from kvcore.routing.session_affinity import SessionAffinity
from tests.contract.router_contract import cases

CASES = st.integers(1, 5).flatmap(cases)


def idle(num_instances):
    return [Snapshot(InstanceId(index)) for index in range(num_instances)]


def test_round_robin_takes_turns():
    assert [RoundRobin().choose(Arrival(number, 1), idle(3)) for number in range(5)] == [0, 1, 2, 0, 1]


def test_ties_go_to_the_first_from_the_number_on():
    assert [least([1, 0, 0, 1], Arrival(number, 1)) for number in range(5)] == [1, 1, 2, 1, 1]


def test_what_is_held_nowhere_is_uncached():
    arrival = Arrival(0, 100, None, (64, 0), 32)
    assert [arrival.uncached_len(index) for index in (0, 1)] == [36, 68]
    assert Arrival(0, 100).uncached_len(1) == 100


# --- load -------------------------------------------------------------------------------------------------------------


def has_least_requests(router, case):
    counts = [snapshot.num_waiting + snapshot.num_running for snapshot in case.snapshots]
    return counts[router.choose(case.arrival, case.snapshots)] == min(counts)


@given(CASES)
def test_least_loaded_never_takes_one_with_strictly_more_requests(case):
    assert has_least_requests(LeastLoaded(), case)


SEARCH = settings(max_examples=2_000, phases=[Phase.generate], derandomize=True)


def refuted(says, router):
    """A case for which `says(router, case)` fails; raises when there seems to be none."""
    return find(CASES, lambda case: not says(router, case), settings=SEARCH)


def test_control_round_robin_does():
    assert refuted(has_least_requests, RoundRobin())


def burst(router, snapshots, num_requests, sent=Snapshot.sent):
    """How many of the requests that arrive before the next refresh each instance gets."""
    snapshots, got = list(snapshots), Counter()
    for number in range(num_requests):
        chosen = router.choose(Arrival(number, 100, None, (0,) * len(snapshots)), snapshots)
        snapshots[chosen] = sent(snapshots[chosen], 100, 100)
        got[chosen] += 1
    return [got[index] for index in range(len(snapshots))]


@pytest.mark.parametrize("router", [LeastLoaded(), PrefixAware(), PoolAware(36_000, 13_000)], ids=repr)
def test_a_burst_between_two_refreshes_spreads(router):
    snapshots = [Snapshot(InstanceId(0)), *(Snapshot(InstanceId(index), 0, 0, 1, 100, 100) for index in (1, 2, 3))]
    assert burst(router, snapshots, 13) == [4, 3, 3, 3]
    assert burst(router, snapshots, 13, sent=lambda snapshot, *_: snapshot) == [13, 0, 0, 0], "control: all go to one"


# --- sessions ---------------------------------------------------------------------------------------------------------

SESSIONS = [f"session {number}" for number in range(2_000)]


def homes(router, snapshots):
    """Name of each session's instance."""
    return [snapshots[router.choose(Arrival(9, 1, session), snapshots)].instance for session in SESSIONS]


@given(CASES, CASES, st.randoms(use_true_random=False))
def test_a_session_stays_whatever_the_load_and_the_order(case, other, rng):
    session, router = case.arrival.session or "s", SessionAffinity()
    before = case.snapshots[router.choose(replace(case.arrival, session=session), case.snapshots)].instance
    shuffled = [replace(snapshot, num_running=rng.randrange(9)) for snapshot in case.snapshots]
    rng.shuffle(shuffled)
    after = shuffled[router.choose(replace(other.arrival, session=session), shuffled)].instance
    assert after == before


def moves_only_what_it_must(router):
    """Sessions of an instance that leaves go elsewhere, as many as it had a share; all others stay; and back again."""
    whole = idle(10)
    before, after = homes(router, whole), homes(router, [*whole[:4], *whole[5:]])
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    return set(moved) == {4} and 0.07 < len(moved) / len(SESSIONS) < 0.13


def test_few_sessions_move_when_an_instance_leaves_or_joins():
    assert moves_only_what_it_must(SessionAffinity())
    shares = Counter(homes(SessionAffinity(), idle(10))).values()
    assert len(shares) == 10 and max(shares) < 1.25 * len(SESSIONS) / 10


@dataclass(frozen=True)
class Modulo:
    """A session's number modulo the number of instances."""

    reads: ClassVar = SessionAffinity.reads

    def choose(self, arrival, snapshots):
        return int(arrival.session.split()[1]) % len(snapshots)


def test_control_a_modulo_moves_nearly_all():
    assert not moves_only_what_it_must(Modulo())


@given(CASES)
def test_without_a_session_the_load_decides(case):
    arrival = replace(case.arrival, session=None)
    assert SessionAffinity().choose(arrival, case.snapshots) == LeastLoaded().choose(arrival, case.snapshots)


# --- prefixes ---------------------------------------------------------------------------------------------------------


def prefers_longer_prefixes(router, case):
    """At equal load the choice is one of the longest prefixes."""
    level = [replace(case.snapshots[0], instance=snapshot.instance) for snapshot in case.snapshots]
    cached_lens = case.arrival.cached_lens
    return cached_lens[router.choose(replace(case.arrival, pool_hit_len=None), level)] == max(cached_lens)


@pytest.mark.parametrize("router", [PrefixAware(), PrefixAware(0.1, 0.1), PoolAware(36_000, 13_000)], ids=repr)
def test_at_equal_load_the_longest_prefix_wins(router):
    @given(CASES)
    def wins(case):
        assert prefers_longer_prefixes(router, case)

    wins()


@pytest.mark.parametrize("router", [LeastLoaded(), PrefixAware(overlap_score_credit=0.0)], ids=repr)
def test_control_a_router_without_eyes_for_prefixes_does_not_see_them(router):
    assert refuted(prefers_longer_prefixes, router)


def test_the_example_of_dynamos_documentation():
    """Routing Concepts: blocks cached 2, 5, 8 of 10; decode blocks 10, 5, 9. The costs are 18, 10 and 11."""
    snapshots = [Snapshot(InstanceId(index), num_prompt_tokens=held) for index, held in enumerate((10, 5, 9))]
    assert PrefixAware().choose(Arrival(0, 10, None, (2, 5, 8)), snapshots) == 1
    assert PrefixAware(prefill_load_scale=2).choose(Arrival(0, 10, None, (2, 5, 8)), snapshots) == 2


@pytest.mark.parametrize("values", [(1.5, 1.0), (-0.1, 1.0), (1.0, -1.0)])
def test_parameters_outside_their_bounds_are_refused(values):
    with pytest.raises(InvalidArgument):
        PrefixAware(*values)
    with pytest.raises(InvalidArgument, match="transfer_ns_per_token = -1"):
        PoolAware(1, -1)


# --- pool -------------------------------------------------------------------------------------------------------------

RATES_NS = st.sampled_from([0, 1, 13, 36, 10**12])


def ttft_ns(prefill_ns, transfer_ns, arrival, snapshot, cached_len):
    """Token by token: on the instance already, in the pool, or to be computed."""
    total_ns = snapshot.num_queued_tokens * prefill_ns
    for token in range(cached_len, arrival.prompt_len):
        in_pool = token < (arrival.pool_hit_len or 0)
        total_ns += min(transfer_ns, prefill_ns) if in_pool else prefill_ns
    return total_ns


def is_first_of_the_fastest(choose, prefill_ns, transfer_ns, case):
    pairs = zip(case.snapshots, case.arrival.cached_lens, strict=True)
    times_ns = [ttft_ns(prefill_ns, transfer_ns, case.arrival, *pair) for pair in pairs]
    router = PoolAware(prefill_ns, transfer_ns)
    return choose(router, case.arrival, case.snapshots) == least(times_ns, case.arrival)


@given(CASES, RATES_NS, RATES_NS)
def test_pool_aware_takes_the_shortest_estimated_ttft(case, prefill_ns, transfer_ns):
    assert is_first_of_the_fastest(PoolAware.choose, prefill_ns, transfer_ns, case)


@pytest.mark.parametrize(
    "forget",
    [
        lambda arrival, snapshots: (arrival, [replace(snapshot, num_queued_tokens=0) for snapshot in snapshots]),
        lambda arrival, snapshots: (replace(arrival, pool_hit_len=None), snapshots),
        lambda arrival, snapshots: (replace(arrival, cached_lens=(0,) * len(snapshots)), snapshots),
    ],
    ids=["queue", "pool", "prefix"],
)
def test_control_forgetting_any_part_of_the_estimate_is_found(forget):
    def says(choose, case):
        return is_first_of_the_fastest(choose, 36, 13, case)

    assert refuted(says, lambda router, arrival, snapshots: router.choose(*forget(arrival, snapshots)))


@given(CASES)
def test_over_a_link_too_slow_to_use_only_the_local_prefix_counts(case):
    never, alone = PoolAware(36, 10**12), replace(case.arrival, pool_hit_len=None)
    assert never.choose(case.arrival, case.snapshots) == never.choose(alone, case.snapshots)


@given(CASES)
def test_when_transfer_is_free_only_the_queue_counts(case):
    arrival = replace(case.arrival, pool_hit_len=max(case.arrival.cached_lens))
    queues = [snapshot.num_queued_tokens for snapshot in case.snapshots]
    assert PoolAware(36, 0).choose(arrival, case.snapshots) == least(queues, arrival)
    assert PoolAware(0, 0).choose(arrival, case.snapshots) == RoundRobin().choose(arrival, case.snapshots)


def test_a_queue_is_weighed_against_a_transfer():
    """1,000 tokens cached on a busy instance: fetching them takes as long as computing 500."""
    router, arrival = PoolAware(2, 1), Arrival(0, 2_000, None, (1_000, 0), 1_000)

    def chosen(queued):
        return router.choose(arrival, [Snapshot(InstanceId(0), num_queued_tokens=queued), Snapshot(InstanceId(1))])

    assert [chosen(queued) for queued in (0, 499, 501)] == [0, 0, 1]


# --- what a router thinks is cached -----------------------------------------------------------------------------------


class PlainIndex:
    """Blocks one by one, next to be evicted first: a sequence goes to the end as a whole, its last block first."""

    def __init__(self, num_instances, num_blocks):
        self.num_blocks = num_blocks
        self.caches = [[] for _ in range(num_instances)]

    def cached_blocks(self, segments, limit_blocks):
        names = named(segments)[:limit_blocks]
        absent = [[name for name in names if name not in cache] for cache in self.caches]
        return tuple(names.index(missing[0]) if missing else len(names) for missing in absent)

    def add(self, instance, segments, num_blocks):
        names = named(segments)[:num_blocks]
        kept = [name for name in self.caches[instance] if name not in names]
        num_evicted = max(0, len(kept) + len(names) - self.num_blocks)
        self.caches[instance] = kept[num_evicted:] + names[::-1]


class ForgetsUses(PlainIndex):
    """First in, first out."""

    def add(self, instance, segments, num_blocks):
        if self.cached_blocks(segments, num_blocks)[instance] < num_blocks:
            super().add(instance, segments, num_blocks)


class KeepsHeads(PlainIndex):
    """Evicts a sequence from its first block on."""

    def add(self, instance, segments, num_blocks):
        super().add(instance, segments, num_blocks)
        names = named(segments)[:num_blocks]
        self.caches[instance][-len(names) :] = names


def named(segments):
    return [(stream, block) for stream, start, end in segments for block in range(start, end)]


def tree(stream):
    """Sequences of four lineages: 0 is the root, 1 and 2 leave it, 3 leaves 1."""
    path = {0: [(0, 8)], 1: [(0, 3), (1, 8)], 2: [(0, 5), (2, 8)], 3: [(0, 3), (1, 5), (3, 8)]}[stream]
    starts = [0, *(end for _, end in path)]
    return tuple((name, start, end) for (name, end), start in zip(path, starts, strict=False))


USES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 2, 3]), st.integers(1, 8)), max_size=25)


def agrees(plain, uses, num_blocks):
    index, expected = PrefixIndex(2, num_blocks), plain(2, num_blocks)
    for instance, stream, length in uses:
        for some in range(4):
            if index.cached_blocks(tree(some), length) != expected.cached_blocks(tree(some), length):
                return False
        index.add(instance, tree(stream), length)
        expected.add(instance, tree(stream), length)
    return True


# The root is used again before a third lineage needs room, so that the second one's tail must go.
COMES_BACK = [(0, 0, 8), (0, 1, 8), (0, 0, 8), (0, 3, 8), (0, 0, 8)]


@given(USES, st.integers(8, 20))
@example(COMES_BACK, 14)
def test_the_index_forgets_in_the_engines_order(uses, num_blocks):
    assert agrees(PlainIndex, uses, num_blocks)


@pytest.mark.parametrize("wrong", [ForgetsUses, KeepsHeads])
def test_control_another_order_is_found(wrong):
    assert not agrees(wrong, COMES_BACK, 14)

"""Every routing policy keeps every rule; wrong ones are rejected, each by the rule it breaks."""

from dataclasses import dataclass, field, fields
from typing import ClassVar

import pytest
from hypothesis import Phase, find, given, settings

from kvcore.routing.least_loaded import LeastLoaded
from kvcore.routing.pool_aware import PoolAware
from kvcore.routing.prefix_aware import PrefixAware
from kvcore.routing.round_robin import RoundRobin
from kvcore.routing.router import Arrival, Fact, Snapshot, least
from kvcore.routing.session_affinity import SessionAffinity
from tests.contract import router_contract as contract
from tests.contract.router_contract import PAIRS, RULES, with_facts_of

ROUTERS = [
    RoundRobin(),
    LeastLoaded(),
    SessionAffinity(),
    PrefixAware(),
    PrefixAware(overlap_score_credit=0.3, prefill_load_scale=2.5),
    PoolAware(prefill_ns_per_token=36_000, transfer_ns_per_token=13_000),
    PoolAware(prefill_ns_per_token=0, transfer_ns_per_token=0),
]

# A search that ends with the first case, and raises when it finds none.
SEARCH = settings(max_examples=2_000, phases=[Phase.generate], derandomize=True)


def broken(rule, router, pair):
    try:
        rule(router, *pair)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_every_router_keeps_every_rule(router):
    @given(PAIRS)
    def keeps(pair):
        for rule in RULES:
            rule(router, *pair)

    keeps()


@pytest.mark.parametrize("router", ROUTERS[:-1], ids=repr)
def test_nothing_is_gathered_in_vain(router):
    """Every fact that a router says it reads changes some choice."""
    for fact in router.reads:

        def matters(pair, fact=fact):
            case, other = pair[0], with_facts_of(*pair, {fact})
            return router.choose(case.arrival, case.snapshots) != router.choose(other.arrival, other.snapshots)

        find(PAIRS, matters, settings=SEARCH)


def test_nothing_that_a_router_is_told_lies_in_the_future():
    assert [f.name for f in fields(Arrival)] == ["number", "prompt_len", "session", "cached_lens", "pool_hit_len"]
    told = {f.name.removeprefix("num_") for f in fields(Snapshot)}
    assert told == {"instance", "taken_at_ns", "waiting", "running", "queued_tokens", "prompt_tokens"}


# --- negative controls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountsFromOne:
    reads: ClassVar = frozenset()

    def choose(self, arrival, snapshots):
        return arrival.number % len(snapshots) + 1


@dataclass(frozen=True)
class Remembers:
    """A round robin that counts by itself."""

    reads: ClassVar = frozenset()
    seen: list = field(default_factory=list)

    def choose(self, arrival, snapshots):
        self.seen.append(arrival)
        return len(self.seen) % len(snapshots)


@dataclass(frozen=True)
class SortsInPlace:
    reads: ClassVar = frozenset({Fact.LOAD})

    def choose(self, arrival, snapshots):
        if isinstance(snapshots, list):
            snapshots.sort(key=lambda snapshot: snapshot.num_running)
        return 0


@dataclass
class IsNoValue:
    reads: ClassVar = frozenset()
    start: int = 0

    def choose(self, arrival, snapshots):
        return (arrival.number + self.start) % len(snapshots)


@dataclass(frozen=True)
class Peeks:
    """Says that it looks at the load alone."""

    reads: ClassVar = frozenset({Fact.LOAD})

    def choose(self, arrival, snapshots):
        hits = arrival.cached_lens or (0,) * len(snapshots)
        return least([-hit_len for hit_len in hits], arrival)


@dataclass(frozen=True)
class PrefersTheFirst:
    reads: ClassVar = frozenset({Fact.LOAD})

    def choose(self, arrival, snapshots):
        return min(range(len(snapshots)), key=lambda index: snapshots[index].num_running)


@pytest.mark.parametrize(
    ("router", "rule"),
    [
        (CountsFromOne(), contract.chooses_an_instance),
        (Remembers(), contract.is_a_function_of_its_arguments),
        (SortsInPlace(), contract.changes_nothing),
        (IsNoValue(), contract.changes_nothing),
        (Peeks(), contract.reads_what_it_says),
        (Peeks(), contract.does_without_what_it_does_not_read),
        (PrefersTheFirst(), contract.ties_go_round),
    ],
    ids=lambda item: getattr(item, "__name__", type(item).__name__),
)
def test_control_a_wrong_router_is_rejected(router, rule):
    find(PAIRS, lambda pair: broken(rule, router, pair), settings=SEARCH)

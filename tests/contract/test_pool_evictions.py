"""Every eviction policy of the pool keeps every rule; wrong ones are rejected, each by the rule it breaks."""

import random

import pytest
from hypothesis import Phase, find, given, settings

from kvcore.eviction.leaf_first import LeafFirstRuns
from kvcore.eviction.lru import LruRuns
from kvcore.eviction.session_aware import SessionAwareRuns
from kvcore.hints import Pin
from kvsim.config.pool import EVICTIONS
from kvsim.pool.extents import rank_of
from kvsim.pool.policy_pool import LinedExtents, PolicyPool
from kvsim.pool.store import MooncakePool
from tests.contract import eviction_contract as contract
from tests.contract.eviction_contract import CASES, RULES

POOLS = {
    "mooncake": MooncakePool,
    "lru": lambda *shape: PolicyPool(*shape, LruRuns()),
    "leaf_first": lambda *shape: PolicyPool(*shape, LeafFirstRuns()),
    "session_aware": lambda *shape: PolicyPool(*shape, SessionAwareRuns()),
}

# A search that ends with the first case, and raises when it finds none.
SEARCH = settings(max_examples=2_000, phases=[Phase.generate], derandomize=True)


def test_every_policy_that_a_scenario_can_name_is_here():
    assert tuple(POOLS) == EVICTIONS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", POOLS)
@given(CASES)
def test_every_policy_keeps_every_rule(name, rule, case):
    rule(POOLS[name], case)


class AnyGoes(LinedExtents):
    """Looks at neither lease nor pin."""

    def pop_expired(self, rank, now_ns):
        for lineage, extent in self:
            if self.goes(extent):
                return (extent.grant, -extent.end, extent.start, lineage)
        return None

    def goes(self, extent):
        return True


class LeasedGo(AnyGoes):
    def goes(self, extent):
        return rank_of(extent.mark) is not None


class HardPinnedGo(AnyGoes):
    def goes(self, extent):
        return extent.mark is not None and extent.mark.pin is Pin.HARD


class AtRandom(LinedExtents):
    def _line(self, rank, now_ns):
        line = super()._line(rank, now_ns)
        for _ in range(random.randrange(3)):
            if (candidate := line.take()) is not None:
                line.offer((random.randrange(10), *candidate[1:]))
        return line

    def _may_go(self, candidate, rank, now_ns):
        _, negative_end, start, lineage = candidate
        extents = self.overlapping(lineage, start, -negative_end)
        return len(extents) == 1 and super()._may_go((extents[0].grant, *candidate[1:]), rank, now_ns)


class OneStays(LinedExtents):
    """Lets the last one in line stay."""

    def pop_expired(self, rank, now_ns):
        candidate = super().pop_expired(rank, now_ns)
        others = [found for of, found in self._queued() if of == rank and found != candidate]
        return candidate if others else None


def pool_over(extents):
    def make(*shape):
        pool = PolicyPool(*shape, LruRuns())
        pool._extents = extents(LruRuns().line)
        return pool

    return make


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (LeasedGo, contract.never_evicts_what_is_leased),
        (HardPinnedGo, contract.never_evicts_what_is_pinned_hard),
        (OneStays, contract.evicts_as_many_as_the_master),
        (AtRandom, contract.is_determined_by_its_calls),
    ],
)
def test_a_wrong_pool_is_rejected(wrong, rule):
    def breaks(case):
        try:
            rule(pool_over(wrong), case)
        except AssertionError:
            return True
        return False

    find(CASES, breaks, settings=SEARCH)

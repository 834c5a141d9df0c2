"""Whether a hit is fetched: rules every policy keeps, what each one is for, and that a request follows it."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.costs import Costs, PrefillCurve
from kvcore.errors import InvalidArgument
from kvcore.group_runs import count_blocks, plus
from kvcore.loading import LoadAlways, LoadCheaper, LoadInTime
from kvcore.plans import Offer, PoolPolicy
from kvcore.runs import from_blocks
from tests.kvcore.one_request import FULL, PROMPT, B, answer, machine
from tests.kvcore.policy_rules import find_broken

COSTS = Costs(PrefillCurve(token_ns=100, pair_ps=1_000), block_ns=(1_700, 10), latency_ns=5_000)
POLICIES = [LoadAlways(), LoadCheaper(COSTS), LoadInTime(COSTS, budget_ns=0), LoadInTime(COSTS, budget_ns=12_000)]

BLOCKS = st.tuples(*(st.frozensets(st.integers(0, 12), max_size=8).map(from_blocks) for _ in range(2)))


@dataclass(frozen=True)
class Case:
    local_hit_len: int
    gain: int
    more_gain: int
    blocks: tuple
    more_blocks: tuple

    def decided(self, policy):
        return policy.worth(self.local_hit_len, self.local_hit_len + self.gain, self.blocks)


CASES = st.builds(Case, st.integers(0, 200), st.integers(1, 200), st.integers(0, 100), BLOCKS, BLOCKS)


def is_a_function_of_its_arguments(policy, case):
    first = case.decided(policy)
    policy.worth(0, 1, case.more_blocks)
    assert type(first) is bool and case.decided(policy) is first


def cannot_be_changed(policy, case):
    for name in policy.__slots__:
        with pytest.raises(FrozenInstanceError):
            setattr(policy, name, None)


def more_to_fetch_is_not_worth_more(policy, case):
    end = case.local_hit_len + case.gain
    dearer = policy.worth(case.local_hit_len, end, plus(case.blocks, case.more_blocks))
    assert case.decided(policy) or not dearer


def more_tokens_for_it_are_not_worth_less(policy, case):
    end = case.local_hit_len + case.gain + case.more_gain
    assert policy.worth(case.local_hit_len, end, case.blocks) or not case.decided(policy)


RULES = [
    is_a_function_of_its_arguments,
    cannot_be_changed,
    more_to_fetch_is_not_worth_more,
    more_tokens_for_it_are_not_worth_less,
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(CASES)
def test_every_policy_keeps_every_rule(policy, case):
    for rule in RULES:
        rule(policy, case)


@dataclass(frozen=True, slots=True)
class LongLoadsOnly:
    def worth(self, local_hit_len, hit_len, blocks):
        return count_blocks(blocks) > 4


@dataclass(frozen=True, slots=True)
class ShortHitsOnly:
    def worth(self, local_hit_len, hit_len, blocks):
        return hit_len - local_hit_len < 100


@dataclass(slots=True)
class EveryThirdTime:
    calls: int = 0

    def worth(self, local_hit_len, hit_len, blocks):
        self.calls += 1
        return self.calls % 3 == 0


BROKEN = [
    (is_a_function_of_its_arguments, EveryThirdTime()),
    (cannot_be_changed, EveryThirdTime()),
    (more_to_fetch_is_not_worth_more, LongLoadsOnly()),
    (more_tokens_for_it_are_not_worth_less, ShortHitsOnly()),
]


@pytest.mark.parametrize(("rule", "wrong"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_each_rule_rejects_a_policy_that_breaks_it(rule, wrong):
    find_broken(rule, wrong, CASES)


# -- what each is for -------------------------------------------------------------------------------------------------

SIX_BLOCKS = (((0, 6),), ())  # 15,200 ns


@pytest.mark.parametrize(
    ("local_hit_len", "hit_len", "cheaper"), [(0, 96, False), (0, 112, True), (1_000, 1_096, True)]
)
def test_what_is_far_back_costs_more_to_compute(local_hit_len, hit_len, cheaper):
    """By hand: 96 tokens take 9,600 + 4,560 ns after nothing, 96,000 ns more after a thousand."""
    assert COSTS.fetch_ns(SIX_BLOCKS) == 15_200
    assert LoadCheaper(COSTS).worth(local_hit_len, hit_len, SIX_BLOCKS) is cheaper


@pytest.mark.parametrize(("budget_ns", "in_time"), [(0, False), (15_199, False), (15_200, True), (10**9, True)])
def test_a_load_that_is_slower_than_computing_is_fetched_if_it_is_in_time(budget_ns, in_time):
    assert not LoadCheaper(COSTS).worth(0, 96, SIX_BLOCKS)
    assert LoadInTime(COSTS, budget_ns).worth(0, 96, SIX_BLOCKS) is in_time


@given(CASES)
def test_without_a_budget_only_what_is_cheaper_is_fetched(case):
    assert case.decided(LoadInTime(COSTS, 0)) == case.decided(LoadCheaper(COSTS))


def test_a_hit_that_needs_no_block_is_free():
    assert COSTS.fetch_ns(((), ())) == 0
    assert LoadCheaper(COSTS).worth(0, 16, ((), ()))


def test_a_negative_budget_is_the_callers_mistake():
    with pytest.raises(InvalidArgument, match="budget_ns = -1: expected at least 0"):
        LoadInTime(COSTS, -1)


# -- in a request -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_ns", "offered_len"), [(1_500, 10 * B), (3_000, 0)])
def test_a_request_offers_what_is_worth_it(block_ns, offered_len):
    """Ten blocks against 160 tokens, which take 16,000 + 12,720 ns."""
    costs = Costs(PrefillCurve(100, 1_000), (block_ns,))
    request = machine(FULL, PoolPolicy(loading=LoadCheaper(costs)))
    answer(request, request.consider(0, PROMPT, 0), (((0, 10),),))
    assert request.consider(0, PROMPT, 0) == Offer(offered_len)
    load = request.granted(offered_len, 0)
    assert (load is not None) == (offered_len > 0)

"""Whether a hit is fetched: rules every policy keeps, what each one is for, and that a request follows it."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.costs import Costs, PrefillCurve
from kvcore.errors import InvalidArgument
from kvcore.group_runs import count_blocks, plus
from kvcore.loading import LoadAlways, LoadCheaper, LoadInTime
from kvcore.plans import Offer, PoolPolicy, Wait
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
    waited_ns: int
    more_waited_ns: int

    def decided(self, policy):
        return policy.worth(self.local_hit_len, self.local_hit_len + self.gain, self.blocks, self.waited_ns)


WAITED = st.integers(0, 20_000)
CASES = st.builds(Case, st.integers(0, 200), st.integers(1, 200), st.integers(0, 100), BLOCKS, BLOCKS, WAITED, WAITED)


def is_a_function_of_its_arguments(policy, case):
    first = case.decided(policy)
    policy.worth(0, 1, case.more_blocks, case.more_waited_ns)
    assert type(first) is bool and case.decided(policy) is first


def cannot_be_changed(policy, case):
    for name in policy.__slots__:
        with pytest.raises(FrozenInstanceError):
            setattr(policy, name, None)


def more_to_fetch_is_not_worth_more(policy, case):
    end = case.local_hit_len + case.gain
    dearer = policy.worth(case.local_hit_len, end, plus(case.blocks, case.more_blocks), case.waited_ns)
    assert case.decided(policy) or not dearer


def more_tokens_for_it_are_not_worth_less(policy, case):
    end = case.local_hit_len + case.gain + case.more_gain
    assert policy.worth(case.local_hit_len, end, case.blocks, case.waited_ns) or not case.decided(policy)


def it_is_not_worth_more_to_one_that_waited_longer(policy, case):
    end, waited_ns = case.local_hit_len + case.gain, case.waited_ns + case.more_waited_ns
    assert case.decided(policy) or not policy.worth(case.local_hit_len, end, case.blocks, waited_ns)


RULES = [
    is_a_function_of_its_arguments,
    cannot_be_changed,
    more_to_fetch_is_not_worth_more,
    more_tokens_for_it_are_not_worth_less,
    it_is_not_worth_more_to_one_that_waited_longer,
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(CASES)
def test_every_policy_keeps_every_rule(policy, case):
    for rule in RULES:
        rule(policy, case)


@dataclass(frozen=True, slots=True)
class LongLoadsOnly:
    def worth(self, local_hit_len, hit_len, blocks, waited_ns):
        return count_blocks(blocks) > 4


@dataclass(frozen=True, slots=True)
class ShortHitsOnly:
    def worth(self, local_hit_len, hit_len, blocks, waited_ns):
        return hit_len - local_hit_len < 100


@dataclass(frozen=True, slots=True)
class OldOnesOnly:
    def worth(self, local_hit_len, hit_len, blocks, waited_ns):
        return waited_ns > 10_000


@dataclass(slots=True)
class EveryThirdTime:
    calls: int = 0

    def worth(self, local_hit_len, hit_len, blocks, waited_ns):
        self.calls += 1
        return self.calls % 3 == 0


BROKEN = [
    (is_a_function_of_its_arguments, EveryThirdTime()),
    (cannot_be_changed, EveryThirdTime()),
    (more_to_fetch_is_not_worth_more, LongLoadsOnly()),
    (more_tokens_for_it_are_not_worth_less, ShortHitsOnly()),
    (it_is_not_worth_more_to_one_that_waited_longer, OldOnesOnly()),
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
    assert LoadCheaper(COSTS).worth(local_hit_len, hit_len, SIX_BLOCKS, 0) is cheaper


@pytest.mark.parametrize(
    ("budget_ns", "waited_ns", "in_time"),
    [(0, 0, False), (15_199, 0, False), (15_200, 0, True), (15_200, 1, False), (10**9, 10**9 - 15_200, True)],
)
def test_a_load_that_is_slower_than_computing_is_fetched_if_it_is_in_time(budget_ns, waited_ns, in_time):
    assert not LoadCheaper(COSTS).worth(0, 96, SIX_BLOCKS, waited_ns)
    assert LoadInTime(COSTS, budget_ns).worth(0, 96, SIX_BLOCKS, waited_ns) is in_time


@pytest.mark.parametrize(("hit_len", "worth"), [(96, False), (112, True)])
def test_when_neither_is_in_time_the_one_that_ends_first_is_chosen(hit_len, worth):
    """Computing takes 14,160 and 17,416 ns; of the budget 1,000 ns are left."""
    assert LoadInTime(COSTS, budget_ns=20_000).worth(0, hit_len, SIX_BLOCKS, 19_000) is worth


@given(CASES)
def test_without_a_budget_only_what_is_cheaper_is_fetched(case):
    assert case.decided(LoadInTime(COSTS, 0)) == case.decided(LoadCheaper(COSTS))


def test_a_hit_that_needs_no_block_is_free():
    assert COSTS.fetch_ns(((), ())) == 0
    assert LoadCheaper(COSTS).worth(0, 16, ((), ()), 0)


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


@pytest.mark.parametrize(("answered_ns", "offered_len"), [(70_000, 10 * B), (70_001, 0)])
def test_the_budget_counts_from_when_the_request_was_first_considered(answered_ns, offered_len):
    """Ten blocks take 30,000 ns, computing less; of 100,000 ns that leaves 70,000 for the lookup, from 1,000 on."""
    costs = Costs(PrefillCurve(100, 1_000), (3_000,))
    request = machine(FULL, PoolPolicy(loading=LoadInTime(costs, 100_000), offer_ttl_ns=10**6))
    lookup = request.consider(0, PROMPT, 1_000)
    assert isinstance(request.consider(0, PROMPT, 50_000), Wait)
    answer(request, lookup, (((0, 10),),), 60_000)
    assert request.consider(0, PROMPT, 1_000 + answered_ns) == Offer(offered_len)
    assert request.consider(0, PROMPT, 900_000) == Offer(offered_len), "an offer is repeated as it was made"

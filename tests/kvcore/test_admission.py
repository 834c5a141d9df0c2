"""Which blocks are stored: rules every policy keeps, what each is for, and that chunks of prefill change nothing."""

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.admission import AdmitAll, AdmitCheaper, AdmitLater, AdmitNone, AdmitSecondTouch
from kvcore.costs import Costs, PrefillCurve
from kvcore.errors import InvalidArgument
from kvcore.group_runs import common, count_blocks, plus
from kvcore.memory import Experience
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.runs import from_blocks
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from tests.kvcore.policy_rules import find_broken

B = 16
PLANNER = Planner(ModelSpec((FullAttention(B), SlidingWindow(B, window=2 * B + 1))))
NOTHING = PLANNER.nothing
# A token takes 100 ns and 1 ns for each one before it; a block takes the time of 17 tokens without a past.
COSTS = Costs(PrefillCurve(token_ns=100, pair_ps=1_000), block_ns=(1_700, 10), latency_ns=5_000)
CHEAPER = AdmitCheaper(PLANNER, COSTS)
POLICIES = [AdmitAll(), AdmitLater(), AdmitNone(), AdmitSecondTouch(), CHEAPER]

BLOCKS = st.tuples(*(st.frozensets(st.integers(0, 12), max_size=6).map(from_blocks) for _ in range(2)))


@dataclass(frozen=True)
class Case:
    blocks: tuple
    again: tuple
    more: tuple
    sequence_len: int


CASES = st.builds(Case, BLOCKS, BLOCKS, BLOCKS, st.integers(1, 400))


# -- rules ------------------------------------------------------------------------------------------------------------


def stores_only_what_is_there(policy, case):
    admitted = policy.admit(case.blocks, case.again, case.sequence_len)
    assert common(admitted, case.blocks) == admitted


def is_a_function_of_its_arguments(policy, case):
    first = policy.admit(case.blocks, case.again, case.sequence_len)
    policy.admit(case.more, case.blocks, case.sequence_len + 100)
    assert policy.admit(case.blocks, case.again, case.sequence_len) == first


def cannot_be_changed(policy, case):
    for name in policy.__slots__:
        with pytest.raises(FrozenInstanceError):
            setattr(policy, name, None)


def takes_no_less_of_what_it_met_before(policy, case):
    few = policy.admit(case.blocks, case.again, case.sequence_len)
    many = policy.admit(case.blocks, plus(case.again, case.more), case.sequence_len)
    assert common(few, many) == few


def takes_no_less_of_a_longer_sequence(policy, case):
    few = policy.admit(case.blocks, case.again, case.sequence_len)
    many = policy.admit(case.blocks, case.again, case.sequence_len + B)
    assert common(few, many) == few


RULES = [
    stores_only_what_is_there,
    is_a_function_of_its_arguments,
    cannot_be_changed,
    takes_no_less_of_what_it_met_before,
    takes_no_less_of_a_longer_sequence,
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(CASES)
def test_every_policy_keeps_every_rule(policy, case):
    for rule in RULES:
        rule(policy, case)


@dataclass(frozen=True, slots=True)
class FirstTouchOnly:
    def admit(self, blocks, again, sequence_len):
        return blocks if not any(again) else NOTHING


@dataclass(frozen=True, slots=True)
class StoresWhatIsNotThere:
    def admit(self, blocks, again, sequence_len):
        return plus(blocks, again)


@dataclass(frozen=True, slots=True)
class ShortOnly:
    def admit(self, blocks, again, sequence_len):
        return blocks if sequence_len < 100 else NOTHING


@dataclass(slots=True)
class EveryThirdTime:
    calls: int = 0

    def admit(self, blocks, again, sequence_len):
        self.calls += 1
        return blocks if self.calls % 3 == 1 else NOTHING


BROKEN = [
    (stores_only_what_is_there, StoresWhatIsNotThere()),
    (is_a_function_of_its_arguments, EveryThirdTime()),
    (cannot_be_changed, EveryThirdTime()),
    (takes_no_less_of_what_it_met_before, FirstTouchOnly()),
    (takes_no_less_of_a_longer_sequence, ShortOnly()),
]


@pytest.mark.parametrize(("rule", "wrong"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_each_rule_rejects_a_policy_that_breaks_it(rule, wrong):
    find_broken(rule, wrong, CASES)


# -- what each is for -------------------------------------------------------------------------------------------------


def test_second_touch_stores_what_was_had_before():
    blocks = (((0, 4),), ((2, 4),))
    assert AdmitSecondTouch().admit(blocks, NOTHING, 64) == NOTHING
    assert AdmitSecondTouch().admit(blocks, (((1, 9),), ()), 64) == (((1, 4),), ())


def test_a_sequence_is_stored_from_the_length_on_at_which_fetching_it_is_cheaper():
    """By hand: 7 blocks of 1,700 ns, 2 of the window and 5,000 ns are 16,920 ns; 112 tokens take 11,200 + 6,216 ns."""
    blocks = (((0, 1),), ((0, 1),))
    assert COSTS.fetch_ns(PLANNER.held(112)) == 16_920
    assert COSTS.prefill_ns(0, 112) == 17_416
    stored = [length for length in range(16, 400, 16) if CHEAPER.admit(blocks, NOTHING, length) == blocks]
    assert stored == list(range(112, 400, 16))
    assert CHEAPER.admit(blocks, NOTHING, 96) == CHEAPER.admit(blocks, NOTHING, 113) == NOTHING, "an eighth block"


def test_nothing_is_stored_over_a_link_that_is_slower_than_computing():
    slow = AdmitCheaper(PLANNER, replace(COSTS, block_ns=(10**9, 0)))
    assert slow.admit((((0, 9),), ()), NOTHING, 10_000) == NOTHING


def test_costs_name_every_group():
    with pytest.raises(InvalidArgument, match=r"costs.block_ns = \(1,\): expected 2 entries"):
        AdmitCheaper(PLANNER, Costs(PrefillCurve(1), (1,)))
    with pytest.raises(InvalidArgument, match="block_ns"):
        Costs(PrefillCurve(1), (1, -1))
    with pytest.raises(InvalidArgument, match="latency_ns = -1: expected at least 0"):
        Costs(PrefillCurve(1), (1,), -1)
    with pytest.raises(InvalidArgument, match="pair_ps"):
        PrefillCurve(1, -1)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 50), st.integers(0, 5_000))
def test_the_curve_adds_up_token_by_token(start_len, first, second, token_ns, pair_ps):
    curve = PrefillCurve(token_ns, pair_ps * 1_000)  # whole nanoseconds, so that nothing is rounded
    middle, end_len = start_len + first, start_len + first + second
    assert curve(start_len, middle) + curve(middle, end_len) == curve(start_len, end_len)
    assert curve(start_len, start_len + 1) == token_ns + pair_ps * start_len


# -- in a request -----------------------------------------------------------------------------------------------------


def served(policy, chunk_len, num_prompt, experience=None, local=0):
    """All that a request of the same content stores, computed in chunks, with a pool that is empty."""
    patience = PoolPolicy(admission=policy)
    request = KVRequest(PLANNER, patience, num_prompt, experience or Experience())
    lookup = request.consider(local, num_prompt, 0)
    while lookup.dialogue.open:
        lookup.dialogue.answered(NOTHING)
    request.lookup_answered(lookup.ticket, 0)
    request.consider(local, num_prompt, 0)
    request.granted(0, 0)
    plans = [
        request.computed(min(end, num_prompt), 0) for end in range(local + chunk_len, num_prompt + chunk_len, chunk_len)
    ]
    for plan in [*plans, request.finished(num_prompt, 0)]:
        if plan is not None:
            request.store_finished(plan.ticket, NOTHING, 0)
    return request.decisions.stored


@pytest.mark.parametrize("policy", [AdmitAll(), CHEAPER])
@pytest.mark.parametrize("num_prompt", [60, 100, 300])
def test_chunks_of_prefill_change_nothing(policy, num_prompt):
    stored = [served(policy, chunk_len, num_prompt) for chunk_len in (16, 48, 1_000)]
    assert stored[0] == stored[1] == stored[2]
    assert any(stored[0]) == (policy == AdmitAll() or num_prompt > 112)


def test_the_second_request_stores_what_the_first_did_not():
    experience = Experience()
    assert served(AdmitSecondTouch(), 48, 200, experience) == NOTHING
    computed_again = served(AdmitSecondTouch(), 48, 200, experience)
    assert computed_again == served(AdmitAll(), 48, 200) and count_blocks(computed_again) > 12
    assert served(AdmitSecondTouch(), 48, 200, Experience()) == NOTHING, "another engine has not had it"


def test_a_local_hit_is_a_touch():
    experience = Experience()
    served(AdmitSecondTouch(), 48, 200, experience)
    stored = served(AdmitSecondTouch(), 48, 200, experience, local=96)
    assert stored[0] == ((0, 12),), "the six blocks it found, and the six it computed again"

"""The thread that asks: round by round, in order, never waited for."""

import threading
import time

import pytest
from kvconnector.lookups import LATE_PATIENCE_NS, LookupThread

import kvcore.frontier
from kvcore.planner import Planner
from kvcore.plans import Lookup
from kvcore.runs import intersect
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import NS_PER_MS
from tests.kvconnector.test_transfer import DEADLINE_MS, HandClock, until

BLOCK = 4
PLANNER = Planner(ModelSpec((FullAttention(BLOCK),)))
NUM_TOKENS = 8_001
"""2,000 blocks to ask for: 125 in the first round, 500 in the second, and the rest."""
ROUNDS = [((0, 125),), ((125, 625),), ((625, 2_000),)]
ALL = ((0, 2_000),)


@pytest.fixture(autouse=True)
def three_batches(monkeypatch):
    """Of a sequence this short too."""
    monkeypatch.setattr(kvcore.frontier, "LONG_BATCH_HITS", 0)


class Pool:
    """Holds blocks; each call waits for `open`, then for what `before` does with the number of calls so far."""

    def __init__(self, clock):
        self.clock = clock
        self.held = ALL
        self.open = threading.Event()
        self.open.set()
        self.before = lambda num_calls: None
        self.asked = []

    def ask(self, store, question, deadline_ns):
        assert store is self and deadline_ns > 0
        (runs,) = question
        self.asked.append(runs)
        self.open.wait()
        self.before(len(self.asked))
        return (intersect(runs, self.held),)


def lookup(ticket, deadline_ms=DEADLINE_MS, num_tokens=NUM_TOKENS):
    return Lookup(ticket, PLANNER.frontier(0, num_tokens), deadline_ms * NS_PER_MS)


@pytest.fixture
def pool():
    return Pool(HandClock())


@pytest.fixture
def lookups(pool):
    thread = LookupThread(pool, pool.clock)
    yield thread
    pool.open.set()
    assert thread.close()


def answers(lookups, count):
    taken = []
    until(lambda: taken.extend(lookups.take_answers()) or len(taken) >= count)
    return taken


def small(ticket, deadline_ms=DEADLINE_MS):
    """One round about one block."""
    return lookup(ticket, deadline_ms, num_tokens=BLOCK + 1)


def test_a_dialogue_is_carried_through_round_by_round(lookups, pool):
    lookups.submit("a", lookup(1), pool.ask)
    ((asker, ended),) = answers(lookups, 1)
    assert (asker, ended.ticket, pool.asked) == ("a", 1, ROUNDS)
    dialogue = ended.dialogue
    assert (dialogue.open, dialogue.rounds, dialogue.present, dialogue.hit_len) == (False, 3, (ALL,), NUM_TOKENS - 1)


def test_a_dialogue_ends_with_the_first_gap(lookups, pool):
    pool.held = ((0, 400), (401, 2_000))
    lookups.submit("a", lookup(1), pool.ask)
    ((_, ended),) = answers(lookups, 1)
    assert pool.asked == ROUNDS[:2]
    assert (ended.dialogue.open, ended.dialogue.hit_len) == (False, 400 * BLOCK)


@pytest.mark.parametrize("num_rounds", [0, 1, 2])
def test_a_dialogue_goes_on_after_its_deadline_when_no_other_one_waits(lookups, pool, num_rounds):
    """Those that are in time come first; what had been found at the deadline stood."""
    pool.open.clear()
    pool.clock.pass_ms(0 if num_rounds else DEADLINE_MS)
    pool.before = lambda num_calls: pool.clock.pass_ms(DEADLINE_MS if num_calls == num_rounds else 0)
    lookups.submit("held up", small(0, 3 * DEADLINE_MS), pool.ask)
    until(lambda: pool.asked)
    pool.asked.clear()
    late = lookup(1)
    lookups.submit("late", late, pool.ask)
    lookups.submit("in time", small(2, 3 * DEADLINE_MS), pool.ask)
    pool.open.set()
    assert [asker for asker, _ in answers(lookups, 3)] == ["held up", "in time", "late"]
    in_time = [((0, 1),)]
    assert pool.asked == ROUNDS[:num_rounds] + in_time + ROUNDS[num_rounds:]
    assert (late.dialogue.open, late.dialogue.hit_len) == (False, NUM_TOKENS - 1)


def test_late_dialogues_end_one_after_another(lookups, pool):
    pool.open.clear()
    pool.clock.pass_ms(DEADLINE_MS)
    lookups.submit("held up", small(0, 3 * DEADLINE_MS), pool.ask)
    until(lambda: pool.asked)
    pool.asked.clear()
    for number in (1, 2):
        lookups.submit(f"late {number}", lookup(number), pool.ask)
    pool.open.set()
    answers(lookups, 3)
    assert pool.asked == ROUNDS * 2


def test_a_late_question_has_a_deadline_of_its_own(lookups, pool):
    deadlines_ns = []

    def ask(store, question, deadline_ns):
        deadlines_ns.append(deadline_ns - pool.clock.now_ns())
        pool.clock.pass_ms(DEADLINE_MS)
        return pool.ask(store, question, deadline_ns)

    lookups.submit("a", lookup(1), ask)
    answers(lookups, 1)
    assert deadlines_ns == [max(DEADLINE_MS * NS_PER_MS, LATE_PATIENCE_NS), LATE_PATIENCE_NS, LATE_PATIENCE_NS]


def test_the_last_nanosecond_before_the_deadline_is_enough_to_ask(lookups, pool):
    pool.clock.time_ns = DEADLINE_MS * NS_PER_MS - 1
    lookups.submit("a", lookup(1), pool.ask)
    answers(lookups, 1)
    assert pool.asked == ROUNDS


@pytest.mark.parametrize("failing", [1, 2])
def test_a_dialogue_whose_store_raises_keeps_the_rounds_before_and_the_thread_lives_on(lookups, pool, failing):
    pool.before = lambda num_calls: 1 // (num_calls != failing)
    lookups.submit("a", lookup(1), pool.ask)
    ((asker, ended),) = answers(lookups, 1)
    assert asker == "a" and pool.asked == ROUNDS[:failing]
    assert (ended.dialogue.open, ended.dialogue.rounds) == (True, failing - 1)
    lookups.submit("b", small(2), pool.ask)
    ((_, ended),) = answers(lookups, 1)
    assert ended.dialogue.hit_len == BLOCK


def test_asking_never_waits_and_what_is_forgotten_is_not_asked(lookups, pool):
    pool.open.clear()
    lookups.submit("a", small(1), pool.ask)
    until(lambda: pool.asked)
    for asker in ("b", "c", "b"):
        lookups.submit(asker, small(2), pool.ask)
    lookups.forget("b")
    assert lookups.take_answers() == []
    pool.open.set()
    assert [asker for asker, _ in answers(lookups, 2)] == ["a", "c"]
    assert len(pool.asked) == 2
    lookups.submit("d", small(3), pool.ask)
    until(lambda: len(pool.asked) == 3)
    time.sleep(0.01)
    lookups.forget("d")
    assert lookups.take_answers() == []


def test_what_is_forgotten_between_two_rounds_is_asked_no_further_and_never_answered(lookups, pool):
    pool.open.clear()
    lookups.submit("a", lookup(1), pool.ask)
    until(lambda: pool.asked)
    lookups.forget("a")
    lookups.submit("b", small(2), pool.ask)
    pool.open.set()
    assert [asker for asker, _ in answers(lookups, 1)] == ["b"]
    assert pool.asked == [ROUNDS[0], ((0, 1),)]

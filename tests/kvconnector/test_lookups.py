"""The thread that asks: round by round, in order, never waited for."""

import threading
import time

import kvconnector.lookups
import pytest
from kvconnector.lookups import LATE_PATIENCE_NS, LookupThread

import kvcore.frontier
from kvcore.planner import Planner
from kvcore.plans import Lookup
from kvcore.ports import StoreOutcome
from kvcore.runs import intersect, normalize
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import NS_PER_MS
from tests.kvconnector.test_transfer import DEADLINE_MS, HandClock, until

BLOCK = 4
PLANNER = Planner(ModelSpec((FullAttention(BLOCK),)))
NUM_TOKENS = 8_001
"""2,000 blocks to ask for: 125 in the first round, 500 in the second, and the rest."""
ROUNDS = [[((0, 125),)], [((125, 625),)], [((625, 2_000),)]]
ONE_BLOCK = ((0, 1),)
ALL = ((0, 2_000),)


@pytest.fixture(autouse=True)
def three_batches(monkeypatch):
    """Of a sequence this short too."""
    monkeypatch.setattr(kvcore.frontier, "LONG_BATCH_HITS", 0)


class Pool:
    """Holds blocks, which are their own keys; each call waits for `open`, then for what `before` does with its number.

    `asked` has the questions of each call.
    """

    def __init__(self, clock):
        self.clock = clock
        self.held = ALL
        self.open = threading.Event()
        self.open.set()
        self.before = lambda num_calls: None
        self.asked = []
        self.questions = []

    def ask(self, question):
        (runs,) = question
        self.questions.append(runs)
        keys = [block for start, end in runs for block in range(start, end)]

        def told(outcomes):
            found = [(key, key + 1) for key, outcome in zip(keys, outcomes, strict=True) if outcome is StoreOutcome.OK]
            return (normalize(found),)

        return keys, told

    def exists(self, keys, deadline_ns):
        assert deadline_ns > self.clock.now_ns()
        questions, self.questions = self.questions, []
        assert keys == [block for runs in questions for start, end in runs for block in range(start, end)]
        self.asked.append(questions)
        self.open.wait()
        self.before(len(self.asked))
        there = [intersect(((key, key + 1),), self.held) for key in keys]
        return [StoreOutcome.OK if found else StoreOutcome.MISSING for found in there]


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
    together = [[*ROUNDS[0], ONE_BLOCK], *ROUNDS[1:num_rounds]] if num_rounds else [[ONE_BLOCK]]
    assert pool.asked == together + ROUNDS[num_rounds:]
    assert (late.dialogue.open, late.dialogue.hit_len) == (False, NUM_TOKENS - 1)


def test_late_dialogues_go_on_together(lookups, pool):
    pool.open.clear()
    pool.clock.pass_ms(DEADLINE_MS)
    lookups.submit("held up", small(0, 3 * DEADLINE_MS), pool.ask)
    until(lambda: pool.asked)
    pool.asked.clear()
    for number in (1, 2):
        lookups.submit(f"late {number}", small(number, DEADLINE_MS), pool.ask)
    pool.open.set()
    assert [asker for asker, _ in answers(lookups, 3)] == ["held up", "late 1", "late 2"]
    assert pool.asked == [[ONE_BLOCK] * 2]


def test_what_waits_together_is_asked_in_one_call_and_each_is_told_its_own(lookups, pool):
    pool.open.clear()
    lookups.submit("held up", small(0), pool.ask)
    until(lambda: pool.asked)
    pool.asked.clear()
    pool.held = ((0, 50), (51, 2_000))
    lengths = {"a": 60, "b": 1, "c": 50, "d": 63}
    for asker, num_blocks in lengths.items():
        lookups.submit(asker, lookup(1, num_tokens=num_blocks * BLOCK + 1), pool.ask)
    pool.open.set()
    told = {asker: ended.dialogue.hit_len for asker, ended in answers(lookups, 5)}
    assert pool.asked == [[((0, num_blocks),) for num_blocks in lengths.values()]]
    assert told == {"held up": BLOCK} | {asker: min(50, num) * BLOCK for asker, num in lengths.items()}


def test_a_call_has_so_many_blocks_or_one_question(lookups, pool, monkeypatch):
    pool.open.clear()
    lookups.submit("held up", small(0), pool.ask)
    until(lambda: pool.asked)
    pool.asked.clear()
    monkeypatch.setattr(kvconnector.lookups, "BLOCKS_PER_CALL", 60)
    for asker, num_blocks in enumerate((40, 20, 1, 61, 59, 1)):
        lookups.submit(asker, lookup(1, num_tokens=num_blocks * BLOCK + 1), pool.ask)
    pool.open.set()
    answers(lookups, 7)
    assert [[end for ((_, end),) in call] for call in pool.asked] == [[40, 20], [1], [61], [59, 1]]


def test_a_late_question_has_a_deadline_of_its_own(lookups, pool):
    deadlines_ns, exists = [], pool.exists

    def slowly(keys, deadline_ns):
        deadlines_ns.append(deadline_ns - pool.clock.now_ns())
        answer = exists(keys, deadline_ns)
        pool.clock.pass_ms(DEADLINE_MS)
        return answer

    pool.exists = slowly
    lookups.submit("a", lookup(1), pool.ask)
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
    assert pool.asked == [ROUNDS[0], [ONE_BLOCK]]

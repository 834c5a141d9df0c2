"""Jobs end exactly once, those that wait too long without a byte moved; nobody waits for a question."""

import threading
import time
from collections import Counter

import pytest
from kvconnector.jobs import Ended, JobId, LoadJob, Stretch
from kvconnector.lane import Lane
from kvconnector.transfer import LookupThread, TransferThread

import kvcore.frontier
from kvcore.keys import Namespace
from kvcore.planner import Planner
from kvcore.plans import Lookup
from kvcore.ports import StoreOutcome
from kvcore.runs import intersect
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import NS_PER_MS

OK, MISSING, TIMEOUT, UNAVAILABLE = (
    StoreOutcome.OK,
    StoreOutcome.MISSING,
    StoreOutcome.TIMEOUT,
    StoreOutcome.UNAVAILABLE,
)
DEADLINE_MS = 100


@pytest.fixture(autouse=True)
def three_batches(monkeypatch):
    """Of a sequence this short too."""
    monkeypatch.setattr(kvcore.frontier, "LONG_BATCH_HITS", 0)


class HandClock:
    """Moves when told to."""

    def __init__(self):
        self.time_ns = 0

    def now_ns(self):
        return self.time_ns

    def pass_ms(self, duration_ms):
        self.time_ns += duration_ms * NS_PER_MS


class MonotonicClock:
    def now_ns(self):
        return time.monotonic_ns()


def job(number, blocks=2):
    stretch = Stretch(0, range(blocks), [number.to_bytes(4, "big")] * blocks, range(10 * number, 10 * number + blocks))
    return LoadJob(JobId(number), f"request {number}", Namespace("n"), (stretch,))


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 5 s"
        time.sleep(0.001)


@pytest.fixture
def transfers():
    """Makes a thread that moves jobs by the given function, and stops it in the end."""
    made = []

    def make(move, clock=None):
        made.append(TransferThread("test", move, DEADLINE_MS, clock or HandClock()))
        return made[-1]

    yield make
    for thread in made:
        assert thread.close()


def take(thread, count):
    ended = []
    until(lambda: ended.extend(thread.take_ended()) or len(ended) >= count)
    return ended


def test_jobs_run_in_order_and_report_what_failed(transfers):
    order = []

    def move(job, deadline_ns):
        order.append(job.job_id)
        return [OK, MISSING, OK, UNAVAILABLE][: len(job.entries)]

    thread = transfers(move)
    for number, blocks in enumerate([4, 1, 0]):
        thread.submit(job(number, blocks))
    ended = [report for _, report in take(thread, 3)]
    assert ended == [Ended(0, 1, (1, 3), (1,)), Ended(1, 1, ()), Ended(2, 1, ())]
    assert order == [0, 1, 2]
    assert thread.outcomes == Counter({OK: 3, MISSING: 1, UNAVAILABLE: 1})
    assert thread.take_ended() == []


@pytest.mark.parametrize("move", [lambda job, deadline_ns: 1 / 0, lambda job, deadline_ns: [OK]])
def test_an_exception_or_a_short_answer_fails_every_entry(transfers, move):
    thread = transfers(move)
    thread.submit(job(1))
    assert [report for _, report in take(thread, 1)] == [Ended(1, 1, (0, 1))]
    thread.submit(job(2, 0), ready=lambda: None)
    take(thread, 1)  # the thread lives on


def test_a_job_moves_nothing_before_it_is_ready(transfers):
    computed, moved = threading.Event(), []
    thread = transfers(lambda job, deadline_ns: moved.append(job) or [OK, OK])
    thread.submit(job(1), computed.wait)
    time.sleep(0.02)
    assert (moved, thread.take_ended()) == ([], [])
    computed.set()
    take(thread, 1)
    assert moved == [job(1)]


def test_jobs_behind_one_that_hangs_end_at_their_deadline_and_it_ends_when_it_really_has(transfers):
    clock, released, moved = HandClock(), threading.Event(), []

    def move(job, deadline_ns):
        moved.append(job.job_id)
        released.wait()
        return [OK] * len(job.entries)

    thread = transfers(move, clock)
    thread.submit(job(1))
    until(lambda: moved)
    thread.submit(job(2))
    clock.pass_ms(DEADLINE_MS - 1)
    thread.submit(job(3))
    assert thread.take_ended() == []
    clock.pass_ms(1)
    assert [report for _, report in thread.take_ended()] == [Ended(2, 1, (0, 1))]
    clock.pass_ms(DEADLINE_MS * 10)
    assert [report for _, report in thread.take_ended()] == [Ended(3, 1, (0, 1))]
    released.set()
    assert [report for _, report in take(thread, 1)] == [Ended(1, 1, ())]
    assert moved == [1]
    assert thread.outcomes == Counter({TIMEOUT: 4, OK: 2})


def test_every_job_ends_exactly_once_while_deadlines_race_with_the_thread(transfers):
    clock = HandClock()
    thread = transfers(lambda job, deadline_ns: [OK] * len(job.entries), clock)
    ended = []
    for number in range(2_000):
        thread.submit(job(number))
        clock.pass_ms(number % 3 * DEADLINE_MS)
        ended += thread.take_ended()
    until(lambda: ended.extend(thread.take_ended()) or len(ended) >= 2_000)
    assert sorted(report.job_id for _, report in ended) == list(range(2_000))


# --- lookups --------------------------------------------------------------------------------------------------------


BLOCK = 4
PLANNER = Planner(ModelSpec((FullAttention(BLOCK),)))
NUM_TOKENS = 8_001
"""2,000 blocks to ask for: 125 in the first round, 500 in the second, and the rest."""
ROUNDS = [((0, 125),), ((125, 625),), ((625, 2_000),)]
ALL = ((0, 2_000),)


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


def small(ticket):
    """One round about one block."""
    return lookup(ticket, num_tokens=BLOCK + 1)


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
def test_a_dialogue_is_broken_off_at_its_deadline(lookups, pool, num_rounds):
    """What was answered until then stands; no further question is put."""
    pool.clock.pass_ms(0 if num_rounds else DEADLINE_MS)
    pool.before = lambda num_calls: pool.clock.pass_ms(DEADLINE_MS if num_calls == num_rounds else 0)
    lookups.submit("a", lookup(1), pool.ask)
    lookups.submit("b", small(2), pool.ask)
    ended = answers(lookups, 2)
    assert [asker for asker, _ in ended] == ["a", "b"]
    assert pool.asked == ROUNDS[:num_rounds]
    dialogue = ended[0][1].dialogue
    assert dialogue.open and dialogue.rounds == num_rounds
    assert dialogue.hit_len == (BLOCK * ROUNDS[num_rounds - 1][0][1] if num_rounds else 0)


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


# --- calls that cannot be interrupted -------------------------------------------------------------------------------


def test_a_caller_leaves_at_its_deadline_and_the_next_ones_do_not_even_wait():
    clock, released = MonotonicClock(), threading.Event()
    lane = Lane("test", clock)
    assert lane.call(lambda: 7, clock.now_ns() + 1_000 * NS_PER_MS) == 7
    start_ns = clock.now_ns()
    assert lane.call(lambda: released.wait() or 8, start_ns + 30 * NS_PER_MS) is None
    assert 30 * NS_PER_MS <= clock.now_ns() - start_ns < 500 * NS_PER_MS
    assert lane.hangs
    start_ns = clock.now_ns()
    assert lane.call(lambda: 9, start_ns + 5_000 * NS_PER_MS) is None
    assert clock.now_ns() - start_ns < 500 * NS_PER_MS
    released.set()
    until(lambda: not lane.hangs)
    assert lane.call(lambda: 10, clock.now_ns() + 1_000 * NS_PER_MS) == 10


def test_a_call_whose_caller_left_while_it_waited_is_not_made():
    clock, released, made = MonotonicClock(), threading.Event(), []
    lane = Lane("test", clock)
    first = threading.Thread(target=lane.call, args=(released.wait, clock.now_ns() + 5_000 * NS_PER_MS))
    first.start()
    time.sleep(0.02)
    assert lane.call(lambda: made.append(1), clock.now_ns() + 20 * NS_PER_MS) is None
    released.set()
    first.join()
    assert lane.call(lambda: 2, clock.now_ns() + 1_000 * NS_PER_MS) == 2
    assert made == []

"""Jobs end exactly once, those that wait too long without a byte moved."""

import threading
import time
from collections import Counter

import pytest
from kvconnector.jobs import Ended, JobId, LoadJob, Stretch
from kvconnector.lane import Lane
from kvconnector.transfer import TransferThread

from kvcore.keys import Namespace
from kvcore.ports import StoreOutcome
from kvcore.units import NS_PER_MS

OK, MISSING, TIMEOUT, UNAVAILABLE = (
    StoreOutcome.OK,
    StoreOutcome.MISSING,
    StoreOutcome.TIMEOUT,
    StoreOutcome.UNAVAILABLE,
)
DEADLINE_MS = 100


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

"""The real Mooncake over TCP keeps the contract, and turns every failure of the world into an outcome in time."""

import ctypes
import itertools
import os
import time

import numpy as np
import pytest
from kvconnector.pool_config import PoolConfig
from kvconnector.store import MooncakeStore

from connector.testbed.processes import Master, SegmentOwner
from kvcore.keys import namespace_digest
from kvcore.ports import StoreOutcome
from kvcore.units import NS_PER_MS, NS_PER_S
from tests.contract.store_contract import StoreContract, StoreUnderTest, content

pytestmark = pytest.mark.store

OK, MISSING, NO_SPACE = StoreOutcome.OK, StoreOutcome.MISSING, StoreOutcome.NO_SPACE
TIMEOUT, UNAVAILABLE = StoreOutcome.TIMEOUT, StoreOutcome.UNAVAILABLE
MEMORY_BYTES = 8 << 20
SEGMENT_BYTES = 64 << 20
RPC_TIMEOUT_MS = 700

NAMESPACES = (namespace_digest({"test": number, "run": os.getpid()}) for number in itertools.count())


class MonotonicClock:
    def now_ns(self):
        return time.monotonic_ns()


class Arena:
    """Registered memory that hands out pieces; a value is scattered over two of them when it can be."""

    def __init__(self, store):
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.used = 0
        store.register(self.memory.ctypes.data, self.memory.nbytes)

    def make_buffer(self, data):
        cut = len(data) // 3
        return [self._place(part) for part in (data[:cut], data[cut:]) if part]

    def read_buffer(self, pieces):
        return b"".join(ctypes.string_at(address, size) for address, size in pieces)

    def _place(self, data):
        if self.used + 2 * len(data) > MEMORY_BYTES:
            self.used = 0
        start = self.used
        self.memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
        self.used += len(data) + 64  # a gap: pieces never touch
        return (self.memory.ctypes.data + start, len(data))


def join(master):
    config = PoolConfig(
        master.address, local_hostname="127.0.0.1", local_buffer_bytes=16 << 20, rpc_timeout_ms=RPC_TIMEOUT_MS
    )
    store = MooncakeStore(config, MonotonicClock())
    arena = Arena(store)
    return StoreUnderTest(store, MonotonicClock(), next(NAMESPACES), arena.make_buffer, arena.read_buffer)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    master = Master(folder)
    try:
        owner = SegmentOwner(master, folder, SEGMENT_BYTES)
        yield master
        owner.kill()
    finally:
        master.kill()


@pytest.fixture(scope="module")
def joined(pool):
    subject = join(pool)
    yield subject
    subject.store.close()


class TestMooncakeStore(StoreContract):
    @pytest.fixture
    def subject(self, joined):
        return StoreUnderTest(joined.store, joined.clock, next(NAMESPACES), joined.make_buffer, joined.read_buffer)


def test_two_clients_in_one_process_serve_each_other(pool, joined):
    """The scheduler's client has no memory of its own and moves nothing; it sees what the worker's client stored."""
    config = PoolConfig(pool.address, local_hostname="127.0.0.1").lookup_only()
    asker = MooncakeStore(config, MonotonicClock())
    subject = StoreUnderTest(joined.store, joined.clock, next(NAMESPACES), joined.make_buffer, joined.read_buffer)
    a, b = subject.keys(2)
    assert subject.put({a: content(1)}) == [OK]
    assert asker.exists([a, b], subject.deadline_ns()) == [OK, MISSING]
    assert asker.remove([a], subject.deadline_ns()) == [OK]
    assert subject.exists([a]) == [MISSING]
    asker.close()
    assert subject.put({b: content(2)}) == [OK]


# --- failures of the world ------------------------------------------------------------------------------------------


@pytest.fixture
def own_pool(tmp_path):
    """A master, an owner and a client that the test may break."""
    master = Master(tmp_path)
    owner = SegmentOwner(master, tmp_path, SEGMENT_BYTES)
    subject = join(master)
    yield master, owner, subject
    owner.kill()
    master.kill()


def test_what_does_not_fit_is_no_space_and_the_rest_is_stored(own_pool):
    _, _, subject = own_pool  # its own, because a full pool starts to evict
    small, huge = subject.keys(2)
    [(address, _)] = subject.make_buffer(b"x")
    buffers = [subject.make_buffer(content(1)), [(address, 2 * SEGMENT_BYTES)]]
    assert subject.store.put([small, huge], buffers, subject.deadline_ns()) == [OK, NO_SPACE]
    assert subject.exists([huge]) == [MISSING]


def seconds(call, *arguments):
    start = time.monotonic()
    return call(*arguments), time.monotonic() - start


def all_operations(subject, key, deadline_ns):
    buffer = subject.make_buffer(content(1))
    yield subject.store.exists, ([key], deadline_ns)
    yield subject.store.get, ([key], [buffer], deadline_ns)
    yield subject.store.put, ([key], [buffer], deadline_ns)
    yield subject.store.remove, ([key], deadline_ns)


def test_a_dead_master_costs_milliseconds_and_comes_back(own_pool):
    master, _, subject = own_pool
    (key,) = subject.keys(1)
    assert subject.put({key: content(1)}) == [OK]
    master.kill()
    for _ in range(2):
        for call, arguments in all_operations(subject, key, subject.deadline_ns()):
            outcomes, took_s = seconds(call, *arguments)
            assert outcomes == [UNAVAILABLE]
            assert took_s < 0.3
    master.start()
    deadline = time.monotonic() + 30
    while subject.put({subject.key(2): content(2)}) != [OK]:  # the owner lends its memory again
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert subject.get({subject.key(2): 96}) == [(OK, content(2))]
    assert subject.exists([key]) == [MISSING]


def test_a_frozen_master_holds_up_questions_to_their_deadline_and_transfers_to_the_rpc_timeout(own_pool):
    master, _, subject = own_pool
    (key,) = subject.keys(1)
    assert subject.put({key: content(1)}) == [OK]
    master.process.freeze()
    outcomes, took_s = seconds(subject.store.exists, [key], subject.clock.now_ns() + 50 * NS_PER_MS)
    assert outcomes == [TIMEOUT]
    assert took_s < 0.15
    outcomes, took_s = seconds(subject.store.exists, [key], subject.clock.now_ns() + 10 * NS_PER_S)
    assert outcomes == [TIMEOUT]
    assert took_s < 0.05  # turned away while the first call hangs
    ((outcome, _),), took_s = seconds(subject.get, {key: 96})
    assert outcome in (TIMEOUT, UNAVAILABLE)
    assert took_s < RPC_TIMEOUT_MS / 1000 + 0.5
    master.process.thaw()
    time.sleep(0.8)
    assert subject.get({key: 96}) == [(OK, content(1))]
    assert subject.exists([key]) == [OK]


def test_the_death_of_a_segment_s_owner_is_not_a_length(own_pool):
    _, owner, subject = own_pool
    (key,) = subject.keys(1)
    assert subject.put({key: content(1)}) == [OK]
    owner.kill()
    (outcome, _), *_ = subject.get({key: 96})
    assert outcome is UNAVAILABLE
    assert subject.put({subject.key(2): content(2)}) == [UNAVAILABLE]


def test_a_frozen_owner_delays_a_transfer_by_seconds_and_writes_nothing_after_it(own_pool):
    """Without the settings that the store makes: a minute, and most of the bytes come after the call has returned."""
    _, owner, subject = own_pool
    keys = subject.keys(21)
    assert subject.put({key: content(number) for number, key in enumerate(keys)}) == [OK] * len(keys)
    buffers = [subject.make_buffer(bytes(96)) for _ in keys]
    owner.process.freeze()
    outcomes, took_s = seconds(subject.store.get, keys, buffers, subject.deadline_ns())
    assert outcomes == [UNAVAILABLE] * len(keys)
    assert 1 < took_s < 20
    for pieces in buffers:
        for address, size_bytes in pieces:
            ctypes.memset(address, 0xEE, size_bytes)
    owner.process.thaw()
    time.sleep(1)
    assert all(subject.read_buffer(pieces) == b"\xee" * 96 for pieces in buffers)
    assert subject.put({subject.key(99): content(99)}) == [OK]


def test_more_pieces_than_the_transport_queues_are_moved(joined):
    """In one call 2,100 pieces were refused after a minute, from a pool in which nothing is wrong."""
    subject = StoreUnderTest(joined.store, joined.clock, next(NAMESPACES), joined.make_buffer, joined.read_buffer)
    values = {key: content(number) for number, key in enumerate(subject.keys(1_050))}
    assert subject.put(values) == [OK] * len(values)
    assert subject.get(dict.fromkeys(values, 96)) == [(OK, value) for value in values.values()]


def test_a_master_that_comes_late_is_found(tmp_path):
    master = Master(tmp_path)
    master.kill()
    subject = join(master)
    (key,) = subject.keys(1)
    outcomes, took_s = seconds(subject.exists, [key])
    assert outcomes == [UNAVAILABLE]
    assert took_s < 0.3
    master.start()
    owner = SegmentOwner(master, tmp_path, SEGMENT_BYTES)
    try:
        time.sleep(0.6)
        assert subject.put({key: content(1)}) == [OK]
        assert subject.get({key: 96}) == [(OK, content(1))]
        assert subject.store.counts["exists", UNAVAILABLE] == 1
        assert subject.store.counts["put", OK] == 1
    finally:
        owner.kill()
        master.kill()

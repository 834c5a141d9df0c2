"""Before a real master that is frozen or dead requests are misses at once; when it is back, it is found."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from connector.testbed.processes import Master, SegmentOwner
from kvcore.breaker import Breaker, BreakerState, Tolerance
from kvcore.keys import BlockHash, BlockKey
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.ports import StoreOutcome
from kvcore.spec import FullAttention, ModelSpec
from kvcore.units import NS_PER_MS
from tests.contract.store_contract import StoreUnderTest, content
from tests.contract.test_mooncake_store import NAMESPACES, RPC_TIMEOUT_MS, SEGMENT_BYTES, Arena, MonotonicClock
from tests.seam.mirror import Pins

pytestmark = [pytest.mark.engine, pytest.mark.store]

BLOCK, NUM_BLOCKS = 16, 4
DEADLINE_MS = 100
AT_ONCE_S = 0.02
"""Much less than a lookup may take; a step of an engine takes longer."""
TOLERANCE = Tolerance(
    max_failures=3,
    min_silence_ns=DEADLINE_MS * NS_PER_MS,
    first_probe_ns=600 * NS_PER_MS,
    max_probe_ns=1_200 * NS_PER_MS,
)
CLOSED = BreakerState.CLOSED


@dataclass
class Side:
    """One engine's scheduler half, with the real lookup thread, on a guarded client of its own."""

    store: object
    guarded: object
    half: object
    lookups: object
    num_requests: int = 0

    def consider(self, hashes):
        """What a new request is offered, how long it waited for that, and how many keys the pool was asked."""
        self.num_requests += 1
        request = SimpleNamespace(
            request_id=str(self.num_requests), num_prompt_tokens=NUM_BLOCKS * BLOCK, num_tokens=NUM_BLOCKS * BLOCK,
            num_computed_tokens=0, block_hashes=hashes,
        )  # fmt: skip
        asked, start = sum(self.store.counts.values()), time.monotonic()
        while (offer := self.half.get_num_new_matched_tokens(request, 0)[0]) is None:
            time.sleep(0.001)
        waited_s = time.monotonic() - start
        self.half.request_finished(request, [[]])
        return offer, waited_s, sum(self.store.counts.values()) - asked

    def until_closed(self, patience_s):
        """Without a request; the seconds that it took."""
        start = time.monotonic()
        while self.guarded.state is not CLOSED:
            assert time.monotonic() - start < patience_s, "the breaker does not close"
            time.sleep(0.01)
        return time.monotonic() - start


def make_side(master, namespace, half):
    from kvconnector.guard import GuardedStore
    from kvconnector.keys import KeySpace
    from kvconnector.lookups import LookupThread
    from kvconnector.pool_config import PoolConfig
    from kvconnector.scheduler import SchedulerHalf
    from kvconnector.store import MooncakeStore

    clock = MonotonicClock()
    config = PoolConfig(master.address, local_hostname="127.0.0.1", rpc_timeout_ms=RPC_TIMEOUT_MS)
    store = MooncakeStore(config, clock)
    guarded = GuardedStore(store, Breaker(TOLERANCE), clock, half)
    assert guarded.join(clock.now_ns() + 10_000 * NS_PER_MS)
    lookups = LookupThread(guarded, clock)
    policy = PoolPolicy(lookup_deadline_ns=DEADLINE_MS * NS_PER_MS)
    scheduler = SchedulerHalf(
        Planner(ModelSpec((FullAttention(BLOCK),))), policy, KeySpace(namespace, BLOCK, 1), lookups, clock
    )
    scheduler.bind_gpu_block_pool(Pins())
    scheduler.access = lambda: guarded.access
    return Side(store, guarded, scheduler, lookups)


@pytest.fixture
def master(tmp_path):
    master = Master(tmp_path)
    yield master
    master.kill()


@pytest.fixture
def owner(master, tmp_path):
    owner = SegmentOwner(master, tmp_path, SEGMENT_BYTES)
    yield owner
    owner.kill()


@pytest.fixture
def namespace():
    return next(NAMESPACES)


@pytest.fixture
def side(master, owner, namespace):
    side = make_side(master, namespace, "scheduler")
    yield side
    side.lookups.close()
    side.guarded.close()


@pytest.fixture
def worker(master, owner, namespace):
    """What moves bytes, with a breaker of its own."""
    side = make_side(master, namespace, "worker")
    arena = Arena(side.guarded)
    yield StoreUnderTest(side.guarded, MonotonicClock(), namespace, arena.make_buffer, arena.read_buffer)
    side.lookups.close()
    side.guarded.close()


def hashes_of(number):
    return [bytes([number, block]) for block in range(NUM_BLOCKS)]


def put(worker, number):
    keys = [BlockKey(worker.namespace, 0, 0, BlockHash(each)) for each in hashes_of(number)]
    return worker.put({key: content(index) for index, key in enumerate(keys)})


WHOLE_HIT = (NUM_BLOCKS - 1) * BLOCK


def until_nothing_is_asked(side, number):
    """Requests until the breaker opens: how long each of them waited."""
    start, waits_s = time.monotonic(), []
    while side.guarded.state is CLOSED:
        offer, waited_s, _ = side.consider(hashes_of(number))
        assert offer == 0
        assert waited_s < DEADLINE_MS / 1_000 + 0.1
        assert time.monotonic() - start < 3
        waits_s.append(waited_s)
    return waits_s


def check_nobody_waits(side, number):
    waits_s = []
    for _ in range(30):
        offer, waited_s, num_asked = side.consider(hashes_of(number))
        assert (offer, num_asked, side.lookups.num_waiting) == (0, 0, 0)
        waits_s.append(waited_s)
    assert sum(waits_s) < len(waits_s) * AT_ONCE_S


def test_before_a_frozen_master_requests_compute_at_once_and_hit_again_when_it_is_thawed(master, side, worker):
    assert put(worker, 1) == [StoreOutcome.OK] * NUM_BLOCKS
    assert side.consider(hashes_of(1))[0] == WHOLE_HIT
    master.process.freeze()
    waits_s = until_nothing_is_asked(side, 1)
    assert len(waits_s) >= TOLERANCE.max_failures
    assert max(waits_s) > 2 * AT_ONCE_S, "this is what a frozen master costs those who ask it"
    check_nobody_waits(side, 1)
    time.sleep(1)  # probes in vain
    check_nobody_waits(side, 1)
    assert side.guarded.state is not CLOSED
    master.process.thaw()
    side.until_closed(5)
    assert side.consider(hashes_of(1))[0] == WHOLE_HIT


def test_a_dead_master_is_asked_by_nobody_and_found_when_it_is_back(master, side, worker):
    assert put(worker, 1) == [StoreOutcome.OK] * NUM_BLOCKS
    master.kill()
    until_nothing_is_asked(side, 1)
    check_nobody_waits(side, 1)
    master.start()
    side.until_closed(5)
    offer, _, num_asked = side.consider(hashes_of(1))
    assert (offer, num_asked) == (0, NUM_BLOCKS - 1), "the new master is asked, and has nothing"


def test_loads_and_stores_open_the_breaker_of_their_half(master, worker):
    assert put(worker, 1) == [StoreOutcome.OK] * NUM_BLOCKS
    master.process.freeze()
    start, calls = time.monotonic(), 0
    while worker.store.state is CLOSED:
        outcomes = put(worker, 2) if calls % 2 else [outcome for outcome, _ in worker.get({worker.key(1): 96})]
        assert set(outcomes) <= {StoreOutcome.TIMEOUT, StoreOutcome.UNAVAILABLE}
        calls += 1
        assert time.monotonic() - start < 10
    start = time.monotonic()
    for _ in range(20):
        assert put(worker, 2) == [StoreOutcome.UNAVAILABLE] * NUM_BLOCKS
    assert time.monotonic() - start < 20 * AT_ONCE_S
    master.process.thaw()
    deadline = time.monotonic() + 5
    while worker.store.state is not CLOSED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert put(worker, 2) == [StoreOutcome.OK] * NUM_BLOCKS

"""The simulator's pool keeps the promises of a store: presence is its own, the bytes are kept beside it."""

import pytest

from kvcore.ports import StoreOutcome
from kvsim.pool.store import MooncakePool
from tests.contract.store_contract import StoreContract, StoreUnderTest, broken_rules
from tests.contract.test_memory_store import StandingClock

OK, MISSING, BAD_LENGTH, TIMEOUT = (
    StoreOutcome.OK,
    StoreOutcome.MISSING,
    StoreOutcome.BAD_LENGTH,
    StoreOutcome.TIMEOUT,
)
BLOCK = ((0, 1),)


class SimulatedStore:
    """Each key is a sequence of one block, whose content nobody else has."""

    def __init__(self, clock, pool_type=MooncakePool):
        self._clock = clock
        self._pool = pool_type(1_000_000, (100, 100), 10**9, 1, 0.05)
        self._streams, self._bytes = {}, {}

    def exists(self, keys, deadline_ns):
        return self._each(keys, deadline_ns, lambda at: OK if self._ask("exists", keys[at]) else MISSING)

    def remove(self, keys, deadline_ns):
        return self._each(keys, deadline_ns, lambda at: OK if self._ask("remove", keys[at]) else MISSING)

    def get(self, keys, buffers, deadline_ns):
        return self._each(keys, deadline_ns, lambda at: self._get(keys[at], buffers[at]))

    def put(self, keys, buffers, deadline_ns):
        return self._each(keys, deadline_ns, lambda at: self._put(keys[at], buffers[at]))

    def _each(self, keys, deadline_ns, do):
        late = self._clock.now_ns() >= deadline_ns
        return [TIMEOUT if late else do(at) for at in range(len(keys))]

    def _ask(self, operation, key):
        stream = self._streams.setdefault(key._replace(group=0), len(self._streams))
        return getattr(self._pool, operation)(key.group, ((stream, 0, 1),), BLOCK, self._clock.now_ns())

    def _get(self, key, buffer):
        if not self._ask("get", key):
            return MISSING
        if len(buffer) != len(self._bytes[key]):
            return BAD_LENGTH
        buffer[:] = self._bytes[key]
        return OK

    def _put(self, key, buffer):
        if not self._ask("exists", key):
            self._bytes[key] = bytes(buffer)
        assert not self._ask("put", key), "there is room"
        return OK


def subject_of(pool_type=MooncakePool):
    clock = StandingClock()
    return StoreUnderTest(SimulatedStore(clock, pool_type), clock, "0123456789abcdef", bytearray, bytes)


class TestSimulatedStore(StoreContract):
    @pytest.fixture
    def subject(self):
        return subject_of()


class ForgetsGroups(MooncakePool):
    def exists(self, group, segments, runs, now_ns):
        return super().exists(0, segments, runs, now_ns)


class KeepsWhatIsRemoved(MooncakePool):
    def remove(self, group, segments, runs, now_ns):
        return self.holds(group, segments, runs)


@pytest.mark.parametrize("wrong", [ForgetsGroups, KeepsWhatIsRemoved])
def test_a_pool_that_is_wrong_is_rejected(wrong):
    assert broken_rules(subject_of) == set()
    assert broken_rules(lambda: subject_of(wrong))

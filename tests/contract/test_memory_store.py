"""The store in memory keeps the contract; for each rule there is a broken store that the suite rejects by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.keys import namespace_digest
from kvcore.memory_store import MemoryStore, WhenFull
from kvcore.ports import StoreOutcome
from tests.contract.store_contract import RULES, StoreContract, StoreUnderTest, broken_rules, content

OK, MISSING, NO_SPACE = StoreOutcome.OK, StoreOutcome.MISSING, StoreOutcome.NO_SPACE
LATER_NS = 1_000


class StandingClock:
    """Always 500 ns."""

    def now_ns(self):
        return 500


def memory_subject(store_type=MemoryStore, **options):
    clock = StandingClock()
    return StoreUnderTest(store_type(clock, **options), clock, namespace_digest({"test": 1}), bytearray, bytes)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def subject(self):
        return memory_subject()


class TestMemoryStoreWithACapacity(StoreContract):
    @pytest.fixture(params=WhenFull)
    def subject(self, request):
        return memory_subject(capacity_bytes=1_000_000, when_full=request.param)


# --- stores that must be rejected -----------------------------------------------------------------------------------


class AnswersInAnotherOrder(MemoryStore):
    def exists(self, keys, deadline_ns):
        return super().exists(keys[::-1], deadline_ns)


class AnswersOnlyHits(MemoryStore):
    def get(self, keys, buffers, deadline_ns):
        return [outcome for outcome in super().get(keys, buffers, deadline_ns) if outcome is OK]


class StopsAtTheFirstMiss(MemoryStore):
    def get(self, keys, buffers, deadline_ns):
        outcomes = super().get(keys, buffers, deadline_ns)
        return [MISSING if MISSING in outcomes[:n] else outcome for n, outcome in enumerate(outcomes)]


class FillsWhatItHas(MemoryStore):
    """A short object in a long buffer, called OK."""

    def _get(self, key, buffer):
        data = self._objects.get(key)
        if data is None:
            return MISSING
        buffer[: len(data)] = data
        return OK


class CutsToTheBuffer(MemoryStore):
    """A long object cut to a short buffer, called OK."""

    def _get(self, key, buffer):
        data = self._objects.get(key, b"")
        if len(data) <= len(buffer):
            return super()._get(key, buffer)
        buffer[:] = data[: len(buffer)]
        return OK


class Overwrites(MemoryStore):
    def _put(self, key, data):
        self._remove(key)
        return super()._put(key, data)


class RefusesASecondPut(MemoryStore):
    def _put(self, key, data):
        return StoreOutcome.UNAVAILABLE if key in self._objects else super()._put(key, data)


class KeepsTheCallersMemory(MemoryStore):
    def put(self, keys, buffers, deadline_ns):
        outcomes = super().put(keys, buffers, deadline_ns)
        self._objects.update(zip(keys, buffers, strict=True))
        return outcomes


class RaisesOnAMiss(MemoryStore):
    def _get(self, key, buffer):
        self._objects[key]
        return super()._get(key, buffer)


class RaisesOnNothing(MemoryStore):
    def exists(self, keys, deadline_ns):
        assert keys
        return super().exists(keys, deadline_ns)


class HasEverything(MemoryStore):
    def exists(self, keys, deadline_ns):
        return [OK for _ in super().exists(keys, deadline_ns)]


class RemovesNothing(MemoryStore):
    def _remove(self, key):
        return OK if key in self._objects else MISSING


class NeverTooLate(MemoryStore):
    def _expired(self, deadline_ns):
        return False


class TakesHalfWhenLate(MemoryStore):
    def put(self, keys, buffers, deadline_ns):
        if self._expired(deadline_ns):
            super().put(keys, [buffer[:48] for buffer in buffers], LATER_NS)
        return super().put(keys, buffers, deadline_ns)


class ForgetsHalfOfALargeBatch(MemoryStore):
    def put(self, keys, buffers, deadline_ns):
        outcomes = super().put(keys, buffers, deadline_ns)
        for key in keys[512:]:
            self._remove(key)
        return outcomes


def ignoring(part, value):
    """A store for which all values of one part of the key are the same."""

    class Ignores(MemoryStore):
        def exists(self, keys, deadline_ns):
            return super().exists(self._blurred(keys), deadline_ns)

        def get(self, keys, buffers, deadline_ns):
            return super().get(self._blurred(keys), buffers, deadline_ns)

        def put(self, keys, buffers, deadline_ns):
            return super().put(self._blurred(keys), buffers, deadline_ns)

        def _blurred(self, keys):
            return [key._replace(**{part: value}) for key in keys]

    Ignores.__name__ = f"Ignores_{part}"
    return Ignores


REJECTED = {
    AnswersInAnotherOrder: "test_a_mixed_batch_has_one_outcome_per_key_in_order",
    AnswersOnlyHits: "test_a_mixed_batch_has_one_outcome_per_key_in_order",
    StopsAtTheFirstMiss: "test_a_mixed_batch_has_one_outcome_per_key_in_order",
    FillsWhatItHas: "test_a_buffer_of_another_length_is_never_ok",
    CutsToTheBuffer: "test_a_buffer_of_another_length_is_never_ok",
    Overwrites: "test_a_second_put_is_ok_and_the_first_bytes_stay",
    RefusesASecondPut: "test_a_second_put_is_ok_and_the_first_bytes_stay",
    KeepsTheCallersMemory: "test_put_has_taken_the_bytes_when_it_returns",
    RaisesOnAMiss: "test_an_unknown_key_is_missing_everywhere",
    RaisesOnNothing: "test_an_empty_batch_has_no_outcomes",
    HasEverything: "test_an_unknown_key_is_missing_everywhere",
    RemovesNothing: "test_a_removed_key_is_missing_until_it_is_put_again",
    NeverTooLate: "test_a_late_call_times_out_for_every_key",
    TakesHalfWhenLate: "test_a_late_call_times_out_for_every_key",
    ForgetsHalfOfALargeBatch: "test_a_large_batch_is_answered_whole",
    ignoring("namespace", "same"): "test_keys_that_differ_in_one_part_never_answer_for_each_other",
    ignoring("group", 0): "test_keys_that_differ_in_one_part_never_answer_for_each_other",
    ignoring("rank", 0): "test_keys_that_differ_in_one_part_never_answer_for_each_other",
    ignoring("block_hash", b"same"): "test_get_gives_back_what_put_took",
}


@pytest.mark.parametrize("store_type", REJECTED, ids=lambda store_type: store_type.__name__)
def test_control_a_broken_store_is_rejected(store_type):
    assert REJECTED[store_type] in broken_rules(lambda: memory_subject(store_type))


def test_control_every_rule_rejects_a_store_and_none_rejects_the_good_one():
    assert set(REJECTED.values()) == set(RULES)
    assert broken_rules(memory_subject) == set()


# --- capacity: not part of the contract -----------------------------------------------------------------------------


def test_a_full_store_drops_what_was_used_longest_ago():
    subject = memory_subject(capacity_bytes=300)
    a, b, c, d, e = subject.keys(5)
    subject.put({a: content(0, 100), b: content(1, 100), c: content(2, 100)})
    subject.get({a: 100})
    subject.put({b: content(9, 100)})
    assert subject.exists([c]) == [OK]  # asking is not using
    assert subject.put({d: content(3, 100)}) == [OK]
    assert subject.exists([a, b, c, d]) == [OK, OK, MISSING, OK]
    assert subject.put({e: content(4, 101)}) == [OK]
    assert subject.exists([a, b, d, e]) == [MISSING, MISSING, OK, OK]


@pytest.mark.parametrize(("when_full", "size_bytes"), [(WhenFull.REFUSE, 101), (WhenFull.EVICT, 301)])
def test_what_does_not_fit_is_no_space_and_costs_nobody_anything(when_full, size_bytes):
    subject = memory_subject(capacity_bytes=300, when_full=when_full)
    a, b, c = subject.keys(3)
    assert subject.put({a: content(0, 200), b: content(1, size_bytes), c: content(2, 100)}) == [OK, NO_SPACE, OK]
    assert subject.get({a: 200, b: size_bytes, c: 100})[::2] == [(OK, content(0, 200)), (OK, content(2, 100))]
    assert subject.exists([b]) == [MISSING]


@given(
    st.sampled_from(WhenFull),
    st.lists(st.tuples(st.sampled_from(["put", "get", "remove"]), st.integers(0, 6), st.integers(0, 60))),
)
def test_used_bytes_are_those_of_the_objects_held_and_never_more_than_fit(when_full, calls):
    subject = memory_subject(capacity_bytes=100, when_full=when_full)
    sizes_bytes = {}
    for call, number, size_bytes in calls:
        key = subject.key(number)
        if call == "put" and subject.put({key: bytes(size_bytes)}) == [OK]:
            sizes_bytes.setdefault(key, size_bytes)
        elif call == "get":
            subject.get({key: size_bytes})
        elif call == "remove":
            subject.remove([key])
        held = subject.exists(list(sizes_bytes))
        sizes_bytes = {key: size for (key, size), there in zip(sizes_bytes.items(), held, strict=True) if there is OK}
        assert subject.store.used_bytes == sum(sizes_bytes.values()) <= 100


def test_a_writable_view_of_anything_is_a_buffer():
    subject = memory_subject()
    (key,) = subject.keys(1)
    block = memoryview(bytearray(96)).cast("I")
    assert subject.put({key: content(1)}) == [OK]
    assert subject.store.get([key], [block], LATER_NS) == [OK]
    assert block.tobytes() == content(1)


def test_a_caller_s_mistake_raises():
    subject = memory_subject()
    for call in (subject.store.get, subject.store.put):
        with pytest.raises(InvalidArgument, match="one per key, 2"):
            call(subject.keys(2), [bytearray(1)], LATER_NS)
    with pytest.raises(InvalidArgument, match="capacity_bytes"):
        memory_subject(capacity_bytes=-1)

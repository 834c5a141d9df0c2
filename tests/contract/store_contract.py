"""What every `KVStore` must do. A new store passes the suite by saying how to make one:

class TestMyStore(StoreContract):
    @pytest.fixture
    def subject(self):
        return StoreUnderTest(store, clock, namespace, make_buffer, read_buffer)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcore.keys import BlockHash, BlockKey, Namespace, namespace_digest
from kvcore.ports import Clock, KVStore, StoreOutcome
from kvcore.types import GroupId
from kvcore.units import NS_PER_S

OK, MISSING, BAD_LENGTH, TIMEOUT = (
    StoreOutcome.OK,
    StoreOutcome.MISSING,
    StoreOutcome.BAD_LENGTH,
    StoreOutcome.TIMEOUT,
)


@dataclass(frozen=True)
class StoreUnderTest:
    """One store with room for 1 MB, and the buffers it moves bytes from and to.

    `namespace` is new for every test, so that one real pool can serve them all. `make_buffer(data)` returns a buffer
    of len(data) bytes that holds `data` and stays usable for the whole test; `read_buffer(buffer)` returns its bytes.
    """

    store: KVStore[Any]
    clock: Clock
    namespace: Namespace
    make_buffer: Callable[[bytes], Any]
    read_buffer: Callable[[Any], bytes]

    def key(self, number: int) -> BlockKey:
        """The number-th key of this test."""
        return BlockKey(self.namespace, GroupId(0), 0, BlockHash(number.to_bytes(32, "big")))

    def keys(self, count: int) -> list[BlockKey]:
        return [self.key(number) for number in range(count)]

    def deadline_ns(self) -> int:
        """Far enough for any of these calls."""
        return self.clock.now_ns() + 10 * NS_PER_S

    def exists(self, keys: list[BlockKey]) -> list[StoreOutcome]:
        return self.store.exists(keys, self.deadline_ns())

    def put(self, contents: dict[BlockKey, bytes]) -> list[StoreOutcome]:
        buffers = [self.make_buffer(data) for data in contents.values()]
        return self.store.put(list(contents), buffers, self.deadline_ns())

    def get(self, sizes_bytes: dict[BlockKey, int]) -> list[tuple[StoreOutcome, bytes]]:
        """Outcome and buffer after it, per key; the buffers start as 0xEE."""
        buffers = [self.make_buffer(b"\xee" * size_bytes) for size_bytes in sizes_bytes.values()]
        outcomes = self.store.get(list(sizes_bytes), buffers, self.deadline_ns())
        return list(zip(outcomes, map(self.read_buffer, buffers), strict=True))

    def remove(self, keys: list[BlockKey]) -> list[StoreOutcome]:
        return self.store.remove(keys, self.deadline_ns())


def content(number: int, size_bytes: int = 96) -> bytes:
    """Bytes that tell whose they are at every position."""
    return bytes((number * 31 + position * 7) % 251 for position in range(size_bytes))


class StoreContract:
    """The rules. Each test has the fixture `subject`, a StoreUnderTest, and nothing else."""

    def test_get_gives_back_what_put_took(self, subject):
        a, b = subject.keys(2)
        assert subject.put({a: content(1), b: content(2, 640)}) == [OK, OK]
        assert subject.exists([b, a]) == [OK, OK]
        assert subject.get({b: 640, a: 96}) == [(OK, content(2, 640)), (OK, content(1))]

    def test_an_unknown_key_is_missing_everywhere(self, subject):
        (key,) = subject.keys(1)
        assert subject.exists([key]) == [MISSING]
        assert [outcome for outcome, _ in subject.get({key: 96})] == [MISSING]
        assert subject.remove([key]) == [MISSING]
        assert subject.exists([key]) == [MISSING]

    def test_a_mixed_batch_has_one_outcome_per_key_in_order(self, subject):
        keys = subject.keys(7)
        stored = [0, 2, 3, 6]
        assert subject.put({keys[n]: content(n) for n in stored}) == [OK] * 4
        assert subject.exists(keys) == [OK, MISSING, OK, OK, MISSING, MISSING, OK]
        got = subject.get({key: 64 if n == 2 else 96 for n, key in enumerate(keys)})
        assert [outcome for outcome, _ in got] == [OK, MISSING, BAD_LENGTH, OK, MISSING, MISSING, OK]
        assert [got[n][1] for n in (0, 3, 6)] == [content(n) for n in (0, 3, 6)]
        assert subject.remove(keys[:4]) == [OK, MISSING, OK, OK]
        assert subject.exists(keys) == [MISSING] * 6 + [OK]

    def test_an_empty_batch_has_no_outcomes(self, subject):
        deadline_ns = subject.deadline_ns()
        assert subject.store.exists([], deadline_ns) == []
        assert subject.store.get([], [], deadline_ns) == []
        assert subject.store.put([], [], deadline_ns) == []
        assert subject.store.remove([], deadline_ns) == []

    def test_a_second_put_is_ok_and_the_first_bytes_stay(self, subject):
        same, longer, new = subject.keys(3)
        assert subject.put({same: content(1), longer: content(2)}) == [OK, OK]
        assert subject.put({same: content(3), longer: content(4, 128), new: content(5)}) == [OK, OK, OK]
        assert subject.get({same: 96, longer: 96, new: 96}) == [(OK, content(n)) for n in (1, 2, 5)]

    def test_put_has_taken_the_bytes_when_it_returns(self, subject):
        (key,) = subject.keys(1)
        buffer = subject.make_buffer(content(1))
        assert subject.store.put([key], [buffer], subject.deadline_ns()) == [OK]
        assert subject.put({subject.key(2): content(2)}) == [OK]
        assert subject.store.get([subject.key(2)], [buffer], subject.deadline_ns()) == [OK]  # the block is reused
        assert subject.get({key: 96}) == [(OK, content(1))]

    def test_a_buffer_of_another_length_is_never_ok(self, subject):
        (key,) = subject.keys(1)
        assert subject.put({key: content(1)}) == [OK]
        for size_bytes in (1, 95, 97, 960):
            assert [outcome for outcome, _ in subject.get({key: size_bytes})] == [BAD_LENGTH]
        assert subject.get({key: 96}) == [(OK, content(1))]

    def test_a_removed_key_is_missing_until_it_is_put_again(self, subject):
        gone, kept = subject.keys(2)
        assert subject.put({gone: content(1), kept: content(2)}) == [OK, OK]
        assert subject.get({gone: 96, kept: 96}) == [(OK, content(1)), (OK, content(2))]
        assert subject.remove([gone]) == [OK]
        assert subject.exists([gone, kept]) == [MISSING, OK]
        assert [outcome for outcome, _ in subject.get({gone: 96})] == [MISSING]
        assert subject.remove([gone]) == [MISSING]
        assert subject.put({gone: content(3)}) == [OK]
        assert subject.get({gone: 96, kept: 96}) == [(OK, content(3)), (OK, content(2))]

    def test_a_late_call_times_out_for_every_key(self, subject):
        """What it did to the pool is not promised; that no key ever answers with half its bytes is."""
        keys, store = subject.keys(2), subject.store
        assert subject.put({keys[0]: content(0)}) == [OK]
        buffers = [subject.make_buffer(content(n)) for n in range(2)]
        for late_ns in (subject.clock.now_ns(), subject.clock.now_ns() - NS_PER_S):
            assert store.exists(keys, late_ns) == [TIMEOUT, TIMEOUT]
            assert store.get(keys, buffers, late_ns) == [TIMEOUT, TIMEOUT]
            assert store.put(keys, [subject.make_buffer(content(n)) for n in range(2)], late_ns) == [TIMEOUT, TIMEOUT]
            assert store.remove(keys, late_ns) == [TIMEOUT, TIMEOUT]
        for n, (outcome, data) in enumerate(subject.get(dict.fromkeys(keys, 96))):
            assert outcome is MISSING or (outcome, data) == (OK, content(n))

    def test_a_large_batch_is_answered_whole(self, subject):
        keys = subject.keys(1_000)
        assert subject.put({key: content(n) for n, key in enumerate(keys) if n % 3}) == [OK] * 666
        expected = [OK if n % 3 else MISSING for n in range(1_000)]
        assert subject.exists(keys) == expected
        got = subject.get(dict.fromkeys(keys, 96))
        assert [outcome for outcome, _ in got] == expected
        assert all(got[n][1] == content(n) for n in range(1_000) if n % 3)
        assert subject.remove(keys) == expected

    def test_keys_that_differ_in_one_part_never_answer_for_each_other(self, subject):
        key = subject.key(1)
        others = [
            key._replace(namespace=namespace_digest({"other than": key.namespace})),
            key._replace(group=GroupId(1)),
            key._replace(rank=1),
            key._replace(block_hash=BlockHash(bytes(32))),
        ]
        assert subject.put({key: content(0)}) == [OK]
        assert subject.exists(others) == [MISSING] * 4
        assert [outcome for outcome, _ in subject.get(dict.fromkeys(others, 96))] == [MISSING] * 4
        assert subject.put({other: content(n) for n, other in enumerate(others, 1)}) == [OK] * 4
        assert subject.get(dict.fromkeys([key, *others], 96)) == [(OK, content(n)) for n in range(5)]
        assert subject.remove(others) == [OK] * 4
        assert subject.get({key: 96}) == [(OK, content(0))]


RULES = tuple(name for name in vars(StoreContract) if name.startswith("test_"))


def broken_rules(new_subject: Callable[[], StoreUnderTest]) -> set[str]:
    """The rules that a store breaks, each asked of a new one; for stores that the suite must reject."""
    broken = set()
    for rule in RULES:
        try:
            getattr(StoreContract(), rule)(new_subject())
        except Exception:
            broken.add(rule)
    return broken

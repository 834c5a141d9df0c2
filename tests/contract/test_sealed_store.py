"""A store whose objects have trailers is a store like any other."""

import ctypes

import pytest
from kvconnector.seal import SealedStore, checksum, keyed

from kvcore.keys import namespace_digest
from tests.contract.store_contract import StoreContract, StoreUnderTest, broken_rules
from tests.kvconnector.test_transfer import MonotonicClock
from tests.kvconnector.test_worker import AddressedStore

SEALS = (checksum, lambda: keyed(b"a secret of sixteen bytes"))


class Buffers:
    """Hands out registered memory, a value in two pieces when it can be."""

    def __init__(self, store):
        self.store, self.memory = store, []

    def make(self, data):
        cut = len(data) // 3
        return [self._place(part) for part in (data[:cut], data[cut:]) if part]

    def _place(self, part):
        memory = ctypes.create_string_buffer(bytes(part), len(part))
        self.memory.append(memory)  # it lives as long as the test
        self.store.register(ctypes.addressof(memory), len(part))
        return ctypes.addressof(memory), len(part)


def read(pieces):
    return b"".join(ctypes.string_at(*piece) for piece in pieces)


def subject_of(store):
    return StoreUnderTest(store, MonotonicClock(), namespace_digest({"test": "sealed"}), Buffers(store).make, read)


class TestSealedStore(StoreContract):
    @pytest.fixture(params=SEALS, ids=["checksum", "keyed"])
    def subject(self, request):
        return subject_of(SealedStore(AddressedStore(), request.param()))


class OneSlotForAll(SealedStore):
    """A call's last trailer is behind each of its objects."""

    def __init__(self, store, seal):
        super().__init__(store, seal)
        self._written._at = lambda slot: self._written.address


class TrustsNobody(SealedStore):
    def _fits(self, trailer, key, pieces):
        return False


@pytest.mark.parametrize("broken", [OneSlotForAll, TrustsNobody])
def test_control_a_broken_sealed_store_is_rejected(broken):
    rules = broken_rules(lambda: subject_of(broken(AddressedStore(), checksum())))
    assert "test_get_gives_back_what_put_took" in rules
    assert "test_an_empty_batch_has_no_outcomes" not in rules

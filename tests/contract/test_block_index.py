"""The index in memory keeps the contract, and indexes that do not are rejected."""

import pytest

from kvcore.block_index import MemoryIndex
from tests.contract.index_contract import IndexContract


class TestMemoryIndex(IndexContract):
    @pytest.fixture
    def index(self):
        return MemoryIndex()


class CountsHolders(MemoryIndex):
    """Two adds need two discards."""

    def __init__(self):
        self._held = []

    def add(self, keys):
        self._held += keys

    def discard(self, keys):
        for key in keys:
            if key in self._held:
                self._held.remove(key)


class KnowsHashesOnly(MemoryIndex):
    def holds(self, keys):
        held = {key.block_hash for key in self._held}
        return [key.block_hash in held for key in keys]


@pytest.mark.parametrize(
    ("index_type", "rule"),
    [
        (CountsHolders, IndexContract.test_adding_twice_and_discarding_the_unknown_change_nothing),
        (KnowsHashesOnly, IndexContract.test_keys_that_differ_in_one_part_are_different),
    ],
)
def test_control_a_broken_index_is_rejected(index_type, rule):
    with pytest.raises(AssertionError):
        rule(IndexContract(), index_type())

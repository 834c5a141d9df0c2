"""What every `BlockIndex` must do: a subclass has the fixture `index`, a new and empty one."""

from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.types import GroupId

A, B, C = (BlockKey(Namespace("n"), GroupId(0), 0, BlockHash(bytes([number]))) for number in range(3))


class IndexContract:
    """The rules."""

    def test_holds_answers_per_key_in_order(self, index):
        index.add([C, A])
        assert index.holds([A, B, C, A]) == [True, False, True, True]

    def test_adding_twice_and_discarding_the_unknown_change_nothing(self, index):
        index.add([A, A])
        index.add([A])
        index.discard([B])
        assert index.holds([A, B]) == [True, False]
        index.discard([A])
        assert index.holds([A]) == [False]

    def test_empty_batches(self, index):
        index.add([])
        index.discard([])
        assert index.holds([]) == []

    def test_keys_that_differ_in_one_part_are_different(self, index):
        others = [A._replace(namespace=Namespace("m")), A._replace(group=GroupId(1)), A._replace(rank=1), B]
        index.add([A])
        assert index.holds([A, *others]) == [True, False, False, False, False]
        index.discard(others)
        assert index.holds([A]) == [True]

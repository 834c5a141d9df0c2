"""Holdings and pins against block tables in their plainest form: one object per block, with who refers to it."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.holding import Holding, Pin
from kvcore.pool import BlockPool
from kvcore.runs import from_blocks, normalize

NUM_BLOCKS = 40


@dataclass(eq=False)
class Block:
    named: bool = False
    num_refs: int = 1


class World:
    """One sequence after the other in a pool, each with readers that may outlive it."""

    def __init__(self):
        self.pool = BlockPool(NUM_BLOCKS)
        self.pins = []  # (what the pool gave, blocks by position)
        self.seen = Counter()
        self.num_sequences = 0
        self.begin()

    def begin(self):
        self.segments = ((self.num_sequences, 0, 10_000),)
        self.num_sequences += 1
        self.holding = self.pool.hold(self.pool.match(self.segments, 0))
        self.table = {}

    def allocate(self, a, _b):
        n = min(a % 5, self.pool.num_free)
        self.table |= {self.holding.end + i: Block() for i in range(n)}
        self.pool.allocate(self.holding, n)

    def cache(self, a, b):
        first = self.holding.cached_end
        upto = first + a % (self.holding.end - first + 1)
        kept = [block for block in range(first, upto) if b >> (block - first) & 1]
        self.pool.cache(self.holding, self.segments, upto, from_blocks(kept))
        for block in kept:
            self.table[block].named = True

    def cache_all(self, _a, _b):
        first, end = self.holding.cached_end, self.holding.end
        self.pool.cache(self.holding, self.segments, end)
        for block in range(first, end):
            self.table[block].named = True

    def skip(self, a, _b):
        if self.holding.cached_end == self.holding.end:
            self.holding.skip(self.holding.end + a % 3)

    def drop(self, a, _b):
        before = self.holding.start + a % (self.holding.num_blocks + 1)
        if before > self.holding.start:
            self.pool.drop(self.holding, before)
            self.leave(self.table, before)

    def pin(self, a, b):
        if not self.table:
            return
        start = end = sorted(self.table)[a % len(self.table)]
        while end in self.table and end - start <= b % 4 and self.may_be_pinned(self.table[end]):
            end += 1
        if start < end:
            blocks = {block: self.table[block] for block in range(start, end)}
            self.pins.append((self.pool.pin(self.holding, (start, end)), blocks))
            for block in blocks.values():
                block.num_refs += 1

    def may_be_pinned(self, block):
        return block.named or not any(block in blocks.values() for _, blocks in self.pins)

    def unpin(self, a, _b):
        if self.pins:
            pin, blocks = self.pins.pop(a % len(self.pins))
            self.pool.free(pin)
            self.leave(blocks, pin.end + NUM_BLOCKS * 100)

    def free(self, _a, _b):
        self.pool.free(self.holding)
        self.leave(self.table, max(self.table, default=0) + 1)
        self.begin()

    def leave(self, blocks, before):
        for block in [block for block in blocks if block < before]:
            blocks.pop(block).num_refs -= 1

    def run(self, steps):
        for operation, a, b in steps:
            operation(self, a, b)
            self.check()
        return self

    def check(self):
        held = {*self.table.values()}.union(*[blocks.values() for _, blocks in self.pins])
        assert all(block.num_refs for block in held)
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert normalize(self.holding.blanks) == blanks(self.table)
        assert self.holding.num_anonymous == sum(not block.named for block in self.table.values())
        for pin, blocks in self.pins:
            assert normalize(pin.blanks) == blanks(blocks)
            alone = sum(not block.named and block.num_refs == 1 for block in blocks.values())
            assert pin.num_anonymous == alone
            self.seen.update(inherited=alone, anonymous=isinstance(pin, Pin))
        self.pool.audit([self.holding, *(pin for pin, _ in self.pins)])


def blanks(blocks):
    return from_blocks(position for position, block in blocks.items() if not block.named)


OPERATIONS = [World.allocate] * 3 + [World.cache] * 2 + [World.cache_all, World.skip, World.drop, World.free]
OPERATIONS += [World.pin] * 3 + [World.unpin]
NUMBERS = st.integers(0, 2**10)
STEPS = st.lists(st.tuples(st.sampled_from(OPERATIONS), NUMBERS, NUMBERS), min_size=20, max_size=60)


def test_holdings_are_tables_of_single_blocks():
    seen = Counter()

    @given(STEPS)
    def agree(steps):
        seen.update(World().run(steps).seen)

    agree()
    assert seen["inherited"] and seen["anonymous"], seen


BORROWED = [(World.allocate, 4, 0), (World.pin, 0, 3), (World.cache, 2, 1), (World.drop, 2, 0), (World.unpin, 0, 0)]


def gives_all(holding, before):
    """As if nobody had borrowed anything."""
    pins, holding.lent = holding.lent, []
    num_freed = GIVE_UP(holding, before)
    holding.lent = pins
    return num_freed


GIVE_UP = Holding.give_up
WRONG = {
    "a holding gives away what is lent": (Holding, "give_up", gives_all),
    "a pin does not hear of names": (Pin, "named", lambda *_: []),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_holding_is_found(wrong, monkeypatch):
    World().run(BORROWED)
    monkeypatch.setattr(*WRONG[wrong])
    with pytest.raises(AssertionError):
        World().run(BORROWED)


def test_a_block_without_identity_is_lent_once():
    world = World().run(BORROWED[:2])
    with pytest.raises(AssertionError):
        world.pool.pin(world.holding, (0, 1))

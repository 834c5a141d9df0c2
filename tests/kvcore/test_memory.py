"""What an engine remembers of the pool, against a list of everything that was ever noted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.memory import BlockMemory, Experience
from kvcore.runs import from_blocks
from tests.kvcore.attention_oracle import as_sets

NAMES = 8
"""Different contents; two sequences share the first three of a group."""


def name_of(sequence):
    return lambda index, block: (index, block if block < 3 else (sequence, block))


class Diary:
    """The naive memory: a list of (name, when), the last entry of a name counts."""

    def __init__(self, capacity_blocks, ttl_ns):
        self.capacity_blocks, self.ttl_ns = capacity_blocks, ttl_ns
        self.entries = []

    def note(self, names, now_ns):
        for name in names:
            self.entries = [entry for entry in self.entries if entry[0] != name] + [(name, now_ns)]
        self.entries = self.entries[-self.capacity_blocks :]

    def forget(self, names, now_ns):
        self.entries = [entry for entry in self.entries if entry[0] not in names]

    def known(self, names, now_ns):
        return {name for name, noted_ns in self.entries if now_ns - noted_ns < self.ttl_ns} & set(names)


BLOCKS = st.tuples(*[st.sets(st.integers(0, NAMES), max_size=5)] * 2)
EVENTS = st.lists(
    st.tuples(st.sampled_from(("note", "note", "forget", "known")), BLOCKS, st.sampled_from("ab"), st.integers(0, 6)),
    max_size=25,
)


def replay(memory, diary, events):
    """Whether the memory answers as the diary does, and stays small."""
    now_ns = 0
    for what, blocks, sequence, passed_ns in events:
        now_ns += passed_ns
        name = name_of(sequence)
        places = [(index, block) for index, some in enumerate(blocks) for block in sorted(some)]
        runs = tuple(map(from_blocks, blocks))
        if what == "note":
            memory.note(runs, name, now_ns)
            diary.note([name(*place) for place in places], now_ns)
        elif what == "forget":
            memory.forget(runs, name)
            diary.forget([name(*place) for place in places], now_ns)
        known = diary.known([name(*place) for place in places], now_ns)
        right = tuple({b for i, b in places if i == index and name(i, b) in known} for index in range(len(blocks)))
        if as_sets(memory.known(runs, name, now_ns)) != right or len(memory) > diary.capacity_blocks:
            return False
    return True


@given(EVENTS, st.integers(1, 12), st.integers(1, 20))
def test_it_remembers_what_was_noted_last_and_not_too_long_ago(events, capacity_blocks, ttl_ns):
    assert replay(BlockMemory(capacity_blocks, ttl_ns), Diary(capacity_blocks, ttl_ns), events)


class NeverForgets(BlockMemory):
    def _expire(self, now_ns):
        pass


class KeepsTheFirst(BlockMemory):
    """A block that is noted again stays as old as it was."""

    def note(self, blocks, name_of, now_ns):
        noted = dict(self._noted_ns)
        super().note(blocks, name_of, now_ns)
        self._noted_ns.update({name: noted[name] for name in noted if name in self._noted_ns})


class Unbounded(BlockMemory):
    def __post_init__(self):
        self.capacity_blocks = 1_000


class ByPosition(BlockMemory):
    """Takes equal positions for equal contents."""

    def known(self, blocks, name_of, now_ns):
        return super().known(blocks, lambda index, block: name_of(index, min(block, 2)), now_ns)


A_LITTLE = [("note", ({0, 5}, {1}), "a", 0), ("note", ({0}, {7}), "b", 6), ("known", ({0, 5, 7}, {1, 7}), "a", 5)]
MANY = [("note", (set(range(5)), set()), "a", 0), ("known", (set(range(5)), set()), "a", 0)]


@pytest.mark.parametrize("wrong", [NeverForgets, KeepsTheFirst, Unbounded, ByPosition])
def test_another_memory_is_rejected(wrong):
    stories = (A_LITTLE, 20, 9), (MANY, 3, 9)
    assert all(replay(BlockMemory(size, ttl), Diary(size, ttl), events) for events, size, ttl in stories)
    assert not all(replay(wrong(size, ttl), Diary(size, ttl), events) for events, size, ttl in stories)


@given(BLOCKS, BLOCKS)
def test_what_is_known_are_runs_of_what_was_asked(noted, asked):
    memory = BlockMemory(100, 10)
    memory.note(tuple(map(from_blocks, noted)), name_of("a"), 0)
    known = memory.known(tuple(map(from_blocks, asked)), name_of("a"), 9)
    assert known == tuple(from_blocks(left & right) for left, right in zip(noted, asked, strict=True))


def test_the_oldest_goes_first():
    memory = BlockMemory(capacity_blocks=3, ttl_ns=100)
    for now_ns, block in enumerate((0, 1, 2, 0, 3)):
        memory.note((((block, block + 1),),), name_of("a"), now_ns)
    assert memory.known((((0, 9),),), name_of("a"), 5) == (((0, 1), (2, 4)),), "1 was noted longest ago"


def test_nothing_is_named_while_nothing_is_known():
    """A run of a million blocks costs nothing then."""
    memory = BlockMemory(10, 10)

    def name(index, block):
        raise AssertionError("named")

    assert memory.known((((0, 1_000_000),),), name, 0) == ((),)
    memory.forget((((0, 1_000_000),),), name)


def test_what_has_expired_costs_nothing_either():
    memory = BlockMemory(10, ttl_ns=10)
    memory.note((((0, 5),),), name_of("a"), now_ns=0)
    assert memory.known((((0, 5),),), name_of("a"), now_ns=9) == (((0, 5),),)
    assert memory.known((((0, 5),),), name_of("a"), now_ns=10) == ((),)
    assert len(memory) == 0


@pytest.mark.parametrize(("field", "value"), [("capacity_blocks", 0), ("capacity_blocks", -1), ("ttl_ns", 0)])
def test_a_memory_of_nothing_is_refused(field, value):
    with pytest.raises(InvalidArgument, match=field):
        BlockMemory(**{"capacity_blocks": 1, "ttl_ns": 1, field: value})


def test_another_namespace_begins_without_memories():
    experience = Experience()
    for memory in (experience.denied, experience.unsaved):
        memory.note((((0, 5),),), name_of("a"), 0)
    experience.num_storing = 3
    experience.clear()
    assert len(experience.denied) == len(experience.unsaved) == 0
    assert experience.num_storing == 3, "stores in flight go on"


def test_engines_do_not_share_theirs():
    one, other = Experience(), Experience()
    one.unsaved.note((((0, 5),),), name_of("a"), 0)
    assert len(other.unsaved) == 0

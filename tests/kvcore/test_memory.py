"""What an engine remembers of the pool, against a memory that goes block by block."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import memory as memory_module
from kvcore.errors import InvalidArgument
from kvcore.group_runs import minus
from kvcore.memory import CELL_BLOCKS, BlockMemory, Experience
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.runs import from_blocks
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from tests.kvcore.attention_oracle import as_sets

NUM_BLOCKS = 20
FORKS = {"a": (None, 0), "b": ("a", 3), "c": ("a", 11), "d": ("c", 12), "e": (None, 0)}
"""Sequences: the one whose first blocks each shares, and how many."""


def name(sequence, index, block):
    """Of a block's content: the same in all sequences that share it."""
    parent, fork = FORKS[sequence]
    return name(parent, index, block) if block < fork else (sequence, index, block)


def names_of(sequence):
    return lambda index, run: [name(sequence, index, block) for block in range(*run)]


def streams_of(sequence):
    """As a simulator does: what names a block need not be another at each position."""
    return lambda index, run: tuple(name(sequence, index, block)[0] for block in range(*run))


class BlockByBlock:
    """The memory by definition: a dict of names, oldest first."""

    def __init__(self, capacity_blocks, ttl_ns):
        self.capacity_blocks, self.ttl_ns = capacity_blocks, ttl_ns
        self.noted_ns = OrderedDict()

    def note(self, names, now_ns):
        for each in names:
            self.noted_ns[each] = now_ns
            self.noted_ns.move_to_end(each)
        while len(self.noted_ns) > self.capacity_blocks:
            self.noted_ns.popitem(last=False)

    def forget(self, names):
        for each in names:
            self.noted_ns.pop(each, None)

    def known(self, names, now_ns):
        for each in [each for each, noted_ns in self.noted_ns.items() if now_ns - noted_ns >= self.ttl_ns]:
            del self.noted_ns[each]
        return {each for each in names if each in self.noted_ns}


BLOCKS = st.tuples(*[st.sets(st.integers(0, NUM_BLOCKS - 1)) | st.builds(range, *[st.integers(0, NUM_BLOCKS)] * 2)] * 2)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("note", "note", "forget", "known")), BLOCKS, st.sampled_from([*FORKS]), st.integers(0, 6)
    ),
    max_size=25,
)


def replay(memory, events, namer=names_of):
    """Whether the memory is at any time what the one block by block is."""
    right = BlockByBlock(memory.capacity_blocks, memory.ttl_ns)
    now_ns = 0
    for what, blocks, sequence, passed_ns in events:
        now_ns += passed_ns
        runs = tuple(map(from_blocks, blocks))
        places = [(index, block) for index, some in enumerate(blocks) for block in sorted(some)]
        names = [name(sequence, *place) for place in places]
        if what == "note":
            memory.note(runs, namer(sequence), now_ns)
            right.note(names, now_ns)
        elif what == "forget":
            memory.forget(runs, namer(sequence))
            right.forget(names)
        known = right.known(names, now_ns)
        found = [
            (i, b) for i, some in enumerate(as_sets(memory.known(runs, namer(sequence), now_ns))) for b in sorted(some)
        ]
        expected = [place for place in places if name(sequence, *place) in known]
        if found != expected or len(memory) != len(right.noted_ns):
            return False
    return True


@pytest.mark.parametrize("cell_blocks", [1, 4, CELL_BLOCKS])
@pytest.mark.parametrize("namer", [names_of, streams_of])
@given(events=EVENTS, capacity_blocks=st.integers(1, 60), ttl_ns=st.integers(1, 40))
def test_it_remembers_what_was_noted_last_and_not_too_long_ago(cell_blocks, namer, events, capacity_blocks, ttl_ns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "CELL_BLOCKS", cell_blocks)
        memory = BlockMemory(capacity_blocks, ttl_ns)
        assert replay(memory, events, namer)
        for sequence in FORKS:
            memory.forget((((0, NUM_BLOCKS),),) * 2, namer(sequence))
    assert memory == BlockMemory(capacity_blocks, ttl_ns), "nothing is left of what was forgotten"


# -- controls ---------------------------------------------------------------------------------------------------------


class NeverForgets(BlockMemory):
    def _expire(self, now_ns):
        pass


class Unbounded(BlockMemory):
    def _drop(self, num_blocks):
        self._num_blocks -= num_blocks


class ForgetsTheNewest(BlockMemory):
    def _drop(self, num_blocks):
        self._notes.move_to_end(next(reversed(self._notes)), last=False)
        super()._drop(num_blocks)


class KeepsTheFirst(BlockMemory):
    """A block that is noted again stays as old as it was."""

    def note(self, blocks, names, now_ns):
        known = self.known(blocks, names, now_ns)
        super().note(minus(blocks, known), names, now_ns)


class ByPosition(BlockMemory):
    """Takes equal positions for equal contents."""

    def known(self, blocks, names, now_ns):
        return super().known(blocks, names_of("a"), now_ns)


class ByFirstBlock(BlockMemory):
    """Takes two runs for one when they begin alike."""

    def _parts(self, view):
        return [(stretch, start, min(stretch.end, view.end)) for stretch, start, _ in super()._parts(view)]


class ForgetsWholeRuns(BlockMemory):
    def _cut(self, stretch, start, end):
        super()._cut(stretch, stretch.start, stretch.end)


class ForgetsTheRestOfRuns(BlockMemory):
    def _cut(self, stretch, start, end):
        super()._cut(stretch, start, stretch.end)


WRONG = [
    NeverForgets,
    Unbounded,
    ForgetsTheNewest,
    KeepsTheFirst,
    ByPosition,
    ByFirstBlock,
    ForgetsWholeRuns,
    ForgetsTheRestOfRuns,
]
AGES = [("note", ({0, 5}, {1}), "a", 0), ("note", ({0}, {7}), "b", 6), ("known", ({0, 5, 7}, {1, 7}), "a", 5)]
MANY = [("note", (set(range(5)), set()), "a", 0), ("note", ({9}, {9}), "a", 0)]
ALIKE = [("note", (set(range(15)), set()), "a", 0), ("known", (set(range(15)), set()), "c", 0)]
AMID = [("note", (set(range(9)), {4}), "a", 0), ("forget", ({4}, set()), "b", 0), ("forget", ({2}, set()), "b", 0)]
AMID_KNOWN = [*AMID, ("known", (set(range(9)), {4}), "a", 0)]
STORIES = [(AGES, 20, 9), (MANY, 4, 9), (ALIKE, 20, 9), (AMID_KNOWN, 20, 9)]


def test_each_story_is_told_right():
    assert all(replay(BlockMemory(size, ttl), events) for events, size, ttl in STORIES)


@pytest.mark.parametrize("wrong", WRONG)
def test_another_memory_is_rejected(wrong):
    assert not all(replay(wrong(size, ttl), events) for events, size, ttl in STORIES)


# -- what it costs ----------------------------------------------------------------------------------------------------


class Counting:
    """A sequence of its own, that counts how often names are asked for, and how many."""

    def __init__(self, sequence):
        self.sequence, self.count = sequence, Counter()

    def __call__(self, index, run):
        self.count.update(questions=1, names=run[1] - run[0])
        return [(self.sequence, block) for block in range(*run)]


FEW = (((700, 900), (9_999_990, 10_000_000)), ())
"""In cells 2 and 3, and in another one far behind."""


def cost_of_asking(memory, num_blocks, sequence):
    counting = Counting(sequence)
    memory.known((((0, num_blocks),), ((0, num_blocks),)), counting, 1)
    return counting.count


def remembering_few(kind=BlockMemory):
    memory = kind(1_000, 10)
    memory.note(FEW, Counting("mine"), 0)
    return memory


@pytest.mark.parametrize("sequence", ["mine", "another's"])
@pytest.mark.parametrize("num_blocks", [1_024, 65_536, 9_999_872])
def test_a_question_costs_what_is_remembered_however_long_the_context(sequence, num_blocks):
    assert cost_of_asking(remembering_few(), num_blocks, sequence) == Counter(questions=2, names=2 * CELL_BLOCKS)


class AsksForEveryCell(BlockMemory):
    def _shared(self, index, run, names):
        starts = range(run[0], run[1], CELL_BLOCKS)
        asked = [super(AsksForEveryCell, self)._shared(index, (start, start + 1), names) for start in starts]
        return [part for parts in asked for part in parts]


def test_a_question_to_every_cell_is_noticed():
    memory = remembering_few(AsksForEveryCell)
    assert cost_of_asking(memory, 65_536, "mine")["questions"] > cost_of_asking(memory, 1_024, "mine")["questions"]


def test_a_full_memory_is_asked_cell_by_cell():
    memory = BlockMemory(65_536, 10)
    for number in range(512):
        memory.note((((number * 16, number * 16 + 128),), ()), Counting(number), 0)
    assert cost_of_asking(memory, 8_192, "mine")["questions"] == 2 * 8_192 // CELL_BLOCKS


class Name:
    """Counts how often it is looked at."""

    num_looks = 0

    def __init__(self, *value):
        self.value = value

    def __hash__(self):
        Name.num_looks += 1
        return hash(self.value)

    def __eq__(self, other):
        Name.num_looks += 1
        return self.value == other.value


def looks(num_sessions):
    """At names, by the question of one of many sessions that begin with the same 1,250 blocks."""
    memory, blocks = BlockMemory(65_536, 10), (((1_250, 1_300),),)

    def session(number):
        return lambda index, run: [Name(block if block < 1_250 else (number, block)) for block in range(*run)]

    for number in range(num_sessions):
        memory.note(blocks, session(number), 0)
    Name.num_looks = 0
    assert memory.known(blocks, session(1), 1) == blocks
    return Name.num_looks


def test_sessions_behind_one_system_prompt_are_not_gone_through():
    assert looks(2) == looks(200) == 10


MODEL = ModelSpec((FullAttention(16), SlidingWindow(16, window=64)))


@pytest.mark.parametrize("num_blocks", [1_024, 65_536, 1 << 20])
def test_a_grant_costs_no_more_in_a_long_context(num_blocks):
    experience, counting = Experience(), Counting("mine")
    experience.unsaved.note(FEW, Counting("another's"), 0)
    policy = PoolPolicy(max_load_attempts=0)
    request = KVRequest(Planner(MODEL), policy, num_blocks * 16 + 1, experience, counting)
    request.consider(num_blocks * 16, num_blocks * 16 + 1, 1)
    request.granted(0, 1)
    assert counting.count["questions"] <= 4, "the two cells, and two that a window may reach into"


# -- alone ------------------------------------------------------------------------------------------------------------


def test_the_oldest_goes_first():
    memory = BlockMemory(capacity_blocks=3, ttl_ns=100)
    for now_ns, block in enumerate((0, 1, 2, 0, 3)):
        memory.note((((block, block + 1),),), names_of("a"), now_ns)
    assert memory.known((((0, 9),),), names_of("a"), 5) == (((0, 1), (2, 4)),), "1 was noted longest ago"


def test_nothing_is_named_while_nothing_is_known():
    """A run of a million blocks costs nothing then."""
    memory = BlockMemory(10, 10)

    def names(index, run):
        raise AssertionError("named")

    assert memory.known((((0, 1_000_000),),), names, 0) == ((),)
    memory.forget((((0, 1_000_000),),), names)


def test_what_has_expired_costs_nothing_either():
    memory = BlockMemory(10, ttl_ns=10)
    memory.note((((0, 5),),), names_of("a"), now_ns=0)
    assert memory.known((((0, 5),),), names_of("a"), now_ns=9) == (((0, 5),),)
    assert memory.known((((0, 5),),), names_of("a"), now_ns=10) == ((),)
    assert memory == BlockMemory(10, ttl_ns=10)


def test_only_names_of_what_is_remembered_are_kept():
    memory = BlockMemory(1_000, 10)
    memory.note((((100, 700),),), names_of("a"), 0)
    memory.forget((((0, 250), (300, 690)),), names_of("a"))
    kept = [stretch.names for starts in memory._cells.values() for at in starts.values() for stretch in at.values()]
    assert sum(map(len, kept)) == len(memory) == 60


@pytest.mark.parametrize(("field", "value"), [("capacity_blocks", 0), ("capacity_blocks", -1), ("ttl_ns", 0)])
def test_a_memory_of_nothing_is_refused(field, value):
    with pytest.raises(InvalidArgument, match=field):
        BlockMemory(**{"capacity_blocks": 1, "ttl_ns": 1, field: value})


def test_another_namespace_begins_without_memories():
    experience = Experience()
    for memory in (experience.denied, experience.unsaved):
        memory.note((((0, 5),),), names_of("a"), 0)
    experience.num_storing = 3
    experience.clear()
    assert experience == Experience(num_storing=3), "stores in flight go on"


def test_engines_do_not_share_theirs():
    one, other = Experience(), Experience()
    one.unsaved.note((((0, 5),),), names_of("a"), 0)
    assert len(other.unsaved) == 0

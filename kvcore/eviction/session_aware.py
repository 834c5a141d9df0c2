"""What is least likely to return goes first (Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025)."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeAlias

from kvcore.eviction.policy import KeyT, Order
from kvcore.eviction.runs import AgeLine, Candidate, Line, Lineage, Piece, Reach
from kvcore.runs import overlap

MAX_TURN = 16
"""Blocks of later turns are taken for ones of this turn."""


class _Turn:
    """Blocks that so many requests have used, and how it went on with all of them so far."""

    __slots__ = ("num_returned", "num_used", "waited")

    def __init__(self) -> None:
        self.num_used = 0
        self.num_returned = 0
        self.waited = 0  # sum of the times until they returned

    def returned(self, num_blocks: int, wait: int) -> None:
        """So many were used again, so long after they were young."""
        self.num_returned += num_blocks
        self.waited += num_blocks * wait

    def worth(self, age: int) -> float:
        """Chance that a block of this age returns, per time that takes: the mean wait of its turn, and its age."""
        returned = self.num_returned + 1
        return returned * returned / ((self.num_used + 2) * (self.waited + 1 + age * returned))


class SessionAware(Generic[KeyT]):
    """A block that n requests have used is in the n-th turn of its session; turns differ in how likely they go on.

    The paper learns, for each category of requests (kind and turn), how likely and how soon a block returns, and evicts
    what is least likely to, of one request the deepest first. Here the category is the turn alone, told by content, so
    that traces without names of sessions have it too; and instead of an exponential fit the chance falls with
    1 / (mean wait + age). What it knows is the past: of evicted blocks it remembers turn and time (`memory_blocks` of
    them), or it would take for ended what it had only forgotten. Time is counted in requests.
    """

    order: ClassVar[Order] = Order.LEAF_FIRST

    __slots__ = ("_gone", "_held", "_memory_blocks", "_now", "_turn", "_turns")

    def __init__(self, memory_blocks: int = 1_000_000) -> None:
        self._memory_blocks = memory_blocks
        self._turns = [_Turn() for _ in range(MAX_TURN)]
        self._held: list[OrderedDict[KeyT, int]] = [OrderedDict() for _ in range(MAX_TURN)]  # since when, oldest first
        self._turn: dict[KeyT, int] = {}  # of held keys
        self._gone: OrderedDict[KeyT, tuple[int, int]] = OrderedDict()  # (turn, young until), oldest first
        self._now = 0

    def arrive(self, number: int) -> None:
        """The time of all that the request uses."""
        self._now = number

    def enter(self, key: KeyT, parent: KeyT | None) -> None:
        """Another turn of what was evicted, or the first of something new."""
        turn, used = self._gone.pop(key, (None, 0))
        self._begin(key, 0 if turn is None else self._next(turn, used))

    def use(self, key: KeyT) -> None:
        """Another turn."""
        turn = self._turn[key]
        self._begin(key, self._next(turn, self._held[turn].pop(key)))

    def evict(self) -> KeyT:
        """Of the oldest of each turn, the one worth least."""
        turn = min((turn for turn in range(MAX_TURN) if self._held[turn]), key=self._worth)
        key = next(iter(self._held[turn]))
        self.leave(key)
        return key

    def leave(self, key: KeyT) -> None:
        """Not held any more, but remembered."""
        turn = self._turn.pop(key)
        self._gone[key] = (turn, self._held[turn].pop(key))
        if len(self._gone) > self._memory_blocks:
            self._gone.popitem(last=False)

    def _worth(self, turn: int) -> float:
        return self._turns[turn].worth(self._now - next(iter(self._held[turn].values())))

    def _next(self, turn: int, used: int) -> int:
        """A block of that turn has returned."""
        self._turns[turn].returned(1, self._now - used)
        return min(turn + 1, MAX_TURN - 1)

    def _begin(self, key: KeyT, turn: int) -> None:
        self._turn[key] = turn
        self._turns[turn].num_used += 1
        self._held[turn][key] = self._now


# --- on runs ----------------------------------------------------------------------------------------------------------


_Part: TypeAlias = tuple[int, int, int]
"""(start, end, turn): blocks [start, end) of a lineage are in that turn."""


class _Note(NamedTuple):
    """Blocks [start, end) of a lineage are or were in this turn, and young in that call."""

    start: int
    end: int
    turn: int
    call: int


class SessionAwareRuns:
    """`SessionAware` on runs; what it remembers of evicted blocks are the `memory_lineages` lineages used last."""

    reach: ClassVar[Reach] = Reach.PREFIX

    def __init__(self, memory_lineages: int = 100_000) -> None:
        self._memory_lineages = memory_lineages
        self._turns = [_Turn() for _ in range(MAX_TURN)]
        self._notes: OrderedDict[Lineage, list[_Note]] = OrderedDict()  # sorted and disjoint; used last is last
        self._now = 0

    def arrive(self, call: int) -> None:
        """The time of all that the call uses."""
        self._now = call

    def use(self, pieces: Sequence[Piece]) -> None:
        """Another turn of what is known, the first of what is not."""
        for lineage, start, end in pieces:
            known = self._cut(lineage, start, end)
            for note in known:
                self._turns[note.turn].returned(note.end - note.start, self._now - note.call)
            begun = [(note.start, note.end, min(note.turn + 1, MAX_TURN - 1)) for note in known]
            self._note(lineage, list(_with_gaps(begun, start, end)))
            for first, last, turn in _with_gaps(begun, start, end):
                self._turns[turn].num_used += last - first

    def touch(self, pieces: Sequence[Piece]) -> None:
        """Young again in their turns."""
        for lineage, start, end in pieces:
            self._note(lineage, [(note.start, note.end, note.turn) for note in self._cut(lineage, start, end)])

    def line(self) -> Line:
        """One for each turn."""
        return _TurnLines(self)

    def worth(self, turn: int, call: int) -> float:
        """Of blocks in that turn that were young in that call."""
        return self._turns[turn].worth(self._now - call)

    def turns_in(self, lineage: Lineage, start: int, end: int) -> Iterator[_Part]:
        """The parts of [start, end); what was forgotten is in the first turn."""
        notes = self._notes.get(lineage, [])
        about = notes[slice(*overlap(notes, start, end))]
        return _with_gaps([(max(start, note.start), min(end, note.end), note.turn) for note in about], start, end)

    def _note(self, lineage: Lineage, parts: Sequence[_Part]) -> None:
        """Note parts that are in their turns as of now, where nothing is noted."""
        fresh: list[_Note] = []
        for start, end, turn in parts:
            if fresh and fresh[-1][1:3] == (start, turn):
                start = fresh.pop().start
            fresh.append(_Note(start, end, turn, self._now))
        if not fresh:
            return
        notes = self._notes.setdefault(lineage, [])
        index = bisect_left(notes, fresh[0])
        notes[index:index] = fresh
        self._notes.move_to_end(lineage)
        if len(self._notes) > self._memory_lineages:
            self._notes.popitem(last=False)

    def _cut(self, lineage: Lineage, start: int, end: int) -> list[_Note]:
        """Take what is noted of [start, end) out."""
        notes = self._notes.get(lineage, [])
        first, last = overlap(notes, start, end)
        cut = notes[first:last]
        outside = []
        if cut and cut[0].start < start:
            outside.append(cut[0]._replace(end=start))
            cut[0] = cut[0]._replace(start=start)
        if cut and end < cut[-1].end:
            outside.append(cut[-1]._replace(start=end))
            cut[-1] = cut[-1]._replace(end=end)
        notes[first:last] = outside
        return cut


class _TurnLines:
    """A line by age for each turn; of their first ones, the one worth least goes."""

    __slots__ = ("_lines", "_policy")

    def __init__(self, policy: SessionAwareRuns) -> None:
        self._policy = policy
        self._lines = [AgeLine() for _ in range(MAX_TURN)]

    def __iter__(self) -> Iterator[Candidate]:
        return (candidate for line in self._lines for candidate in line)

    def offer(self, candidate: Candidate) -> None:
        """In parts, each in the line of its turn."""
        call, negative_end, start, lineage = candidate
        for first, last, turn in self._policy.turns_in(lineage, start, -negative_end):
            self._lines[turn].offer((call, -last, first, lineage))

    def take(self) -> Candidate | None:
        """One that is out of date is worth no more than those behind it, so that it hides nobody worth less."""
        firsts = ((turn, line.first) for turn, line in enumerate(self._lines))
        heads = [(self._policy.worth(turn, call), turn) for turn, call in firsts if call is not None]
        return self._lines[min(heads)[1]].take() if heads else None


def _with_gaps(parts: Sequence[_Part], start: int, end: int) -> Iterator[_Part]:
    """The parts of [start, end), and those between them in turn 0."""
    for first, last, turn in parts:
        if start < first:
            yield start, first, 0
        yield first, last, turn
        start = last
    if start < end:
        yield start, end, 0

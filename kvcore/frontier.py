"""How far does what engine and pool hold together reach? A dialogue that asks for as little as it can.

    rounds 1 to 3    the groups that need all of the past: the next part of the sequence, in two or three growing
                     batches, up to the first gap; with the last, on the chance of none, the longest hit of the others
    one round        where blocks can be split: the tails behind the first gap
    then             the other groups, at the longest 1, 2, 4, ... hits that no known loss rules out

Never a key twice, and none that no hit beyond the local one needs. A whole hit takes at most three rounds, n boundaries
at most log2(n) + 5. A pool leases what it is asked for, so that the order is part of its behaviour.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from kvcore.group_runs import GroupRuns, common, minus, plus, singles
from kvcore.hit import hit_len
from kvcore.runs import normalize, subtract
from kvcore.spec import ModelSpec
from kvcore.tails import cover, tail_units
from kvcore.types import Run, Runs
from kvcore.units import align_down, align_up, div_ceil

FIRST_BATCH_HITS = 64
"""Boundaries in the first batch, at least: a round trip costs as much as some 50 keys (`batch_is_exist`, loopback)."""

FIRST_BATCH_SHARE = 16
"""The first batch is this part of the sequence, at least; the second the rest."""

LONG_BATCH_HITS = 8_192
"""Where more boundaries than this are left, a batch of four times the first comes in between: so many keys in vain take
longer (4.5 ms to be told that they are absent) than any round trip."""


@dataclass(slots=True)
class Frontier:
    """The dialogue about hits of local_hit_len < length <= limit, in tokens; `limit` as `ModelSpec.limit` gives it.

    While it is `open`, ask the pool for `question` and report with `answered`. At any time `hit_len` is what the
    answers prove. `asked` and `present` are of all rounds, and may be read by another thread, `present` first. The pool
    is not asked for what is `denied`, which counts as lost.
    """

    model: ModelSpec
    local_hit_len: int
    limit: int
    denied: GroupRuns
    question: GroupRuns = field(init=False)
    asked: GroupRuns = field(init=False)
    present: GroupRuns = field(init=False)
    rounds: int = field(init=False, default=0)
    _nothing: GroupRuns = field(init=False)
    _units: ModelSpec = field(init=False)
    _closed: tuple[int, ...] = field(init=False)
    _others: tuple[int, ...] = field(init=False)
    _held: GroupRuns = field(init=False)
    _known: GroupRuns = field(init=False)
    _lost: GroupRuns = field(init=False)
    _asked_blocks: list[int] = field(init=False)
    _whole_len: int = field(init=False)
    _batches: list[int] = field(init=False)
    _tails_due: bool = field(init=False)
    _top: int | None = field(init=False, default=None)
    _num_tops: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self._units = self.model.in_units()
        groups = self._units.groups
        self._closed, self._others = self.model.closed_groups, self.model.other_groups
        self._held = singles([spec.needed_blocks(self.local_hit_len) for spec in groups])
        self._known = self._held
        nothing = self._nothing = ((),) * (len(groups) + len(self.model.tail_groups))
        self.question = self.asked = self.present = nothing
        self._asked_blocks = [self.local_hit_len // spec.block_size for spec in self.model.groups]
        self._lost = nothing
        self._whole_len = self.limit
        if any(self.denied):
            self._lost = (*map(subtract, self.denied, self._held), *self.denied[len(groups) :])
            self.limit = self._undenied_len()
        self._batches = self._batch_ends() if self._closed else []
        self._tails_due = bool(self.model.tail_groups)
        if self.limit > self.local_hit_len:
            self.question = self._next()

    @property
    def open(self) -> bool:
        """Whether there is a question to put."""
        return any(self.question)

    @property
    def hit_len(self) -> int:
        """The largest length whose blocks engine and pool are known to hold together; at least the local hit."""
        return max(self.local_hit_len, hit_len(self._units, self._known, self.limit))

    def answered(self, present: GroupRuns) -> None:
        """The pool holds `present` of the question."""
        held = common(present, self.question)
        self.asked = plus(self.asked, self.question)
        self.present = plus(self.present, held)  # after `asked`: at any moment it is part of that
        if self._others:
            self._lost = plus(self._lost, minus(self.question, held))
        self._known = plus(self._held, cover(self.model, self.present))
        self.rounds += 1
        self.question = self._next()

    # -- what to ask next ---------------------------------------------------------------------------------------------

    def _next(self) -> GroupRuns:
        while self._batches and not self._has_gap():
            question = self._prefix(self._batches.pop(0))
            if not self._batches and (self._others or self._tails_due):
                question = plus(question, self._guess())
            question = minus(question, self.denied)
            if any(question):
                return question
        self._batches.clear()
        if self._tails_due:
            self._tails_due = False
            tails = self._tails([self._covered_len(group) for group in range(len(self.model.groups))])
            question = minus(tails, self.denied)
            if any(question):
                return question
        return self._tops()

    def _batch_ends(self) -> list[int]:
        """Lengths up to which the prefix-closed groups are asked, in turn; the last one is the limit."""
        step = self.model.hit_step
        first = max(FIRST_BATCH_HITS * step, (self.limit - self.local_hit_len) // FIRST_BATCH_SHARE)
        if self.local_hit_len + first >= self.limit:
            return [self.limit]
        ends = [align_up(self.local_hit_len + batch, step) for batch in (first, 5 * first)]
        if self.limit - ends[0] <= LONG_BATCH_HITS * step:
            del ends[1]
        return [*(end for end in ends if end < self.limit), self.limit]

    def _prefix(self, length: int) -> GroupRuns:
        """What the prefix-closed groups need for a hit of `length` and were not asked for; whole blocks only.

        With the last of them one that reaches beyond what the denied blocks leave, where it can be split.
        """
        question = list(self._nothing)
        for group in self._closed:
            start, size = self._asked_blocks[group], self.model.groups[group].block_size
            margin = self._units.margins[group]
            end = (length + margin) // size
            if length == self.limit and group in self.model.tail_groups:
                end = min(div_ceil(length + margin, size), (self._whole_len + margin) // size)
            if start < end:
                self._asked_blocks[group] = end
                question[group] = ((start, end),)
        return tuple(question)

    def _guess(self) -> GroupRuns:
        """What the longest hit needs beside whole blocks."""
        whole = zip(self._units.margins, self.model.groups, strict=True)
        ends = (align_down(self.limit + margin, spec.block_size) for margin, spec in whole)
        tails = self._tails([max(self.local_hit_len, end) for end in ends])
        question = list(self._nothing)
        for group in self._others:
            question[group] = self._unknown(group, self.limit)
        return plus(tails, tuple(question))

    def _tails(self, covered_lens: list[int]) -> GroupRuns:
        """The tails that reach beyond what whole blocks cover and were not asked for."""
        question = list(self._nothing)
        for index, group in enumerate(self.model.tail_groups, start=len(self.model.groups)):
            proof_len = self.limit + self._units.margins[group]
            tails = tail_units(self.model, group, covered_lens[group], proof_len)
            question[index] = subtract(normalize((tails,)), self.asked[index])
        return tuple(question)

    def _tops(self) -> GroupRuns:
        """What the next longest hits need that nobody was asked for; nothing when one of them is proven."""
        if not self._others:
            return self._nothing
        wanted: list[list[Run]] = [[] for _ in self.asked]
        length = self._reach() if self._top is None else self._top
        self._top, left = None, self._num_tops
        while length > self.local_hit_len and left:
            possible = self._possible_len(length)
            if possible < length:
                length = possible
                continue
            unknown = {group: self._unknown(group, length) for group in self._others}
            if not any(unknown.values()):
                break
            for group, runs in unknown.items():
                wanted[group].extend(runs)
            self._top = length if self._top is None else self._top
            length, left = length - self.model.hit_step, left - 1
        self._num_tops *= 2
        return tuple(normalize(runs) for runs in wanted)

    def _undenied_len(self) -> int:
        """The longest hit that the denied blocks leave."""
        length = min((self.limit, *(self._denied_len(group) for group in self._closed)))
        while (shorter := self._possible_len(length)) < length:
            length = shorter
        return length

    def _denied_len(self, group: int) -> int:
        """The longest hit that the denied blocks of a prefix-closed group leave; tails may reach into the first."""
        size, first = self.model.groups[group].block_size, self._asked_blocks[group]
        denied = next((max(start, first) for start, end in self.denied[group] if end > first), None)
        if denied is None:
            return self.limit
        spare = size - self.model.hit_step if group in self.model.tail_groups else 0
        return align_down(max(0, denied * size + spare - self._units.margins[group]), self.model.hit_step)

    # -- what is known ------------------------------------------------------------------------------------------------

    def _proof(self, group: int, length: int) -> Run:
        return self._units.proof_blocks(group, length)

    def _covered_len(self, group: int) -> int:
        """Tokens from the start that are known to be held in the group."""
        runs = self._known[group]
        return runs[0][1] * self._units.groups[group].block_size if runs and runs[0][0] == 0 else 0

    def _has_gap(self) -> bool:
        """Whether some prefix-closed group lacks a block of what was asked."""
        for group in self._closed:
            if self._covered_len(group) < self._asked_blocks[group] * self.model.groups[group].block_size:
                return True
        return False

    def _reach(self) -> int:
        """The longest hit that the prefix-closed groups allow."""
        reaches = (self._covered_len(group) - self._units.margins[group] for group in self._closed)
        return align_down(max(0, min((self.limit, *reaches))), self.model.hit_step)

    def _possible_len(self, length: int) -> int:
        """The longest hit <= `length` that no known loss rules out."""
        for group in self._others:
            start, end = self._proof(group, length)
            lost = self._lost[group]
            index = bisect_right(lost, (start, start))
            first = lost[index][0] if index < len(lost) else end
            if index and start < lost[index - 1][1]:
                first = start
            if first < end:
                shorter = first * self._units.groups[group].block_size - self._units.margins[group]
                return align_down(max(0, shorter), self.model.hit_step)
        return length

    def _unknown(self, group: int, length: int) -> Runs:
        """What a hit of `length` needs of the group and nobody is known to hold."""
        return subtract(normalize((self._proof(group, length),)), self._known[group])

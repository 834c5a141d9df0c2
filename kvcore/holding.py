"""Who holds which blocks of the GPU's pool: requests, by their block tables, and readers that may outlive them."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple, TypeAlias

from kvcore.lane import Lane
from kvcore.runs import intersect, num_blocks, single, subtract
from kvcore.types import Run, Runs

Span: TypeAlias = tuple[Lane, int, int]
"""(lane, start, end): the physical copies of blocks [start, end) that one lane has."""

_START = itemgetter(1)


class Match(NamedTuple):
    """Cached blocks [start, end) of a sequence, as of one moment; `spans` and `num_evicted` are the pool's own."""

    group: int
    start: int
    end: int
    num_free: int
    """How many of them are in the free queue: holding them lowers the pool's num_free by this."""
    spans: tuple[Span, ...]
    num_evicted: int

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self.end - self.start


class Holding:
    """The blocks [start, end) of a sequence in one group that one request has references to.

    Those before `cached_end` have an identity, but for the runs `unkept`; the others have none yet. Where a table has
    gaps (`skip`), they are before `cached_end` too. Only the pool changes it, or reads `spans`.
    """

    __slots__ = ("cached_end", "end", "group", "lent", "spans", "start", "unkept")

    def __init__(self, group: int, spans: list[Span], start: int, cached_end: int) -> None:
        self.group = group
        self.spans = spans
        self.start = start
        self.cached_end = cached_end
        self.end = cached_end
        self.unkept: Runs = ()
        self.lent: list[Pin] = []
        """Pins on blocks of it that have no identity."""

    @property
    def num_blocks(self) -> int:
        """All blocks, and gaps."""
        return self.end - self.start

    @property
    def blanks(self) -> Runs:
        """Blocks without identity."""
        return self.unkept + single((self.cached_end, self.end))

    @property
    def num_anonymous(self) -> int:
        """How many those are."""
        return num_blocks(self.blanks)

    def skip(self, start: int) -> None:
        """The next block is `start`, and those before it that are not held yet never will be."""
        assert self.cached_end == self.end <= start, (self.cached_end, self.end, start)
        if not self.spans and not self.unkept:
            self.start = start
        self.cached_end = self.end = start

    def give_up(self, before: int) -> int:
        """Forget the blocks without identity before `before`; how many of them nobody holds any more."""
        if not self.unkept and not self.lent:
            first, self.cached_end = self.cached_end, max(self.cached_end, min(before, self.end))
            return self.cached_end - first
        blanks = intersect(self.blanks, single((0, before)))
        self.unkept = subtract(self.unkept, blanks)
        self.cached_end = max(self.cached_end, min(before, self.end))
        num_freed = num_blocks(blanks)
        for pin in self.lent:
            num_inherited = num_blocks(intersect(pin.blanks, blanks))
            pin.num_inherited += num_inherited
            num_freed -= num_inherited
        return num_freed

    def cut(self, before: int) -> list[Span]:
        """Forget the cached blocks before `before`, and return them."""
        spans = [(lane, start, min(end, before)) for lane, start, end in self.spans if start < before]
        self.spans = [(lane, max(start, before), end) for lane, start, end in self.spans if end > before]
        self.start = before
        return spans

    def clear(self) -> None:
        """Hold nothing."""
        self.spans = []
        self.unkept = ()
        self.lent = []
        self.start = self.cached_end = self.end = 0


class Pin(Holding):
    """Some blocks of a holding, for a reader that may outlive it; one without identity, of which there are some at
    first, is pinned once.
    """

    __slots__ = ("_blanks", "_lender", "num_inherited")

    def __init__(self, lender: Holding, spans: list[Span], run: Run) -> None:
        super().__init__(lender.group, spans, *run)
        self._blanks = subtract(single(run), tuple((start, end) for _, start, end in spans))
        self._lender = lender
        self.num_inherited = 0
        """Blocks without identity that the lender has given up."""
        assert self._blanks and subtract(self._blanks, lender.blanks) == (), (run, lender.blanks)
        assert not any(intersect(self._blanks, pin.blanks) for pin in lender.lent), run
        lender.lent.append(self)

    @property
    def blanks(self) -> Runs:
        """Blocks without identity."""
        return self._blanks

    @property
    def num_anonymous(self) -> int:
        """How many of those nobody else holds."""
        return self.num_inherited

    def named(self, span: Span) -> list[Span]:
        """The lender's blocks of `span` have an identity now; those of them that are pinned."""
        lane, start, end = span
        runs = intersect(self._blanks, ((start, end),))
        self._blanks = subtract(self._blanks, runs)
        spans: list[Span] = [(lane, *run) for run in runs]
        self.spans = sorted(self.spans + spans, key=_START)
        return spans

    def give_up(self, before: int) -> int:
        """All of them: blocks without identity that nobody holds any more."""
        assert before == self.end, before
        return self.num_inherited

    def clear(self) -> None:
        """Hold nothing."""
        if self in self._lender.lent:
            self._lender.lent.remove(self)
        super().clear()
        self._blanks, self.num_inherited = (), 0

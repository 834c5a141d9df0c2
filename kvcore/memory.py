"""What was learnt about blocks lately, by content: bounded, and forgotten after a while.

What is remembered is kept in runs, whatever the names are: one per block in an engine, one per lineage in a simulator.
Positions are divided into cells, so that a run is found without going through all others or through all its blocks:

    position  0            256           512           768
    cell      |     0      |      1      |      2      |
    noted     |     [======)[============)[===)        |      three runs, each within a cell

Names are chained, so sequences that share a block share the first block of its cell: runs are filed under that name,
then under where and with which name they begin. Runs have no block in common, so at most one begins with a given name.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvcore.errors import require
from kvcore.group_runs import GroupRuns
from kvcore.runs import normalize
from kvcore.types import Run
from kvcore.units import div_ceil

NamesOf: TypeAlias = Callable[[int, Run], Sequence[Hashable]]
"""(index in `GroupRuns`, run) -> what names the content of each of its blocks: the names of one sequence.

They are chained, as hashes of blocks are: sequences that agree at a block of an index agree at all before it. They are
asked for from the first block of a cell on, and kept while the blocks are remembered.
"""

CELL_BLOCKS = 256


def by_position(_index: int, run: Run) -> range:
    """The names of a sequence that shares nothing with another one."""
    return range(*run)


_Key: TypeAlias = tuple[int, int, Hashable]
"""(index, number of the cell, name of its first block)."""


class _View(NamedTuple):
    """One sequence's blocks of a cell: `names` are those of [first, end), and [start, end) is what it is about."""

    key: _Key
    first: int
    start: int
    end: int
    names: Sequence[Hashable]


@dataclass(slots=True, eq=False)
class _Note:
    """What was noted at one time and not since, by index and start."""

    noted_ns: int
    stretches: "dict[tuple[int, int], _Stretch]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Stretch:
    """Remembered blocks [start, end) of one cell, and their names."""

    key: _Key
    start: int
    end: int
    names: Sequence[Hashable]
    note: _Note

    def shared_end(self, view: _View) -> int:
        """Up to where a sequence that has the first block has the others."""
        end = self.end if self.end < view.end else view.end
        if view.names[end - 1 - view.first] == self.names[end - 1 - self.start]:
            return end
        blocks = range(self.start, end)
        return blocks[bisect_left(blocks, True, key=lambda b: view.names[b - view.first] != self.names[b - self.start])]

    def part(self, start: int, end: int) -> "_Stretch":
        """Blocks [start, end) of it."""
        return _Stretch(self.key, start, end, self.names[start - self.start : end - self.start], self.note)


_Part: TypeAlias = tuple[_Stretch, int, int]
"""Blocks [start, end) of a stretch."""


@dataclass(slots=True)
class BlockMemory:
    """Names of at most `capacity_blocks`, each for `ttl_ns` after it was last noted; the oldest is forgotten first.

    Of those noted at once the first is the oldest. A question costs time for each cell of its runs, or for each that
    the memory has anything in, whichever are fewer; and for each run that is remembered in those.
    """

    capacity_blocks: int
    ttl_ns: int
    _num_blocks: int = 0
    _cells: dict[_Key, dict[int, dict[Hashable, _Stretch]]] = field(default_factory=dict)
    _notes: OrderedDict[_Note, None] = field(default_factory=OrderedDict)  # oldest first, in constant time

    def __post_init__(self) -> None:
        require(self.capacity_blocks > 0, "capacity_blocks", self.capacity_blocks, "at least 1")
        require(self.ttl_ns > 0, "ttl_ns", self.ttl_ns, "more than 0")

    def __len__(self) -> int:
        return self._num_blocks

    def note(self, blocks: GroupRuns, names_of: NamesOf, now_ns: int) -> None:
        """Remember the blocks from now on."""
        if not any(blocks):
            return
        note = _Note(now_ns)
        for index, run in _each(blocks):
            for view in _views(index, run, _cells_of(run), names_of):
                for part in self._parts(view):
                    self._cut(*part)
                self._file(_Stretch(view.key, view.start, view.end, view.names[view.start - view.first :], note))
        self._notes[note] = None
        while self._num_blocks > self.capacity_blocks:
            self._drop(self._num_blocks - self.capacity_blocks)

    def forget(self, blocks: GroupRuns, names_of: NamesOf) -> None:
        """The blocks mean nothing any more; unknown ones are ignored."""
        for index, run in _each(blocks) if self._cells else ():
            for part in self._shared(index, run, names_of):
                self._cut(*part)

    def known(self, blocks: GroupRuns, names_of: NamesOf, now_ns: int) -> GroupRuns:
        """Those of the blocks that are remembered. Costs nothing while nothing is."""
        self._expire(now_ns)
        if not self._cells:
            return ((),) * len(blocks)
        return tuple(
            normalize((start, end) for run in runs for _, start, end in self._shared(index, run, names_of))
            for index, runs in enumerate(blocks)
        )

    def clear(self) -> None:
        """Forget everything."""
        self._num_blocks = 0
        self._cells.clear()
        self._notes.clear()

    # -- finding --------------------------------------------------------------------------------------------------

    def _shared(self, index: int, run: Run, names_of: NamesOf) -> list[_Part]:
        """What is remembered of the run."""
        cells: Collection[int] = _cells_of(run)
        if len(self._cells) < len(cells):
            cells = {cell for known_index, cell, _ in self._cells if known_index == index and cell in cells}
        return [part for view in _views(index, run, cells, names_of) for part in self._parts(view)]

    def _parts(self, view: _View) -> list[_Part]:
        parts: list[_Part] = []
        key, first, asked, limit, names = view
        for start, called in self._cells.get(key, {}).items():
            stretch = called.get(names[start - first]) if start < limit else None
            if stretch is not None and asked < stretch.end:
                end = stretch.shared_end(view)
                if asked < end:
                    parts.append((stretch, max(start, asked), end))
        return parts

    # -- changing -------------------------------------------------------------------------------------------------

    def _cut(self, stretch: _Stretch, start: int, end: int) -> None:
        """Forget blocks [start, end) of it; what is left is as old as before."""
        self._unfile(stretch)
        if stretch.start < start:
            self._file(stretch.part(stretch.start, start))
        if end < stretch.end:
            self._file(stretch.part(end, stretch.end))
        if not stretch.note.stretches:
            del self._notes[stretch.note]

    def _file(self, stretch: _Stretch) -> None:
        self._cells.setdefault(stretch.key, {}).setdefault(stretch.start, {})[stretch.names[0]] = stretch
        stretch.note.stretches[stretch.key[0], stretch.start] = stretch
        self._num_blocks += stretch.end - stretch.start

    def _unfile(self, stretch: _Stretch) -> None:
        starts = self._cells[stretch.key]
        called = starts[stretch.start]
        del called[stretch.names[0]]
        if not called:
            del starts[stretch.start]
        if not starts:
            del self._cells[stretch.key]
        del stretch.note.stretches[stretch.key[0], stretch.start]
        self._num_blocks -= stretch.end - stretch.start

    def _drop(self, num_blocks: int) -> None:
        """Forget the oldest blocks, at most so many."""
        stretches = next(iter(self._notes)).stretches
        oldest = stretches[min(stretches)]
        self._cut(oldest, oldest.start, min(oldest.end, oldest.start + num_blocks))

    def _expire(self, now_ns: int) -> None:
        while self._notes:
            note = next(iter(self._notes))
            if now_ns - note.noted_ns < self.ttl_ns:
                return
            for stretch in list(note.stretches.values()):
                self._cut(stretch, stretch.start, stretch.end)


def _each(blocks: GroupRuns) -> Iterator[tuple[int, Run]]:
    return ((index, run) for index, runs in enumerate(blocks) for run in runs)


def _cells_of(run: Run) -> range:
    return range(run[0] // CELL_BLOCKS, div_ceil(run[1], CELL_BLOCKS))


def _views(index: int, run: Run, cells: Iterable[int], names_of: NamesOf) -> Iterator[_View]:
    """The run, cell by cell."""
    for cell in cells:
        first = cell * CELL_BLOCKS
        end = min(run[1], first + CELL_BLOCKS)
        names = names_of(index, (first, end))
        assert len(names) == end - first, (index, first, end, len(names))
        yield _View((index, cell, names[0]), first, max(run[0], first), end, names)


@dataclass(slots=True)
class Experience:
    """What all requests of one engine have learnt about the pool; a reset of the namespace clears it.

    `denied`: a lookup found it and a load did not get it. Not asked for again until it is forgotten (10 s: the lease
    that such an answer promises in Mooncake 0.3.13) or stored.
    `unsaved`: this engine computed it and the pool does not have it, because it was refused or not admitted. Offered
    when it is touched next. 65,536 blocks of 16 tokens are a million tokens.
    `num_storing`: blocks of stores in flight, which a reset does not end.
    """

    denied: BlockMemory = field(default_factory=lambda: BlockMemory(65_536, 10 * 10**9))
    unsaved: BlockMemory = field(default_factory=lambda: BlockMemory(65_536, 3_600 * 10**9))
    num_storing: int = 0

    def clear(self) -> None:
        """Another namespace begins."""
        self.denied.clear()
        self.unsaved.clear()

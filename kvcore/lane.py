"""Cached blocks of one group and stream as a step function: from block index to ref_cnt, in pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kvcore.types import Run, StreamId


class Lane:
    """At most one physical copy of each block of a stream in one group, as disjoint pieces sorted by block index.

    Held blocks (ref_cnt > 0) are in as few pieces as there can be, so the number of those is bounded by the holdings
    alive, not by history; free pieces that touch are joined when they are held again.
    """

    __slots__ = ("group", "pieces", "starts", "stream")

    def __init__(self, group: int, stream: StreamId) -> None:
        self.group = group
        self.stream = stream
        self.starts: list[int] = []
        self.pieces: list[Piece] = []

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any block of the non-empty [start, end) is here."""
        if self.pieces[-1].end <= start:
            return False
        index = bisect_left(self.starts, end)
        return index > 0 and self.pieces[index - 1].end > start

    def reach(self, at: int, end: int) -> tuple[int, int]:
        """(stop, num_free): [at, stop) is the part of [at, end) here before the first gap; num_free of it are free."""
        pieces = self.pieces
        index = bisect_right(self.starts, at) - 1
        num_free = 0
        if index < 0 or pieces[index].end <= at:
            return at, 0
        while at < end and index < len(pieces) and (piece := pieces[index]).start <= at:
            stop = min(piece.end, end)
            if not piece.ref_cnt:
                num_free += stop - at
            at = stop
            index += 1
        return at, num_free

    def runs(self, start: int, end: int) -> list[Run]:
        """The parts of [start, end) that are here."""
        first = max(0, bisect_right(self.starts, start) - 1)
        last = bisect_left(self.starts, end)
        return [
            (max(piece.start, start), min(piece.end, end)) for piece in self.pieces[first:last] if piece.end > start
        ]

    def next_start(self, at: int, end: int) -> int:
        """Where, in [at, end], the first block after the absent `at` is; `end` if nowhere."""
        index = bisect_right(self.starts, at)
        return min(end, self.starts[index]) if index < len(self.starts) else end

    def cut(self, at: int) -> int:
        """Split the piece with blocks on both sides of `at`, if any; the index of the first piece from `at` on."""
        index = bisect_left(self.starts, at)
        if index and self.pieces[index - 1].end > at:
            low = self.pieces[index - 1]
            high = Piece(self, at, low.end, low.ref_cnt)
            low.end = at
            if not low.ref_cnt:
                high.link_before(low)
            self._insert(index, high)
        return index

    def join(self, first: int, last: int) -> None:
        """Undo the cuts before pieces[first] to pieces[last] whose sides are held and agree in ref_cnt."""
        pieces = self.pieces
        for index in range(min(last, len(pieces) - 1), max(first, 1) - 1, -1):
            low, high = pieces[index - 1], pieces[index]
            if low.end == high.start and low.ref_cnt == high.ref_cnt > 0:
                low.end = high.end
                self._delete(index)

    def add(self, start: int, end: int) -> None:
        """Blocks [start, end), of which none is here, held once."""
        if self.pieces and self.pieces[-1].end == start and self.pieces[-1].ref_cnt == 1:
            self.pieces[-1].end = end
            return
        index = bisect_left(self.starts, start)
        self._insert(index, Piece(self, start, end, 1))
        self.join(index, index + 1)

    def remove(self, piece: Piece) -> None:
        """Forget a piece of this lane."""
        self._delete(bisect_right(self.starts, piece.start) - 1)

    def _insert(self, index: int, piece: Piece) -> None:
        self.starts.insert(index, piece.start)
        self.pieces.insert(index, piece)

    def _delete(self, index: int) -> None:
        del self.starts[index], self.pieces[index]


class Piece:
    """Blocks [start, end) of a lane that share one ref_cnt; at 0 they stand together in the free queue, end - 1 first.

    `prev` and `next` exist only while the piece is in the queue: what left it keeps nothing else alive.
    """

    __slots__ = ("end", "lane", "next", "prev", "ref_cnt", "start")
    prev: Piece
    next: Piece

    def __init__(self, lane: Lane, start: int, end: int, ref_cnt: int) -> None:
        self.lane = lane
        self.start = start
        self.end = end
        self.ref_cnt = ref_cnt

    def link_before(self, piece: Piece) -> None:
        """Stand right before a queued piece: evicted just ahead of it."""
        self.prev = piece.prev
        self.next = piece
        piece.prev.next = self
        piece.prev = self

    def unlink(self) -> None:
        """Leave the queue."""
        self.prev.next = self.next
        self.next.prev = self.prev
        del self.prev, self.next

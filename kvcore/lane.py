"""Cached blocks of one stream as pieces: a step function from block index to ref_cnt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kvcore.types import StreamId


class Lane:
    """At most one physical copy of each block of a stream, as disjoint pieces sorted by block index.

    Blocks that are held (ref_cnt > 0) form as few pieces as there can be: two that touch differ in ref_cnt, so their
    number is bounded by the spans now held, not by history. Free pieces are kept apart where the free queue does.
    """

    __slots__ = ("pieces", "starts", "stream")

    def __init__(self, stream: StreamId) -> None:
        self.stream = stream
        self.starts: list[int] = []
        self.pieces: list[Piece] = []

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any block of the non-empty [start, end) is here."""
        before_end = bisect_left(self.starts, end)
        return before_end > 0 and self.pieces[before_end - 1].end > start

    def reach(self, index: int, at: int, end: int) -> tuple[int, int]:
        """Where, before `end`, the blocks that follow `at` without gap stop, and how many of them are free.

        pieces[index] has block `at`.
        """
        num_free = 0
        while at < end and index < len(self.pieces):
            piece = self.pieces[index]
            if piece.start > at:
                break
            index += 1
            stop = min(piece.end, end)
            if not piece.ref_cnt:
                num_free += stop - at
            at = stop
        return at, num_free

    def cut(self, at: int) -> int:
        """Index of the first piece with start >= at, after splitting the piece that has blocks on both sides."""
        index = bisect_left(self.starts, at)
        if index and self.pieces[index - 1].end > at:
            low = self.pieces[index - 1]
            high = Piece(self, at, low.end, low.ref_cnt)
            low.end = at
            if not low.ref_cnt:
                high.link_before(low)
            self._insert(index, high)
        return index

    def join(self, index: int) -> None:
        """Make one of pieces[index - 1] and pieces[index] when both are held, touch and agree in ref_cnt."""
        if not 0 < index < len(self.pieces):
            return
        left, right = self.pieces[index - 1], self.pieces[index]
        if left.end == right.start and left.ref_cnt == right.ref_cnt > 0:
            left.end = right.end
            self._delete(index)

    def add(self, start: int, end: int) -> None:
        """Blocks [start, end), none of them here yet, held once."""
        index = bisect_left(self.starts, start)
        self._insert(index, Piece(self, start, end, 1))
        self.join(index + 1)
        self.join(index)

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

    `prev` and `next` mean something only while the piece is in the queue.
    """

    __slots__ = ("end", "lane", "next", "prev", "ref_cnt", "start")

    def __init__(self, lane: Lane, start: int, end: int, ref_cnt: int) -> None:
        self.lane = lane
        self.start = start
        self.end = end
        self.ref_cnt = ref_cnt
        self.prev: Piece = self
        self.next: Piece = self

    def link_before(self, piece: Piece) -> None:
        """Stand right before a queued piece: evicted just ahead of it."""
        self.prev = piece.prev
        self.next = piece
        piece.prev.next = self
        piece.prev = self

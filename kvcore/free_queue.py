"""The free blocks of a pool in eviction order."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.lane import Lane, Piece
from kvcore.types import StreamId


class FreeQueue:
    """Free blocks in eviction order: first those without identity, as a number, then the cached ones, in pieces.

        front                                                                     back
        [ num_anonymous ] [ piece: end-1, ..., start ] [ piece: end-1, ..., start ]

    A number is enough for the first kind because no cached block ever stands before an anonymous one: freed blocks
    without identity enter at the front, freed blocks with one at the back, and a block loses its identity only by
    leaving. Every method but iteration is O(1).
    """

    __slots__ = ("_end", "num_anonymous", "num_cached")

    def __init__(self, num_anonymous: int) -> None:
        self.num_anonymous = num_anonymous
        self.num_cached = 0
        self._end = Piece(Lane(StreamId(0)), 0, 0, 0)
        self._end.prev = self._end.next = self._end

    def __iter__(self) -> Iterator[Piece]:
        piece = self._end.next
        while piece is not self._end:
            yield piece
            piece = piece.next

    def first(self) -> Piece:
        """The piece whose blocks go first of the cached ones; there must be one."""
        assert self.num_cached > 0
        return self._end.next

    def append(self, piece: Piece) -> None:
        """Put a piece at the back."""
        piece.link_before(self._end)
        self.num_cached += piece.end - piece.start

    def remove(self, piece: Piece) -> None:
        """Take a piece out, wherever it stands."""
        piece.unlink()
        self.num_cached -= piece.end - piece.start

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
    leaving. Everything but iteration costs the pieces it uses up.
    """

    __slots__ = ("_end", "num_anonymous", "num_cached")

    def __init__(self, num_anonymous: int) -> None:
        self.num_anonymous = num_anonymous
        self.num_cached = 0
        self._end = Piece(Lane(0, StreamId(0)), 0, 0, 0)
        self._end.prev = self._end.next = self._end

    def __iter__(self) -> Iterator[Piece]:
        """The cached pieces, front to back."""
        piece = self._end.next
        while piece is not self._end:
            yield piece
            piece = piece.next

    def append(self, piece: Piece) -> None:
        """Put a piece at the back."""
        piece.link_before(self._end)
        self.num_cached += piece.end - piece.start

    def remove(self, piece: Piece) -> None:
        """Take a piece out, wherever it stands."""
        piece.unlink()
        self.num_cached -= piece.end - piece.start

    def pop_cached(self, n: int) -> list[Piece]:
        """Take n <= num_cached cached blocks from the front; the pieces used up, while the last one may only shrink."""
        used_up = []
        self.num_cached -= n
        while n:
            piece = self._end.next
            size = piece.end - piece.start
            if n < size:
                piece.end -= n
                break
            n -= size
            piece.unlink()
            used_up.append(piece)
        return used_up

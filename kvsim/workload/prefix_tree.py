"""Names prompts by streams: equal prefixes get equal names, whatever the ids they were recorded with."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.uint64]
"""Content ids of one prompt's granules, in order."""


class PrefixTree:
    """A tree of granules, each known by its parent and its id, with one stream per maximal run of first children.

    The first child of a granule continues its parent's stream, later children open a new one. A stream is kept as the
    ids of a whole path from the root to its end, so following a prompt compares arrays and works per stream, not per
    granule.
    """

    __slots__ = ("_branches", "_paths", "_root", "_streams")

    def __init__(self, streams: Iterator[int]) -> None:
        """`streams` gives fresh names; trees that share it share nothing but the supply of names."""
        self._streams = streams
        self._root = next(streams)
        self._paths: dict[int, Ids] = {self._root: np.empty(0, dtype=np.uint64)}
        self._branches: dict[tuple[int, int, int], int] = {}  # (stream left, at granule, with id) -> stream entered

    def follow(self, ids: Ids) -> list[tuple[int, int]]:
        """(stream, end granule) of each run of one stream in a prompt, which from now on is part of the tree."""
        runs: list[tuple[int, int]] = []
        stream, start = self._root, 0
        while True:
            path = self._paths[stream]
            end = start + common_prefix_len(path[start:], ids[start:])
            if end == len(path) < len(ids):
                self._paths[stream] = ids
                end = len(ids)
            if end > start:
                runs.append((stream, end))
            if end == len(ids):
                return runs
            stream, start = self._branch(stream, end, ids), end

    def _branch(self, stream: int, granule: int, ids: Ids) -> int:
        """The stream that leaves `stream` at this granule with the prompt's id, opened when nobody did before."""
        key = (stream, granule, int(ids[granule]))
        branch = self._branches.get(key)
        if branch is None:
            branch = self._branches[key] = next(self._streams)
            self._paths[branch] = ids
        return branch


def common_prefix_len(left: Ids, right: Ids) -> int:
    """How many leading elements are equal."""
    length = min(len(left), len(right))
    if not length:
        return 0
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length

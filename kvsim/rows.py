"""Rows of integers, added one by one and read as columns."""

from array import array

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument
from kvsim.clock import PS_PER_S


class TooLong(InvalidArgument):
    """A simulation that goes on for longer than can be written down."""

    def __init__(self, time_ps: int) -> None:
        super().__init__("simulated_s", time_ps // PS_PER_S, f"less than {2**63 // PS_PER_S}: 2**63 ps, 106 days")


class Rows:
    """A table with named columns of 64-bit integers, in the order in which rows were added."""

    _CHUNK = 1 << 14  # integers that wait to be packed: one by one that takes thrice as long

    def __init__(self, *names: str) -> None:
        self.names = names
        self._packed = array("q")
        self._new: list[int] = []

    def add(self, *row: int) -> None:
        """Append a row, one value for each name; raises TooLong, now or later, for a time that no column holds."""
        self._new += row
        if len(self._new) > self._CHUNK:
            self._pack()

    def __len__(self) -> int:
        return (len(self._packed) + len(self._new)) // len(self.names)

    def columns(self) -> dict[str, npt.NDArray[np.int64]]:
        """Name -> column, in order; a copy, so that the table may grow."""
        self._pack()
        table = np.array(self._packed, dtype=np.int64).reshape(-1, len(self.names))
        return {name: np.ascontiguousarray(column) for name, column in zip(self.names, table.T, strict=True)}

    def _pack(self) -> None:
        try:
            self._packed.fromlist(self._new)
        except OverflowError:
            raise TooLong(max(self._new)) from None
        self._new.clear()

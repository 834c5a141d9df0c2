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

    def __init__(self, *names: str) -> None:
        self.names = names
        self._values = array("q")

    def add(self, *row: int) -> None:
        """Append a row, one value for each name; raises TooLong for a time that no column holds."""
        try:
            self._values.extend(row)
        except OverflowError:
            raise TooLong(max(row)) from None

    def __len__(self) -> int:
        return len(self._values) // len(self.names)

    def columns(self) -> dict[str, npt.NDArray[np.int64]]:
        """Name -> column, in order; a copy, so that the table may grow."""
        table = np.array(self._values, dtype=np.int64).reshape(-1, len(self.names))
        return {name: np.ascontiguousarray(column) for name, column in zip(self.names, table.T, strict=True)}

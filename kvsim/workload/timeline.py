"""Times of rows that stand in order of time, counted from the first row's."""

from dataclasses import dataclass

from kvsim.workload.fields import MAX_SPAN_S, PS_PER_S, Row

MAX_TIME = 2**53
"""Bound up to which a number in JSON is an exact integer."""


@dataclass(slots=True)
class Timeline:
    """One column of times; each counts `unit_ps`."""

    field: str
    unit_ps: int
    first: Row | None = None
    last: Row | None = None
    first_time: int | float = 0
    last_time: int | float = 0

    def number_ps(self, row: Row) -> int:
        """`start_ps` of a row whose time is a number."""
        return self.start_ps(row, row.number(self.field, below=MAX_TIME))

    def start_ps(self, row: Row, time: int | float) -> int:
        """Picoseconds since the first row; raises TraceError for a time before the row before, or too far away."""
        if self.first is None or self.last is None:
            self.first = self.last = row
            self.first_time = self.last_time = time
        if time < self.last_time:
            raise row.error(self.field, f"at least the previous row's {self.last.values[self.field]}")
        start_ps = round((time - self.first_time) * self.unit_ps)
        if start_ps >= MAX_SPAN_S * PS_PER_S:
            first = self.first.values[self.field]
            raise row.error(self.field, f"less than {MAX_SPAN_S} s after the first row's {first}")
        self.last, self.last_time = row, time
        return start_ps

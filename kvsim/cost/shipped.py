"""The tables of step times in models/step_times."""

import csv
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice

from kvsim import catalog
from kvsim.clock import PS_PER_MS
from kvsim.cost.deployment import Deployment
from kvsim.cost.grid import Grid
from kvsim.cost.table import TableSteps


def shipped_table(name: str, wanted: Deployment) -> TableSteps:
    """The step times of that name; raises ValueError, with the fix, unless they were measured on what is wanted."""
    found = measured_on(name)
    wrong = found.differences(wanted)
    if wrong:
        raise ValueError(f"{found}, as table:{name} was measured on, instead of {wanted.shown(wrong)}{_fix(wanted)}")
    return TableSteps(read_grid(name, "prefill"), read_grid(name, "decode"), found.data_parallel_size)


def measured_on(name: str) -> Deployment:
    """What the table of that name is of."""
    measured = catalog.step_table(name).measured
    return Deployment(*(getattr(measured, field) for field in Deployment._fields))


def read_grid(name: str, phase: str) -> Grid:
    """A table's `prefill` or `decode`, in picoseconds."""
    points: dict[int, dict[int, int]] = {}
    for first, second, time_ps in rows(name, phase):
        points.setdefault(first, {})[second] = time_ps
    return Grid(points)


def rows(name: str, phase: str) -> Iterator[tuple[int, int, int]]:
    """The same, point by point: (new tokens, context, ps) or (requests of a rank, context of each, ps)."""
    for first, second, time_ms in islice(csv.reader(catalog.step_times(name, phase).splitlines()), 1, None):
        yield int(first), int(second), int(Decimal(time_ms) * PS_PER_MS)


def _fix(wanted: Deployment) -> str:
    """The tables that fit."""
    fitting = [f"table:{name}" for name in catalog.step_tables() if measured_on(name) == wanted]
    return f"; {' or '.join(fitting)} fits" if fitting else '; no table fits, engine.step_time = "roofline" does'

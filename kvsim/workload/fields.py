"""Strict reading of JSON objects: every value has exactly the type and range its format promises."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import orjson

from kvcore.errors import MAX_SHOWN_CHARACTERS, clipped, shown
from kvcore.units import NS_PER_S
from kvsim.workload.prefix_tree import Ids
from kvsim.workload.trace import TraceError

PS_PER_S = 1_000 * NS_PER_S
TIME_UNITS = {"s": PS_PER_S, "ms": PS_PER_S // 1_000, "us": PS_PER_S // 1_000_000}
"""What a number of a trace's times may count, in picoseconds."""
MAX_SPAN_S = 9_000_000
"""Longest recorded time span, 104 days: 63 bits of picoseconds hold 106."""
MAX_TOKENS = 2**32


def trace_error(where: str, field: str, found: str, expected: str) -> TraceError:
    """A TraceError of one line: place, field, value and what was expected."""
    return TraceError(f"{where}: {clipped(field)}, {clipped(found)}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object and where it stands (FILE:LINE, or FILE:request INDEX)."""

    where: str
    values: dict[str, object]

    def error(self, field: str, expected: str) -> TraceError:
        """What to raise when the field's value is not what was expected."""
        found = shown(self.values[field]) if field in self.values else "missing"
        return trace_error(self.where, field, found, expected)

    def tokens(self, field: str, at_least: int) -> int:
        """A number of tokens; a boolean or a float is none."""
        value = self.values.get(field)
        if type(value) is not int or not at_least <= value < MAX_TOKENS:
            raise self.error(field, f"an integer, {at_least} <= {field} < 2**32")
        return value

    def integer(self, field: str, below: int, at_least: int = 0) -> int:
        """An integer with at_least <= value < below; a boolean or a float is none."""
        value = self.values.get(field)
        if type(value) is not int or not at_least <= value < below:
            raise self.error(field, f"an integer, {at_least} <= {field} < {below}")
        return value

    def number(self, field: str, below: int) -> int | float:
        """A number with 0 <= number < below; a boolean is none."""
        value = self.values.get(field)
        if (type(value) is int or type(value) is float) and 0 <= value < below:
            return value
        raise self.error(field, f"a number, 0 <= {field} < {below}")

    def only(self, fields: Collection[str]) -> None:
        """Check that nothing else is there."""
        for field in self.values:
            if field not in fields:
                raise self.error(field, f"only the fields {', '.join(fields)}")

    def once(self, text: bytes) -> None:
        """Check that `text`, which this object was read from, has each field once.

        No field may hold an object or a list of texts: what is quoted are the names and the values that are texts.
        """
        texts = [value for value in self.values.values() if type(value) is str]
        if text.count(b'"') != 2 * (len(self.values) + len(texts)) + sum(value.count('"') for value in texts):
            raise trace_error(self.where, "JSON", "a field twice", "each field once")

    def text(self, field: str) -> str:
        """A string."""
        value = self.values.get(field)
        if type(value) is not str:
            raise self.error(field, "a text")
        return value

    def choice(self, field: str, choices: tuple[object, ...]) -> None:
        """Check that the value is one of `choices`."""
        value = self.values.get(field)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise self.error(field, " or ".join(repr(choice) for choice in choices))

    def rows(self, field: str, place: str) -> "list[Row]":
        """A list of objects; `place` and the index say where each stands."""
        values = self.values.get(field)
        if type(values) is not list:
            raise self.error(field, "a list of objects")
        return [as_row(f"{place}{index}", value) for index, value in enumerate(values)]

    def ids(self, field: str, count: int, rule: str) -> Ids:
        """Exactly `count` unsigned integers of 64 bits, kept exactly; `rule` says why so many."""
        ids = self.values.get(field)
        if type(ids) is not list:
            raise self.error(field, "a list of integers")
        if len(ids) != count:
            raise trace_error(self.where, field, f"{len(ids)} ids", f"{count} ids ({rule})")
        if set(map(type, ids)) <= {int}:
            try:
                return np.array(ids, dtype=np.uint64)
            except OverflowError:
                pass
        index = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value < 2**64)
        raise trace_error(self.where, f"{field}[{index}]", shown(ids[index]), "an integer, 0 <= id < 2**64")


def parse_row(where: str, text: bytes) -> Row:
    """The JSON object that `text` holds."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        found = repr(text[:MAX_SHOWN_CHARACTERS])
        raise trace_error(where, "JSON", found, f"one JSON object ({error.msg})") from None
    return as_row(where, value)


def as_row(where: str, value: object) -> Row:
    """`value` as a Row, when it is a JSON object."""
    if type(value) is not dict:
        raise trace_error(where, "JSON", shown(value), "a JSON object")
    return Row(where, value)


def seconds_to_ps(seconds: float) -> int:
    """Nearest picosecond."""
    return round(seconds * PS_PER_S)

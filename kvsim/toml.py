"""Strict TOML: a frozen pydantic object out of a file, or one line that says what is wrong and how to mend it."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from itertools import filterfalse
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from kvcore.errors import InvalidArgument, clipped, shown


class Table(BaseModel):
    """A TOML table: immutable, no key that is not declared, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def whole(value: object) -> object:
    """An int for a float without a fraction, as TOML writes 256e9; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(whole), Field(ge=0)]
"""An integer >= 0; TOML's 256e9 counts as one."""

PositiveCount = Annotated[int, BeforeValidator(whole), Field(gt=0)]
"""An integer > 0; TOML's 256e9 counts as one."""

Ratio = Annotated[float, Field(ge=0, le=1)]
PositiveRatio = Annotated[float, Field(gt=0, le=1)]

TAG_MARK = "<"
"""First character of a union's tags, by which they are told from keys in an error's location."""

KIND_KEYS = ("generator", "kind")
"""The keys that say which kind of a section it is."""

TableT = TypeVar("TableT", bound=Table)


class InvalidToml(InvalidArgument):
    """A key of a file outside its bound; the message is one line, `ORIGIN: section.key = value: expected ...`."""

    def __init__(self, origin: str, key: str, value: object, expected: str) -> None:
        super().__init__(key, value, expected)
        self.origin = origin
        key = clipped(key)
        found = f"{key}: " if key and value is None else f"{key} = {shown(value)}: " if key else ""
        self.args = (f"{origin}: {found}expected {expected}",)


def load(table: type[TableT], path: Traversable) -> TableT:
    """The file as a `table`; raises InvalidToml."""
    return validate(table, read(path), str(path))


def read(path: Traversable) -> dict[str, Any]:
    """The tables of the file; raises InvalidToml when it is not there or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidToml(str(path), "", None, f"a readable file ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidToml(str(path), "", None, f"TOML ({error})") from None


def validate(table: type[TableT], data: Mapping[str, Any], origin: str) -> TableT:
    """`data` as a `table`; raises InvalidToml for the first thing wrong with it."""
    try:
        return table.model_validate(data)
    except ValidationError as error:
        raise _first_error(table, data, origin, error) from None


def one_of(known: Sequence[str]) -> AfterValidator:
    """Marks a text that is one of the known ones."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(hint(name, known))
        return name

    return AfterValidator(check)


def hint(name: str, known: Sequence[str]) -> str:
    """What was expected instead of a name that is not known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"a known name; did you mean {near[0]}?" if near else f"one of {', '.join(known)}"


def _first_error(table: type[Table], data: Mapping[str, Any], origin: str, error: ValidationError) -> InvalidToml:
    first = min(error.errors(include_url=False), key=_precedence)
    loc = [str(part) for part in first["loc"] if not str(part).startswith(TAG_MARK)]
    value = None if first["type"] == "missing" or not loc else first["input"]
    return InvalidToml(origin, ".".join(loc), value, _expected(table, first, loc))


def _precedence(error: ErrorDetails) -> tuple[bool, bool]:
    """A wrong kind explains an unknown key, and that (a typo) a missing one."""
    is_kind = bool(error["loc"]) and error["loc"][-1] in KIND_KEYS
    return not is_kind, error["type"] != "extra_forbidden"


def _expected(table: type[Table], error: ErrorDetails, loc: list[str]) -> str:
    if error["type"] == "extra_forbidden":
        return _known_keys(_tables_at(table, loc[:-1]), loc[-1])
    if error["type"] == "missing":
        return "a value; this key is required"
    return error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _known_keys(tables: list[type[Table]], key: str) -> str:
    known = sorted({name for table in tables for name in table.model_fields})
    if key in known:
        return "no such key beside the others: it belongs to another kind of this section"
    surely = difflib.get_close_matches(key, known, n=1, cutoff=0.9)
    near = surely or difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    if near:
        return f"a known key; did you mean {' or '.join(near)}?"
    return f"a known key, one of: {', '.join(known)}"


def _tables_at(table: type[Table], path: list[str]) -> list[type[Table]]:
    """The tables that may stand at `path` below `table`; several where a key is a union."""
    tables = [table]
    for key in filterfalse(str.isdigit, path):  # places in a list
        fields = [owner.model_fields[key] for owner in tables if key in owner.model_fields]
        tables = [member for field in fields for member in _tables_in(field.annotation)]
    return tables


def _tables_in(annotation: object) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]

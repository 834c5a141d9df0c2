"""Every number under models/ says where it comes from and when it was read."""

import datetime
import tomllib
from typing import Any

import pytest

from tests.support import PROJECT

FILES = sorted((PROJECT / "models").rglob("*.toml"))


def unsourced(table: dict[str, Any], path: str = "") -> list[str]:
    """Tables that hold a number, directly or in a list, without their own `source` and `date`."""
    values = [value for value in table.values() if not isinstance(value, dict)]
    found = []
    if any(holds_number(value) for value in values):
        source, date = table.get("source"), table.get("date")
        if not (isinstance(source, str) and source.strip() and isinstance(date, datetime.date)):
            found.append(path or "(top)")
    for name, value in table.items():
        inner = [value] if isinstance(value, dict) else value if isinstance(value, list) else []
        for item in inner:
            if isinstance(item, dict):
                found.extend(unsourced(item, f"{path}.{name}".lstrip(".")))
    return found


def holds_number(value: object) -> bool:
    if isinstance(value, list):
        return any(holds_number(item) for item in value if not isinstance(item, dict))
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_numbers_have_a_source_and_a_date(file):
    assert unsourced(tomllib.loads(file.read_text(encoding="utf-8"))) == []


def test_there_are_models():
    assert {path.parent.name for path in FILES} == {"llm", "devices", "step_times"}


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "[a]\nx = 1\nsource = 'a datasheet'",
        "[a]\nx = 1\ndate = 2026-01-01",
        "[a]\nx = 1\nsource = ' '\ndate = 2026-01-01",
        "source = 'a'\ndate = 2026-01-01\n[a]\nx = [1.5]",
    ],
)
def test_a_number_without_them_is_rejected(text):
    assert len(unsourced(tomllib.loads(text))) == 1

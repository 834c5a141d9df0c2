"""CSV files with a header, read as strictly as JSON: a line is a `Row`."""

import csv
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from kvcore.errors import shown
from kvsim.workload import files
from kvsim.workload.fields import Row, trace_error

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?")
"""As JSON writes one, without an exponent."""


def rows(path: Path, headers: Collection[tuple[str, ...]], numbers: Collection[str]) -> Iterator[Row]:
    """The lines after the header, which is one of `headers`; what reads like a number in a column of `numbers` is one.

    Raises TraceError for another header, a line with more cells or fewer, or a file without lines.
    """
    header: tuple[str, ...] = ()
    number = 0
    for number, line in files.lines(path):
        where = f"{path}:{number}"
        cells = _cells(where, line)
        if not header:
            header = _header(where, cells, headers)
            continue
        if len(cells) != len(header):
            raise trace_error(where, "row", shown(",".join(cells)), f"{len(header)} cells: {','.join(header)}")
        values = zip(header, cells, strict=True)
        yield Row(where, {name: _number(cell) if name in numbers else cell for name, cell in values})
    if number < 2:
        raise trace_error(f"{path}:1", "file", "no rows", f"a header ({_choices(headers)}) and a request a line")


def _header(where: str, cells: list[str], headers: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    if tuple(cells) not in headers:
        raise trace_error(where, "header", shown(",".join(cells)), _choices(headers))
    return tuple(cells)


def _choices(headers: Collection[tuple[str, ...]]) -> str:
    return " or ".join(",".join(header) for header in headers)


def _cells(where: str, line: bytes) -> list[str]:
    try:
        return next(csv.reader((line.decode().rstrip("\r\n"),), strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
        raise trace_error(where, "CSV", shown(line), f"one row in UTF-8 ({reason})") from None


def _number(cell: str) -> int | float | str:
    match = NUMBER.fullmatch(cell)
    if match is None:
        return cell
    return float(cell) if match[1] else int(cell)

"""Bytes of a trace's file, plain or gzip by content; a file that cannot be read is a TraceError of one line."""

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from kvsim.workload.fields import trace_error
from kvsim.workload.trace import TraceError

GZIP_MAGIC = b"\x1f\x8b"
HEAD_BYTES = 65_536
"""Room for every name of a Mooncake row whose prompt comes first and has thousands of ids."""

# What an unreadable file or a broken gzip stream raises; BadGzipFile is an OSError.
UNREADABLE = (OSError, EOFError, zlib.error)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of each line, read as they are asked for."""
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line
    except UNREADABLE as error:
        raise unreadable(f"{path}:{number + 1}", error) from None


def content(path: Path) -> bytes:
    """The whole file."""
    try:
        with _open(path) as stream:
            return stream.read()
    except UNREADABLE as error:
        raise unreadable(f"{path}:1", error) from None


def head(path: Path) -> bytes:
    """The first HEAD_BYTES."""
    try:
        with _open(path) as stream:
            return stream.read(HEAD_BYTES)
    except UNREADABLE as error:
        raise unreadable(f"{path}:1", error) from None


def unreadable(where: str, error: Exception) -> TraceError:
    """The one line for a file that cannot be read up to its end."""
    expected = "a file that can be read" if isinstance(error, OSError) and error.errno else "a complete gzip stream"
    reason = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).replace("\n", " ")
    return trace_error(where, "file", reason, expected)


def is_stream(path: Path) -> bool:
    """Whether what is read from it is gone: a pipe, a terminal."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed when it starts like a gzip stream; opened once, for the sake of pipes."""
    with path.open("rb") as raw:
        if not raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
            yield raw
            return
        with gzip.open(raw, "rb") as decompressed:
            yield cast(BinaryIO, decompressed)

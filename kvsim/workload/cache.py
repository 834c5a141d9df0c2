"""Parsed traces on disk: one uncompressed npz file per source, replaced when the source changes.

A cache can only cost time: an entry that is damaged, stale or cannot be written is as good as none.
"""

import hashlib
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.workload.trace import COLUMN_NAMES, Trace

# Nowhere to write (RuntimeError: no home folder), and what a damaged entry raises on its way to a Trace.
UNWRITABLE = (OSError, RuntimeError)
UNUSABLE = (*UNWRITABLE, EOFError, ValueError, KeyError, IndexError, AssertionError, zipfile.BadZipFile)


def fingerprint(path: Path, sources: Iterable[Path], reader: str) -> str:
    """Changes when `reader` (format and version), the path, or a source file's name, size or a time of change does.

    Of the two times the one of the content can be set, as `cp -p` does; the one of the inode cannot.
    """
    parts = [reader, str(path.absolute())]
    for source in sources:
        status = source.stat()
        parts.append(f"{source.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    return "\n".join(parts)


def load(path: Path, expected: str) -> Trace | None:
    """The trace stored for `path` under the expected fingerprint, or None."""
    try:
        with _entry(path).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if str(stored["fingerprint"]) != expected:
                return None
            columns = [stored[name] for name in COLUMN_NAMES]
            return Trace(str(stored["name"]), str(stored["format"]), int(stored["granule_len"]), *columns)
    except UNUSABLE:
        return None


def store(path: Path, current: str, trace: Trace) -> None:
    """Keep `trace` for `path` under the current fingerprint; the entry appears whole or not at all."""
    about: dict[str, Any] = {
        "fingerprint": current,
        "name": trace.name,
        "format": trace.format,
        "granule_len": trace.granule_len,
    }
    columns = {name: getattr(trace, name) for name in COLUMN_NAMES}
    try:
        entry = _entry(path)
        entry.parent.mkdir(parents=True, exist_ok=True)
        _write(entry, about | columns)
    except UNWRITABLE:
        return


def _write(entry: Path, arrays: dict[str, Any]) -> None:
    part = entry.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            np.savez(stream, **arrays)
        part.replace(entry)
    finally:
        part.unlink(missing_ok=True)


def _entry(path: Path) -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"  # a relative one is to be ignored
    name = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
    return root / "kvtwin" / f"{name}.npz"

"""From a path to a `Trace`: in which format it is, and whether it was parsed before."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import InvalidArgument
from kvsim.workload import cache, claude_code, decision_log, files, mooncake
from kvsim.workload.fields import trace_error
from kvsim.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Format:
    """A recorded format."""

    read: Callable[[Path], Trace]
    version: int
    """Counts changes of what `read` makes of the same file."""
    fields: frozenset[str]
    """Names that only a file of this format has at its beginning."""


FORMATS = {
    "mooncake": Format(mooncake.read, mooncake.VERSION, mooncake.SIGN),
    "claude-code": Format(claude_code.read, claude_code.VERSION, claude_code.SIGN),
    "decision-log": Format(decision_log.read, decision_log.VERSION, decision_log.SIGN),
}


def load_trace(path: str | Path, fmt: str | None = None, *, use_cache: bool = True) -> Trace:
    """The trace at `path`, a file or a folder of sessions, in format `fmt` or in the one its content shows.

    Raises TraceError (one line) for content that breaks its format, InvalidArgument for a format that does not exist.
    """
    if fmt is not None and fmt not in FORMATS:
        raise InvalidArgument("format", fmt, " or ".join(FORMATS))
    path = Path(path)
    if files.is_stream(path):
        return _from_stream(path, fmt)
    name = fmt or sniff(path)
    if not use_cache:
        return FORMATS[name].read(path)
    try:
        current = cache.fingerprint(path, claude_code.session_files(path), f"{name} {FORMATS[name].version}")
    except OSError as error:
        raise files.unreadable(f"{path}:1", error) from None
    trace = cache.load(path, current)
    if trace is None:
        trace = FORMATS[name].read(path)
        cache.store(path, current, trace)
    return trace


def _from_stream(path: Path, fmt: str | None) -> Trace:
    """What can be read but once is neither looked at before nor known again."""
    if fmt is None:
        raise trace_error(f"{path}:1", "format", "not given", f"one of {', '.join(FORMATS)}: a pipe is read only once")
    return FORMATS[fmt].read(path)


def sniff(path: Path) -> str:
    """The format whose fields the beginning of a file names, or of the first file of a folder."""
    first = claude_code.session_files(path)[0]
    names = set(re.findall(r'"(\w+)"\s*:', files.head(first).decode(errors="replace")))
    found = [name for name, known in FORMATS.items() if known.fields & names]
    if len(found) == 1:
        return found[0]
    shown = f"fields {', '.join(sorted(names)[:4])}" if names else "no JSON fields"
    raise trace_error(f"{first}:1", "format", shown, f"one of {', '.join(FORMATS)}")

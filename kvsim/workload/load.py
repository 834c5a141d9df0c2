"""From a path to a `Trace`: in which format it is, and whether it was parsed before."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import InvalidArgument, require
from kvsim.workload import (
    azure,
    bailian,
    burstgpt,
    cache,
    claude_code,
    decision_log,
    files,
    kvcache_ai,
    mooncake,
    multi_turn,
    native,
)
from kvsim.workload.fields import TIME_UNITS, trace_error
from kvsim.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Format:
    """A recorded format."""

    read: Callable[[Path], Trace]
    version: int
    """Counts changes of what `read` makes of the same file."""
    fields: frozenset[str]
    """Names, each of which tells the format at the beginning of a file."""
    shared: frozenset[str] = frozenset()
    """Names that tell other formats and that this one has as well."""
    read_in: Callable[[Path, int], Trace] | None = None
    """`read` with times that count so many picoseconds; None where a file itself says what they count."""


FORMATS = {
    "mooncake": Format(mooncake.read, mooncake.VERSION, mooncake.SIGN, read_in=mooncake.read),
    "claude-code": Format(claude_code.read, claude_code.VERSION, claude_code.SIGN, read_in=claude_code.read),
    "decision-log": Format(decision_log.read, decision_log.VERSION, decision_log.SIGN),
    "azure": Format(azure.read, azure.VERSION, azure.SIGN),
    "burstgpt": Format(burstgpt.read, burstgpt.VERSION, burstgpt.SIGN, read_in=burstgpt.read),
    "bailian": Format(bailian.read, bailian.VERSION, bailian.SIGN, mooncake.SIGN, bailian.read),
    "kvcache-ai": Format(kvcache_ai.read, kvcache_ai.VERSION, kvcache_ai.SIGN, mooncake.SIGN, kvcache_ai.read),
    "multi-turn": Format(multi_turn.read, multi_turn.VERSION, multi_turn.SIGN),
    "kvtwin": Format(native.read, native.VERSION, native.SIGN),
}


def load_trace(
    path: str | Path, fmt: str | None = None, *, time_unit: str | None = None, use_cache: bool = True
) -> Trace:
    """The trace at `path`, a file or a folder of sessions, in format `fmt` or in the one its content shows.

    `time_unit`, a key of TIME_UNITS, is what its times count instead of the format's own unit. Raises TraceError (one
    line) for content that breaks its format, InvalidArgument for a format or a unit that does not exist, and for a unit
    of times that name their own.
    """
    if fmt is not None and fmt not in FORMATS:
        raise InvalidArgument("format", fmt, " or ".join(FORMATS))
    path = Path(path)
    if files.is_stream(path):
        return _from_stream(path, fmt, time_unit)
    name = fmt or sniff(path)
    read = _reader(name, time_unit)
    if not use_cache:
        return read(path)
    reader = f"{name} {FORMATS[name].version} {time_unit}"
    try:
        current = cache.fingerprint(path, claude_code.session_files(path), reader)
    except OSError as error:
        raise files.unreadable(f"{path}:1", error) from None
    trace = cache.load(path, current)
    if trace is None:
        trace = read(path)
        cache.store(path, current, trace)
    return trace


def _from_stream(path: Path, fmt: str | None, time_unit: str | None) -> Trace:
    """What can be read but once is neither looked at before nor known again."""
    if fmt is None:
        raise trace_error(f"{path}:1", "format", "not given", f"one of {', '.join(FORMATS)}: a pipe is read only once")
    return _reader(fmt, time_unit)(path)


def _reader(name: str, time_unit: str | None) -> Callable[[Path], Trace]:
    read_in = FORMATS[name].read_in
    if time_unit is None:
        return FORMATS[name].read
    require(time_unit in TIME_UNITS, "time_unit", time_unit, " or ".join(TIME_UNITS))
    if read_in is None:
        raise InvalidArgument("time_unit", time_unit, f"none for {name}, whose times are no numbers of an open unit")
    unit_ps = TIME_UNITS[time_unit]
    return lambda path: read_in(path, unit_ps)


def sniff(path: Path) -> str:
    """The format whose fields the beginning of a file names, or of the first file of a folder."""
    first = claude_code.session_files(path)[0]
    names = _names(files.head(first).decode(errors="replace"))
    signs = {sign for known in FORMATS.values() for sign in known.fields & names}
    found = [name for name, known in FORMATS.items() if known.fields & names and signs <= known.fields | known.shared]
    if len(found) == 1:
        return found[0]
    shown = f"fields {', '.join(sorted(names)[:4])}" if names else "no JSON fields"
    raise trace_error(f"{first}:1", "format", shown, f"one of {', '.join(FORMATS)}")


def _names(head: str) -> set[str]:
    """Names of JSON fields, or else of columns."""
    line = head.partition("\n")[0]
    return set(re.findall(r'"(\w+)"\s*:', head)) or (set(line.strip().split(",")) if "," in line else set())

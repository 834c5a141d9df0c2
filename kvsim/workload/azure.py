"""Azure's LLM inference traces: a CSV file, open loop, lengths only.

`TIMESTAMP` (UTC, to 100 ns, never decreasing), `ContextTokens`, `GeneratedTokens`. Those of 2024 have +00:00 after the
time. Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023 and 2024 (CC-BY-4.0).

A row is a session of its own and starts at its timestamp, counted from the first row's. The trace says nothing of
content: every prompt is its own, and no cache hits any of it.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

from kvsim.workload import table
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import PS_PER_S, Row
from kvsim.workload.timeline import Timeline
from kvsim.workload.trace import Trace

FORMAT = "azure"
VERSION = 1
"""Counts changes of what `read` makes of the same file; cached traces of another version are read again."""

GRANULE_LEN = 16
"""The source has no ids; this is vLLM's default block."""
HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SIGN = frozenset(HEADER)
"""Names that only this format has at the beginning of a file."""
TIMESTAMP = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,12}))?(?:\+00:00)?")


def read(path: Path) -> Trace:
    """The trace in `path` (CSV, plain or gzip); raises TraceError at the first row that breaks the format."""
    builder = TraceBuilder()
    timeline = Timeline("TIMESTAMP", unit_ps=1)
    for row in table.rows(path, (HEADER,), HEADER[1:]):
        stream = len(builder)
        builder.start(timeline.start_ps(row, _time_ps(row)), after=None, delay_ps=0, session=stream)
        input_len = row.tokens("ContextTokens", at_least=1)
        output_len = row.tokens("GeneratedTokens", at_least=0)
        builder.hold(input_len, output_len, [(stream, input_len)], stream, num_granules=input_len // GRANULE_LEN)
    return builder.build(path.name, FORMAT, GRANULE_LEN)


def _time_ps(row: Row) -> int:
    """Picoseconds since 1970."""
    match = TIMESTAMP.fullmatch(str(row.values["TIMESTAMP"]))
    try:
        if match is not None:
            second = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
            return int(second.timestamp()) * PS_PER_S + int((match[2] or "").ljust(12, "0"))
    except ValueError:  # no such day, no such hour
        pass
    raise row.error("TIMESTAMP", "a time as in 2023-11-16 18:17:03.9799600, in UTC")

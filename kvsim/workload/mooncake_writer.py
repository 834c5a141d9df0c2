"""A trace in Mooncake's format (see `kvsim.workload.mooncake`), and what that format cannot say of it.

A request starts at its recorded start, in ms: an integer where it is one. An id names 512 tokens of a prompt, or what
is left of it, and everything before them: two prompts have an id in common exactly when they have all its tokens in
common. Not in the format: who waits for whom (closed loop), sessions, content in pieces other than 512 tokens, and what
a request generates, so that a prompt which holds an earlier answer does not share it with that answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import orjson

from kvsim.workload.fields import TIME_UNITS
from kvsim.workload.mooncake import GRANULE_LEN
from kvsim.workload.stats import stats
from kvsim.workload.trace import Trace

PS_PER_MS = TIME_UNITS["ms"]


@dataclass(slots=True)
class MooncakeRows:
    """The rows of a trace; iterate once, then ask for `losses`."""

    trace: Trace
    id_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """By the stream of the last token and its end: whoever has that token has all before it."""
    seen_tokens: int = 0

    def __iter__(self) -> Iterator[bytes]:
        """One line for each request, in the trace's order."""
        trace = self.trace
        segments = zip(trace.segment_stream.tolist(), trace.segment_end.tolist(), strict=True)
        columns = (trace.arrival_ps, trace.input_len, trace.output_len, np.diff(trace.segment_offset))
        for start_ps, input_len, output_len, count in zip(*(column.tolist() for column in columns), strict=True):
            row = {
                "timestamp": _milliseconds(start_ps),
                "input_length": input_len,
                "output_length": output_len,
                "hash_ids": self._ids(list(islice(segments, count))),
            }
            yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)

    def losses(self) -> list[str]:
        """A sentence for each thing that the rows do not say."""
        trace = self.trace
        waiting = int((trace.after != np.arange(trace.num_requests)).sum())
        together = int((np.bincount(trace.session) > 1).sum())
        ideal, written = stats(trace)["ideal_hit_rate"], self.seen_tokens / int(trace.input_len.sum())
        said = {
            f"{waiting} requests wait for another one's end: they start at their recorded start instead": waiting,
            f"{together} sessions of several requests: every request is a session of its own": together,
            f"reuse: the ideal hit rate is {ideal:.6f} and becomes {written:.6f}, as content is named by "
            f"{GRANULE_LEN} tokens of prompts, and answers are not named": ideal != written,
        }
        return [sentence for sentence, applies in said.items() if applies]

    def _ids(self, segments: list[tuple[int, int]]) -> list[int]:
        found = []
        start = 0
        for name in _granules(segments):
            number = len(self.id_of)
            found.append(self.id_of.setdefault(name, number))
            if found[-1] != number:
                self.seen_tokens += name[1] - start
            start = name[1]
        return found


def _granules(segments: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(stream of the last token, end token) of each granule of a prompt."""
    end = GRANULE_LEN
    for stream, segment_end in segments:
        while end <= segment_end:
            yield stream, end
            end += GRANULE_LEN
    stream, input_len = segments[-1]
    if input_len % GRANULE_LEN:
        yield stream, input_len


def _milliseconds(time_ps: int) -> int | float:
    return time_ps / PS_PER_MS if time_ps % PS_PER_MS else time_ps // PS_PER_MS

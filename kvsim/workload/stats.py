"""What a trace holds, in numbers; a pure function of it."""

from itertools import islice

import numpy as np

from kvsim.workload.fields import PS_PER_S
from kvsim.workload.trace import Column, Trace

PERCENTILES = (50, 90, 99)


def stats(trace: Trace) -> dict[str, object]:
    """Counts, lengths in tokens, and reuse.

    `ideal_hit_rate` is the share of prompt tokens that an earlier request's prompt or output already held, requests
    taken in the trace's order: what prefix caching reaches with unlimited memory. `unique_input_tokens` are the others.
    """
    total_input = int(trace.input_len.sum())
    seen_input = _seen_tokens(trace)
    return {
        "name": trace.name,
        "format": trace.format,
        "granule_tokens": trace.granule_len,
        "requests": trace.num_requests,
        "sessions": trace.num_sessions,
        "closed_loop_requests": int((trace.after != np.arange(trace.num_requests)).sum()),
        "last_arrival_s": int(trace.arrival_ps[-1]) / PS_PER_S,
        "total_input_tokens": total_input,
        "total_output_tokens": int(trace.output_len.sum()),
        "unique_input_tokens": total_input - seen_input,
        "ideal_hit_rate": seen_input / total_input,
        "input_tokens": _summary(trace.input_len),
        "output_tokens": _summary(trace.output_len),
        "turns_per_session": _summary(np.bincount(trace.session)),
    }


def _seen_tokens(trace: Trace) -> int:
    """Prompt tokens that are not the first of their kind: of each stream, those below the highest token held so far."""
    held: dict[int, int] = {}
    seen = 0
    columns = (trace.segment_stream, trace.segment_starts(), trace.segment_end)
    segments = zip(*(column.tolist() for column in columns), strict=True)
    total_len = (trace.input_len + trace.output_len).tolist()
    counts = np.diff(trace.segment_offset).tolist()
    for count, output_stream, end_len in zip(counts, trace.output_stream.tolist(), total_len, strict=True):
        for stream, start, end in islice(segments, count):
            known = held.get(stream, 0)
            seen += max(0, min(end, known) - start)
            held[stream] = max(end, known)
        held[output_stream] = max(end_len, held.get(output_stream, 0))
    return seen


def _summary(values: Column) -> dict[str, float]:
    marks = np.percentile(values, PERCENTILES)
    named = {f"p{mark}": float(value) for mark, value in zip(PERCENTILES, marks, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}

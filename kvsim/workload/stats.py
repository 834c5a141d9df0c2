"""What a trace holds, in numbers; a pure function of it."""

from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim.workload.fields import PS_PER_S
from kvsim.workload.trace import Column, Trace

PERCENTILES = (50, 90, 99)

Values: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def stats(trace: Trace) -> dict[str, object]:
    """Counts, lengths in tokens, and reuse.

    `ideal_hit_rate` is the share of prompt tokens that an earlier request's prompt or output already held, requests
    taken in the trace's order: what prefix caching reaches with unlimited memory. `unique_input_tokens` are the others.
    `reported_hit_rate` is the share that the provider reported as cached, None where the trace has no report.

    `per_session` adds up each session's calls. What is cached there is what the provider reported, and without a report
    what is ideal; computed is the rest of the input. First and last context are the prompts of a session's first and
    last call in the trace's order. `call_delay_s` is from a call's recorded start to that of the session's next one.
    """
    total_input = int(trace.input_len.sum())
    seen_len = _seen_len(trace)
    seen_input = int(seen_len.sum())
    has_report = len(trace.reported_cached_len) > 0
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
        "reported_hit_rate": int(trace.reported_cached_len.sum()) / total_input if has_report else None,
        "input_tokens": _spread(trace.input_len),
        "output_tokens": _spread(trace.output_len),
        "turns_per_session": _spread(np.bincount(trace.session)),
        "per_session": _per_session(trace, trace.reported_cached_len if has_report else seen_len),
        "call_delay_s": _summary(_call_delays_s(trace)),
    }


def _per_session(trace: Trace, cached_len: Column) -> dict[str, object]:
    _, calls = np.unique(trace.session, return_counts=True)
    in_order = np.argsort(trace.session, kind="stable")
    ends = np.cumsum(calls)
    contexts = trace.input_len[in_order]

    def sums(lens: Column) -> Column:
        return np.add.reduceat(lens[in_order], ends - calls)

    columns = {
        "calls": calls,
        "input_tokens": sums(trace.input_len),
        "cached_tokens": sums(cached_len),
        "computed_tokens": sums(trace.input_len - cached_len),
        "output_tokens": sums(trace.output_len),
        "first_context": contexts[ends - calls],
        "last_context": contexts[ends - 1],
    }
    return {name: _summary(column) for name, column in columns.items()}


def _call_delays_s(trace: Trace) -> npt.NDArray[np.float64]:
    in_order = np.argsort(trace.session, kind="stable")
    gaps_ps = np.diff(trace.arrival_ps[in_order])
    within: npt.NDArray[np.int64] = gaps_ps[np.diff(trace.session[in_order]) == 0]
    return within / PS_PER_S


def _seen_len(trace: Trace) -> Column:
    """Per prompt, the tokens that are not the first of their kind: of each stream, those below the highest one held."""
    held: dict[int, int] = {}
    seen_len: list[int] = []
    columns = (trace.segment_stream, trace.segment_starts(), trace.segment_end)
    segments = zip(*(column.tolist() for column in columns), strict=True)
    total_len = (trace.input_len + trace.output_len).tolist()
    counts = np.diff(trace.segment_offset).tolist()
    for count, output_stream, end_len in zip(counts, trace.output_stream.tolist(), total_len, strict=True):
        seen = 0
        for stream, start, end in islice(segments, count):
            known = held.get(stream, 0)
            seen += max(0, min(end, known) - start)
            held[stream] = max(end, known)
        held[output_stream] = max(end_len, held.get(output_stream, 0))
        seen_len.append(seen)
    return np.array(seen_len, dtype=np.int64)


def _summary(values: Values) -> dict[str, float | None]:
    """Mean and percentiles, None where there are no values."""
    names = ("mean", *(f"p{mark}" for mark in PERCENTILES))
    if not len(values):
        return dict.fromkeys(names)
    return dict(zip(names, (float(values.mean()), *np.percentile(values, PERCENTILES).tolist()), strict=True))


def _spread(values: Values) -> dict[str, float | None]:
    return {**_summary(values), "max": float(values.max())}

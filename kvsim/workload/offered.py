"""A trace as a mode offers it (`kvsim.config.mode`): the same requests, other starts, successors and answers.

Sessions keep their rows together: a session is moved as a whole, and what is inside keeps its distances. What depends
on the run itself (who waits for a slot or an answer, when the run ends) is left to `kvsim.arrivals`.
"""

from dataclasses import replace

import numpy as np

from kvcore.errors import InvalidArgument, require
from kvsim.config.mode import Mode
from kvsim.workload.agentic import random_stream
from kvsim.workload.builder import restarted
from kvsim.workload.fields import MAX_SPAN_S, PS_PER_S, seconds_to_ps
from kvsim.workload.starts import drawn_s, rate_of
from kvsim.workload.trace import Column, Trace


def offered(trace: Trace, mode: Mode, seed: int = 0) -> Trace:
    """The trace in this mode; the same object where the mode changes nothing.

    Raises InvalidArgument for a mode that makes no sense with this trace.
    """
    _check(trace, mode)
    return _answered(_started(_followed(_scaled(trace, mode), mode), mode, seed), mode)


def _check(trace: Trace, mode: Mode) -> None:
    """What a mode asks of a trace."""
    has_sessions = trace.num_sessions < trace.num_requests
    fix = "recorded, in a trace whose sessions all have one request"
    require(has_sessions or mode.pacing == "recorded", "workload.pacing", mode.pacing, fix)
    sessions = mode.stop_after_sessions
    fix = "stop_after_requests, in a trace whose sessions all have one request"
    require(has_sessions or sessions is None, "workload.stop_after_sessions", sessions, fix)
    is_moved = (mode.starts, mode.pacing, mode.max_sessions) != ("recorded", "recorded", None)
    crossing = np.flatnonzero(trace.session[trace.after] != trace.session)
    if is_moved and len(crossing):
        where = f"request {int(crossing[0])} of {trace.name}"
        raise InvalidArgument("workload", where, "no request that waits for another session, or a workload as recorded")


def _scaled(trace: Trace, mode: Mode) -> Trace:
    """Recorded times as many times as long."""
    scale = mode.time_scale
    if scale == 1:
        return trace
    is_timed = bool(trace.arrival_ps.any() or trace.delay_ps.any())
    require(is_timed, "workload.time_scale", scale, "1: this trace records no times, all of its sessions start at once")
    longest_ps = int(max(trace.arrival_ps.max(), trace.delay_ps.max()))
    bound = MAX_SPAN_S * PS_PER_S / longest_ps
    require(scale < bound, "workload.time_scale", scale, f"less than {bound:.6g}: at most {MAX_SPAN_S} s of trace")
    times = (np.rint(times_ps * scale).astype(np.int64) for times_ps in (trace.arrival_ps, trace.delay_ps))
    arrival_ps, delay_ps = times
    return replace(trace, arrival_ps=arrival_ps, delay_ps=delay_ps)


# --- what follows what ------------------------------------------------------------------------------------------------


def _followed(trace: Trace, mode: Mode) -> Trace:
    """The trace with the successors of the mode's `pacing`."""
    if mode.pacing == "recorded":
        return trace
    index = np.arange(trace.num_requests)
    before = np.where(trace.after != index, trace.after, _previous(trace))
    is_later = before != index
    _check_recorded(trace, mode, is_later)
    arrival_ps = trace.arrival_ps
    if mode.turn_delay_s is not None:
        before = _previous(trace) if mode.pacing == "open" else before
        arrival_ps = _spaced(arrival_ps, before, mode.turn_delay_s)
    delay_ps = np.zeros_like(trace.delay_ps)
    if mode.pacing == "after_answer":
        delay_ps = trace.delay_ps if mode.turn_delay_s is None else is_later * seconds_to_ps(mode.turn_delay_s)
    after = index if mode.pacing == "open" else before
    return restarted(replace(trace, after=after, delay_ps=delay_ps), arrival_ps)


def _previous(trace: Trace) -> Column:
    """The request before in its session; of the first, itself."""
    order = _in_sessions(trace)
    before = np.arange(trace.num_requests)
    same = trace.session[order[1:]] == trace.session[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _check_recorded(trace: Trace, mode: Mode, is_later: Column) -> None:
    """Without a `turn_delay_s`, the trace has to record what takes its place."""
    if mode.turn_delay_s is not None:
        return
    later = np.flatnonzero(is_later)
    if mode.pacing == "after_answer":
        is_recorded, what = bool((trace.after != np.arange(trace.num_requests))[later].all()), "pauses after answers"
    else:
        is_recorded, what = bool((np.diff(_from_first(trace)[_in_sessions(trace)]) > 0).any()), "when later turns start"
    require(is_recorded, "workload.pacing", mode.pacing, f"turn_delay_s with it: {trace.name} does not record {what}")


def _in_sessions(trace: Trace) -> Column:
    """Rows by session, in order inside each."""
    return np.argsort(trace.session, kind="stable")


def _first_rows(trace: Trace) -> tuple[Column, Column]:
    """(first row of each session in order of those rows, for each request the place of its session in that order)."""
    _, first, inverse = np.unique(trace.session, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[inverse]


def _from_first(trace: Trace) -> Column:
    """Recorded start, counted from the session's first."""
    first, session = _first_rows(trace)
    since: Column = trace.arrival_ps - trace.arrival_ps[first][session]
    return since


def _spaced(arrival_ps: Column, before: Column, delay_s: float) -> Column:
    """Starts that are `delay_s` after those of the requests before them."""
    starts_ps, delay_ps = arrival_ps.tolist(), seconds_to_ps(delay_s)
    for index, earlier in enumerate(before.tolist()):
        if earlier != index:
            starts_ps[index] = starts_ps[earlier] + delay_ps
    last_s = max(starts_ps) / PS_PER_S
    require(last_s < MAX_SPAN_S, "workload.turn_delay_s", delay_s, f"starts within {MAX_SPAN_S} s, not {last_s:.6g} s")
    return np.array(starts_ps, dtype=np.int64)


# --- when sessions start ----------------------------------------------------------------------------------------------


def _started(trace: Trace, mode: Mode, seed: int) -> Trace:
    """The trace with the session starts of the mode."""
    if mode.starts == "recorded":
        return trace
    first, session = _first_rows(trace)
    starts_s = np.zeros(len(first))
    if mode.starts != "all_at_once":
        starts_s = drawn_s(rate_of(mode), len(first), random_stream(seed, "starts of a mode"))
    arrival_s = starts_s[session] + _from_first(trace) / PS_PER_S
    last_s = float(arrival_s.max())
    fix = f"a rate at which all {len(first)} sessions start within {MAX_SPAN_S} s, not {last_s:.6g} s"
    require(last_s < MAX_SPAN_S, "workload.rate_per_s", mode.rate_per_s, fix)
    starts_ps = np.rint(starts_s * PS_PER_S).astype(np.int64)
    return restarted(trace, _from_first(trace) + starts_ps[session])


# --- answers ----------------------------------------------------------------------------------------------------------


def _answered(trace: Trace, mode: Mode) -> Trace:
    """The trace with answers of the mode's lengths.

    A shorter answer is the beginning of the recorded one. A longer one is another text: it has a stream of its own, so
    that what a next prompt holds in its place is not taken for generated.
    """
    bounds = (mode.min_output_len, mode.max_output_len)
    if mode.forced_output_len is not None:
        bounds = (mode.forced_output_len, mode.forced_output_len)
    if bounds == (None, None):
        return trace
    output_len = np.clip(trace.output_len, *bounds)
    is_longer = output_len > trace.output_len
    output_stream = trace.output_stream.copy()
    unused = 1 + int(max(output_stream.max(), trace.segment_stream.max()))
    output_stream[is_longer] = unused + np.arange(np.count_nonzero(is_longer))
    return replace(trace, output_len=output_len, output_stream=output_stream)

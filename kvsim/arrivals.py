"""Who arrives when: a trace's requests by their starts, after what they follow, and until the run ends.

Nobody else knows what comes: router, engines and pool are told of a request when it arrives. A session that waits for
others to end (`max_sessions`) keeps its distances: it is late as a whole.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kvsim.clock import PS_PER_S, Clock, Phase
from kvsim.config.mode import Mode
from kvsim.events import EventLog, Kind
from kvsim.workload.trace import Trace

OnArrival: TypeAlias = Callable[[int], None]
"""(request) that arrives now."""


class Arrivals:
    """Offers one trace in the order and at the times its mode asks for. Use once."""

    def __init__(self, clock: Clock, log: EventLog, trace: Trace, mode: Mode, arrive: OnArrival) -> None:
        self.num_done = 0
        """Requests that completed or were rejected before the run ended."""
        self.is_stopped = False
        self._clock = clock
        self._log = log
        self._mode = mode
        self._tell = arrive
        self._followers = _followers(trace)
        self._starts = [index for index, before in enumerate(trace.after.tolist()) if before == index]
        self._arrival_ps: list[int] = trace.arrival_ps.tolist()
        self._delay_ps: list[int] = trace.delay_ps.tolist()
        self._session: list[int] = trace.session.tolist()
        self._arrived_ps: dict[int, int] = {}
        self._unfinished = dict.fromkeys(range(trace.num_requests))
        self._left = Counter(self._session)  # requests of each session that have not ended
        self._num_ended = 0
        self._open: set[int] = set()
        self._late_ps: dict[int, int] = {}  # sessions that waited to be opened, and for how long
        self._queue: dict[int, list[int]] = {}  # sessions that wait, in order, and what of theirs was to arrive

    def begin(self) -> None:
        """Set the alarm for the first arrivals, and for the end."""
        if self._starts:
            self._clock.at(self._arrival_ps[self._starts[0]], partial(self._start_from, 0))
        if self._mode.stop_after_s is not None:
            self._clock.at_phase(round(self._mode.stop_after_s * PS_PER_S), Phase.STOP, 0, self._stop)

    def done(self, index: int) -> None:
        """A request completed or was rejected."""
        if self.is_stopped:
            return
        self.num_done += 1
        del self._unfinished[index]
        for follower in self._followers.get(index, ()):
            self._clock.after(self._pause_ps(index, follower), partial(self._arrive, follower))
        session = self._session[index]
        self._left[session] -= 1
        if not self._left[session]:
            self._session_ended(session)
        if self.num_done == self._mode.stop_after_requests:
            self._stop_now()

    # --- starts -------------------------------------------------------------------------------------------------------

    def _start_from(self, position: int) -> None:
        """Start every request of this instant, in order, and set the alarm for the next."""
        starts, now_ps = self._starts, self._clock.now_ps
        while position < len(starts) and self._arrival_ps[starts[position]] <= now_ps:
            self._start(starts[position])
            position += 1
        if position < len(starts) and not self.is_stopped:
            self._clock.at(self._arrival_ps[starts[position]], partial(self._start_from, position))

    def _start(self, index: int) -> None:
        """It is the request's time: it arrives now, or when its session is as far."""
        session = self._session[index]
        if session in self._queue:
            self._queue[session].append(index)
        elif session in self._open or self._has_room():
            self._open.add(session)
            self._arrive_late(index)
        else:
            self._queue[session] = [index]

    def _has_room(self) -> bool:
        return self._mode.max_sessions is None or len(self._open) < self._mode.max_sessions

    def _session_ended(self, session: int) -> None:
        self._num_ended += 1
        self._open.discard(session)
        if self._num_ended == self._mode.stop_after_sessions:
            self._stop_now()
        if self._queue and self._has_room():
            following = next(iter(self._queue))
            waiting = self._queue.pop(following)
            self._open.add(following)
            self._late_ps[following] = self._clock.now_ps - self._arrival_ps[waiting[0]]
            for index in waiting:
                self._arrive_late(index)

    def _arrive_late(self, index: int) -> None:
        """As late as its session is; never inside the end of another one, which could go on without end."""
        late_ps = self._late_ps.get(self._session[index])
        if late_ps is None:
            self._arrive(index)
        else:
            self._clock.at(self._arrival_ps[index] + late_ps, partial(self._arrive, index))

    def _pause_ps(self, index: int, follower: int) -> int:
        """From the end of a request to the start of one that follows it."""
        if self._mode.pacing != "start_to_start":
            return self._delay_ps[follower]
        distance_ps = self._arrival_ps[follower] - self._arrival_ps[index]
        return max(0, self._arrived_ps[index] + distance_ps - self._clock.now_ps)

    def _arrive(self, index: int) -> None:
        if not self.is_stopped:
            self._arrived_ps[index] = self._clock.now_ps
            self._tell(index)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _stop_now(self) -> None:
        """End the run with this instant."""
        self._clock.at_phase(self._clock.now_ps, Phase.STOP, 0, self._stop)

    def _stop(self) -> None:
        if self.is_stopped or not self._unfinished:
            return
        self.is_stopped = True
        for index in self._unfinished:
            self._log.add(self._clock.now_ps, Kind.STOPPED, index, int(index in self._arrived_ps))
        self._log.end()


def _followers(trace: Trace) -> dict[int, list[int]]:
    """For each request, those that start after it."""
    followers: dict[int, list[int]] = {}
    for index, before in enumerate(trace.after.tolist()):
        if before != index:
            followers.setdefault(before, []).append(index)
    return followers

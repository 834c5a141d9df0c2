"""A link whose transfers share its bandwidth equally at every instant (processor sharing), in exact integers.

Virtual time: `_served` counts what every active transfer has attained so far, in picobytes (1e-12 byte, so that one
picosecond of the link is `bandwidth_bytes_per_s` of them). A transfer of s bytes that starts at served = v is complete
when served reaches v + s * 1e12. Only the nearest completion needs an alarm.

    served   v ---------------- v + s * 1e12        slope: bandwidth / number of active transfers
             [transfer active )

Alarms ring on whole picoseconds, so up to one picosecond of the link is left over at a completion, and up to n - 1
picobytes at a division by n. `_carry` keeps both for the transfers that go on: nothing is lost while the link is busy,
and a busy period lasts exactly ceil(its bytes / bandwidth).
"""

from heapq import heappop, heappush

from kvcore.units import div_ceil
from kvsim.clock import PS_PER_S, Action, Alarm, Clock
from kvsim.usage import RecordTransfer

PICOBYTES_PER_BYTE = PS_PER_S


class FairLink:
    """One direction of a path: each transfer waits `latency_ps`, then shares `bandwidth_bytes_per_s` (> 0).

    Counters: `entered_bytes` (of all transfers), `moved_bytes` and `num_completed` (of complete ones), `busy_ps` (time
    with an active transfer), `num_busy_periods`.
    """

    full_when_busy = True

    def __init__(self, clock: Clock, latency_ps: int, bandwidth_bytes_per_s: int) -> None:
        assert latency_ps >= 0 and bandwidth_bytes_per_s > 0, (latency_ps, bandwidth_bytes_per_s)
        self._clock = clock
        self._latency_ps = latency_ps
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.record: RecordTransfer | None = None
        """Told of every transfer that completes."""
        # heap of (complete at served, number, size_bytes, start_ps, ...)
        self._active: list[tuple[int, int, int, int, Action]] = []
        self._served = 0
        self._carry = 0
        self._updated_ps = 0
        self._alarm: Alarm | None = None
        self._num_started = 0
        self.num_completed = 0
        self.num_busy_periods = 0
        self.entered_bytes = 0
        self.moved_bytes = 0
        self.busy_ps = 0

    @property
    def num_active(self) -> int:
        """Transfers that share the bandwidth now; those in their latency are not among them."""
        return len(self._active)

    def transfer(self, size_bytes: int, on_done: Action) -> None:
        """Move `size_bytes` (>= 0), then run `on_done`; transfers complete at one instant in the order they began."""
        assert size_bytes >= 0, size_bytes
        self.entered_bytes += size_bytes
        self._clock.after(self._latency_ps, lambda: self._begin(size_bytes, on_done))

    def audit(self) -> None:
        """Bytes are conserved: the time the link was busy is the time its bytes need, rounded up per busy period."""
        self._advance()
        attained = sum(size * PICOBYTES_PER_BYTE - (goal - self._served) for goal, _, size, *_ in self._active)
        unused = self.busy_ps * self.bandwidth_bytes_per_s - self.moved_bytes * PICOBYTES_PER_BYTE - attained
        assert 0 <= unused <= self.num_busy_periods * self.bandwidth_bytes_per_s + self.num_active, (
            unused,
            self.num_busy_periods,
        )

    def _begin(self, size_bytes: int, on_done: Action) -> None:
        self._advance()
        if not self._active:
            self.num_busy_periods += 1
            self._carry = 0
        goal = self._served + size_bytes * PICOBYTES_PER_BYTE
        heappush(self._active, (goal, self._num_started, size_bytes, self._clock.now_ps, on_done))
        self._num_started += 1
        self._set_alarm()

    def _advance(self) -> None:
        """Hand out the bandwidth of the time since the last change."""
        elapsed_ps = self._clock.now_ps - self._updated_ps
        self._updated_ps = self._clock.now_ps
        if self._active:
            self.busy_ps += elapsed_ps
            self._serve(elapsed_ps * self.bandwidth_bytes_per_s)

    def _serve(self, picobytes: int) -> None:
        share, self._carry = divmod(self._carry + picobytes, len(self._active))
        self._served += share

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        missing = (self._active[0][0] - self._served) * len(self._active) - self._carry
        self._alarm = self._clock.after(max(0, div_ceil(missing, self.bandwidth_bytes_per_s)), self._complete)

    def _complete(self) -> None:
        """Take out every transfer that has its bytes; what they were served beyond goes to the others."""
        self._advance()
        done: list[Action] = []
        while self._active and self._active[0][0] <= self._served:
            goal, _, size_bytes, start_ps, on_done = heappop(self._active)
            self._carry += self._served - goal
            self.moved_bytes += size_bytes
            if self.record is not None:
                self.record(start_ps, self._clock.now_ps, size_bytes)
            done.append(on_done)
            if self._active:
                self._serve(0)
        self.num_completed += len(done)
        self._alarm = None
        if self._active:
            self._set_alarm()
        for on_done in done:
            on_done()

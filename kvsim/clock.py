"""Simulated time: integer picoseconds over SimPy's event queue.

Picoseconds, because a decode step is affine in the context length with slopes of tens of nanoseconds a token: at this
resolution many steps sum to the closed form exactly. 64 bits hold 2,500 hours.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import simpy
from simpy.events import EventPriority

PS_PER_NS = 1_000
PS_PER_US = 1_000_000
PS_PER_MS = 1_000_000_000
PS_PER_S = 1_000_000_000_000

Action = Callable[[], None]


class Phase(IntEnum):
    """Parts of one instant, in order; what a phase sets for an earlier one of the same instant runs next.

    Whoever decides on what has arrived then does not depend on the order in which alarms of one instant were set.
    """

    EVENT = 0
    """Arrivals, answers, ends of transfers: in the order they were set."""
    STEP_END = 1
    """Engines account for the step they ran: in order of instances."""
    SCHEDULE = 2
    """Engines decide their next step: in order of instances."""
    STOP = 3
    """The run ends, when all of the instant has happened."""


_EVENT = EventPriority(Phase.EVENT)


class Alarm(simpy.Event):
    """A scheduled action that can be called off."""

    __slots__ = ("action", "at_ps", "callbacks")

    # All that the queue wants to know of an event that has happened.
    _ok = True
    _value = None

    def __init__(self, callbacks: list[Callable[[Any], None]], at_ps: int, action: Action) -> None:
        self.callbacks = callbacks
        self.at_ps = at_ps
        self.action: Action | None = action

    def cancel(self) -> None:
        """Forget the action; the alarm then rings unheard."""
        self.action = None


class Clock:
    """Runs actions in time order; actions of one instant run by `Phase`, events in the order they were set."""

    __slots__ = ("_callbacks", "_env", "now_ps", "num_events")

    def __init__(self) -> None:
        self._env = simpy.Environment(initial_time=0)
        # Of every alarm: SimPy takes the list from an event and leaves it as it is.
        self._callbacks: list[Callable[[Any], None]] = [self._ring]
        self.now_ps = 0
        """Current time; only an alarm that rings moves it."""
        self.num_events = 0

    @property
    def now_ns(self) -> int:
        """Current time for kvcore, rounded down."""
        return self.now_ps // PS_PER_NS

    @property
    def has_more_now(self) -> bool:
        """Whether something else is set for this instant."""
        return self._env.peek() <= self.now_ps

    def at(self, at_ps: int, action: Action) -> Alarm:
        """Run `action` at `at_ps`, which must not lie in the past."""
        return self._set(at_ps, action, _EVENT)

    def at_phase(self, at_ps: int, phase: Phase, instance: int, action: Action) -> Alarm:
        """Run an instance's `action` in a phase of `at_ps`."""
        return self._set(at_ps, action, EventPriority(phase << 32 | instance))

    def after(self, delay_ps: int, action: Action) -> Alarm:
        """Run `action` in `delay_ps` >= 0."""
        return self._set(self.now_ps + delay_ps, action, _EVENT)

    def _set(self, at_ps: int, action: Action, priority: EventPriority) -> Alarm:
        delay_ps = at_ps - self.now_ps
        assert delay_ps >= 0, (at_ps, self.now_ps)
        alarm = Alarm(self._callbacks, at_ps, action)
        self._env.schedule(alarm, priority, delay_ps)
        self.num_events += 1
        return alarm

    def _ring(self, alarm: Alarm) -> None:
        self.now_ps = alarm.at_ps
        if alarm.action is not None:
            alarm.action()

    def run(self) -> None:
        """Run until no action is left."""
        self._env.run()


def nothing() -> None:
    """The action where nobody waits, or only the time matters."""

"""Lookups: they go in on the engine's thread, come out there answered, and are carried through elsewhere."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from kvcore.group_runs import GroupRuns, count_blocks
from kvcore.plans import Lookup
from kvcore.ports import Clock, KVStore
from kvcore.units import NS_PER_MS

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

Ask: TypeAlias = Callable[[KVStore[Any], GroupRuns, int], GroupRuns]
"""(store, question, deadline_ns) -> what of the question is there."""

LATE_PATIENCE_NS = 100 * NS_PER_MS
"""For one question of a lookup whose deadline is past or near: what a whole lookup has unless set."""

_CLOSE_TIMEOUT_S = 10.0


class _Asked(NamedTuple):
    asker: Any
    lookup: Lookup
    ask: Ask

    def is_late(self, now_ns: int) -> bool:
        return self.lookup.deadline_ns <= now_ns


class LookupThread:
    """Carries lookups through, round by round, in the order they came; nobody waits for it.

    After its deadline a lookup goes on when no other one waits, until it ends or is forgotten: its request may have to
    wait for long until it is admitted. `asker` is the caller's own.
    """

    def __init__(self, store: KVStore[Any], clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._changed = threading.Condition()
        self._asked: deque[_Asked] = deque()
        self._late: deque[_Asked] = deque()
        self._current: Any = None
        self._answered: list[tuple[Any, Lookup]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtwin-lookup", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Lookups whose next question has not been put."""
        return len(self._asked) + len(self._late)

    def submit(self, asker: Any, lookup: Lookup, ask: Ask) -> None:
        """Put its questions to the pool, one after another."""
        with self._changed:
            self._asked.append(_Asked(asker, lookup, ask))
            self._changed.notify()

    def take_answers(self) -> list[tuple[Any, Lookup]]:
        """(asker, lookup) of the lookups that ended since the last call."""
        if not self._answered:  # mostly; what ends just now is the next call's
            return []
        with self._changed:
            answered, self._answered = self._answered, []
        return answered

    def forget(self, asker: Any) -> None:
        """Drop the asker's lookups, those that ended too; one under way ends with its round, and is not told."""
        with self._changed:
            if self._current is asker:
                self._current = None
            self._asked = deque(asked for asked in self._asked if asked.asker is not asker)
            self._late = deque(asked for asked in self._late if asked.asker is not asker)
            self._answered = [answer for answer in self._answered if answer[0] is not asker]

    def close(self) -> bool:
        """Stop, and say whether the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asked or self._late)
                if self._closed:
                    return
                asked = self._next()
                self._current = asked.asker
            goes_on = self._one_round(asked)
            with self._changed:
                if self._current is None:
                    continue
                if goes_on:
                    (self._late if asked.is_late(self._clock.now_ns()) else self._asked).appendleft(asked)
                else:
                    self._answered.append((asked.asker, asked.lookup))

    def _next(self) -> _Asked:
        """The oldest of those whose deadline is not past, or else of all."""
        now_ns = self._clock.now_ns()
        while self._asked and self._asked[0].is_late(now_ns):
            self._late.append(self._asked.popleft())
        return (self._asked or self._late).popleft()

    def _one_round(self, asked: _Asked) -> bool:
        """Put one question; whether there is another one."""
        dialogue = asked.lookup.dialogue
        deadline_ns = max(asked.lookup.deadline_ns, self._clock.now_ns() + LATE_PATIENCE_NS)
        try:
            dialogue.answered(asked.ask(self._store, dialogue.question, deadline_ns))
        except Exception:
            logger.exception("lookup of %d blocks failed", count_blocks(dialogue.question))
            return False
        return dialogue.open

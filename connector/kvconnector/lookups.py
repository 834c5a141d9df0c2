"""Lookups: they go in on the engine's thread, come out there answered, and are carried through elsewhere."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from kvcore.group_runs import GroupRuns, count_blocks
from kvcore.keys import BlockKey
from kvcore.plans import Lookup
from kvcore.ports import Clock, KVStore, StoreOutcome
from kvcore.units import NS_PER_MS

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

Told: TypeAlias = Callable[[Sequence[StoreOutcome]], GroupRuns]
"""One outcome per key -> what of the question is there."""

Ask: TypeAlias = Callable[[GroupRuns], tuple[list[BlockKey], Told]]
"""The keys that a question comes to, and what their outcomes tell."""

LATE_PATIENCE_NS = 100 * NS_PER_MS
"""For one question of a lookup whose deadline is past or near: what a whole lookup has unless set."""

BLOCKS_PER_CALL = 1_024
"""Questions share a call up to so many blocks: more, and the first would wait for the last."""

_CLOSE_TIMEOUT_S = 10.0


@dataclass(eq=False)
class _Asked:
    asker: Any
    lookup: Lookup
    ask: Ask
    failed: bool = False

    @property
    def num_blocks(self) -> int:
        return count_blocks(self.lookup.dialogue.question)

    @property
    def goes_on(self) -> bool:
        return self.lookup.dialogue.open and not self.failed

    def is_late(self, now_ns: int) -> bool:
        return self.lookup.deadline_ns <= now_ns


class LookupThread:
    """Carries lookups through, round by round, in the order they came; nobody waits for it.

    What waits at the same time is asked in one call. After its deadline a lookup goes on when no other one waits, until
    it ends or is forgotten: its request may have to wait for long until it is admitted. `asker` is the caller's own.
    """

    def __init__(self, store: KVStore[Any], clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._changed = threading.Condition()
        self._asked: deque[_Asked] = deque()
        self._late: deque[_Asked] = deque()
        self._current: list[_Asked] = []
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
            self._current = [asked for asked in self._current if asked.asker is not asker]
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
                self._current = batch = self._next()
            self._one_round(batch)
            with self._changed:
                ended, now_ns = [], self._clock.now_ns()
                for asked in reversed(self._current):
                    if asked.goes_on:
                        (self._late if asked.is_late(now_ns) else self._asked).appendleft(asked)
                    else:
                        ended.append((asked.asker, asked.lookup))
                self._answered += reversed(ended)
                self._current = []

    def _next(self) -> list[_Asked]:
        """The oldest of those whose deadline is not past, or else of all."""
        now_ns = self._clock.now_ns()
        while self._asked and self._asked[0].is_late(now_ns):
            self._late.append(self._asked.popleft())
        waiting = self._asked or self._late
        batch = [waiting.popleft()]
        num_blocks = batch[0].num_blocks
        while waiting and (num_blocks := num_blocks + waiting[0].num_blocks) <= BLOCKS_PER_CALL:
            batch.append(waiting.popleft())
        return batch

    def _one_round(self, batch: Sequence[_Asked]) -> None:
        """Put one question of each."""
        deadline_ns = max(self._clock.now_ns() + LATE_PATIENCE_NS, *(asked.lookup.deadline_ns for asked in batch))
        try:
            questions = [asked.ask(asked.lookup.dialogue.question) for asked in batch]
            outcomes = self._store.exists([key for keys, _ in questions for key in keys], deadline_ns)
            ends = [*accumulate(len(keys) for keys, _ in questions)]
            for asked, (keys, told), end in zip(batch, questions, ends, strict=True):
                asked.lookup.dialogue.answered(told(outcomes[end - len(keys) : end]))
        except Exception:
            for asked in batch:
                asked.failed = True
            logger.exception("lookup of %d blocks failed", sum(asked.num_blocks for asked in batch))

"""One thread that makes calls one at a time, for callers that leave at their deadline.

A call into the client library cannot be interrupted. Here its caller goes on, and while it lasts the next callers are
turned away at once, so that a store that hangs costs one thread and no more waiting.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcore.ports import Clock
from kvcore.units import NS_PER_S

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

T = TypeVar("T")


class _Call(Generic[T]):
    """A call on its way; `left` once its caller has gone."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.done = threading.Event()
        self.left = False
        self.result: T | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except Exception:
            logger.exception("a call into the client library failed")
        finally:
            self.done.set()


class Lane:
    """The thread starts with the first call and is a daemon: a call that hangs does not keep the process alive."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call[object]] = queue.SimpleQueue()
        self._running: _Call[object] | None = None
        self._started = False

    @property
    def hangs(self) -> bool:
        """Whether the thread is in a call that its caller has given up."""
        running = self._running
        return running is not None and running.left

    def call(self, function: Callable[[], T], deadline_ns: int) -> T | None:
        """`function()`, or None when it raises or has not ended by the deadline; it may end later."""
        if self.hangs:
            return None
        call = _Call(function)
        self._start()
        self._calls.put(call)  # type: ignore[arg-type]
        if not call.done.wait(max(0.0, (deadline_ns - self._clock.now_ns()) / NS_PER_S)):
            call.left = True
        return call.result if call.done.is_set() else None

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call.left:
                continue
            self._running = call
            call.run()
            self._running = None

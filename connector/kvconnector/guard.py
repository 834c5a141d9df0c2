"""A store that is asked nothing while it does not answer, and notices by itself when it does again."""

import logging
import threading
from collections.abc import Callable, Sequence

from kvconnector.store import MooncakeStore, Pieces
from kvcore.access import Access
from kvcore.breaker import Breaker, BreakerState
from kvcore.keys import BlockKey
from kvcore.ports import Clock, StoreOutcome
from kvcore.units import NS_PER_S

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

PROBE_PATIENCE_NS = NS_PER_S
"""Within this a pool that is there answers a probe; nobody waits for it."""

_NOT_ANSWERED = {StoreOutcome.TIMEOUT, StoreOutcome.UNAVAILABLE}


class GuardedStore:
    """A `PoolStore`: Mooncake's behind a breaker, for one half of one engine, whose name the log has.

    Calls of all kinds count alike. A call has failed when none of its keys was answered; one that is turned away is
    UNAVAILABLE at once. A thread of its own, which sleeps while the breaker is closed, probes.
    """

    def __init__(self, store: MooncakeStore, breaker: Breaker, clock: Clock, half: str) -> None:
        self._store = store
        self._breaker = breaker
        self._clock = clock
        self._half = half
        self._changed = threading.Condition()
        self._left = False
        self._prober = threading.Thread(target=self._probe_when_due, name="kvtwin-probe", daemon=True)
        self._prober.start()

    @property
    def state(self) -> BreakerState:
        """Of the breaker."""
        return self._breaker.state

    @property
    def access(self) -> Access:
        """What requests may plan: nothing while the breaker is not closed."""
        return self._breaker.access

    def join(self, deadline_ns: int) -> bool:
        """See `MooncakeStore.join`; what could not be joined is not asked before a probe could."""
        joined = self._store.join(deadline_ns)
        if not joined:
            self._report(self._breaker.lost)
        return joined

    def register(self, address: int, size_bytes: int) -> None:
        """See `MooncakeStore.register`."""
        self._store.register(address, size_bytes)

    def unregister(self, address: int) -> None:
        """See `PoolStore`."""
        self._store.unregister(address)

    def exists(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """See `MooncakeStore.exists`."""
        return self._guarded(keys, deadline_ns, lambda: self._store.exists(keys, deadline_ns))

    def remove(self, keys: Sequence[BlockKey], deadline_ns: int) -> list[StoreOutcome]:
        """See `MooncakeStore.remove`."""
        return self._guarded(keys, deadline_ns, lambda: self._store.remove(keys, deadline_ns))

    def remove_like(self, pattern: str) -> StoreOutcome:
        """See `MooncakeStore.remove_like`; it says nothing about the pool to the breaker."""
        return self._store.remove_like(pattern)

    def get(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """See `MooncakeStore.get`."""
        return self._guarded(keys, deadline_ns, lambda: self._store.get(keys, buffers, deadline_ns))

    def put(self, keys: Sequence[BlockKey], buffers: Sequence[Pieces], deadline_ns: int) -> list[StoreOutcome]:
        """See `MooncakeStore.put`."""
        return self._guarded(keys, deadline_ns, lambda: self._store.put(keys, buffers, deadline_ns))

    def close(self) -> None:
        """End the probes and leave the store."""
        with self._changed:
            self._left = True
            self._changed.notify()
        self._prober.join(2 * PROBE_PATIENCE_NS / NS_PER_S)
        self._store.close()

    def _guarded(
        self, keys: Sequence[BlockKey], deadline_ns: int, call: Callable[[], list[StoreOutcome]]
    ) -> list[StoreOutcome]:
        begun_ns = self._clock.now_ns()
        with self._changed:
            attempt = self._breaker.begin(begun_ns)
        if attempt is None:
            return [StoreOutcome.UNAVAILABLE] * len(keys)
        outcomes = call()
        if not keys or begun_ns >= deadline_ns:  # the pool was not asked
            return outcomes
        if set(outcomes) <= _NOT_ANSWERED:
            self._report(lambda now_ns: self._breaker.failed(attempt, now_ns))
        else:
            self._report(lambda now_ns: self._breaker.succeeded(attempt))
        return outcomes

    def _report(self, event: Callable[[int], None]) -> None:
        """Tell the breaker; a change is for the log, and for the prober."""
        with self._changed:
            before = self._breaker.state
            event(self._clock.now_ns())
            after = self._breaker.state
            if after is not before:
                self._changed.notify()
        if after is not before:
            level, text = _SAID[before, after]
            logger.log(level, "kvtwin: %s half: %s", self._half, text)

    def _probe_when_due(self) -> None:
        while self._is_due():
            self._report(self._breaker.begin_probe)
            answered = self._store.answers(self._clock.now_ns() + PROBE_PATIENCE_NS)
            self._report((lambda now_ns: self._breaker.probe_answered()) if answered else self._breaker.probe_failed)

    def _is_due(self) -> bool:
        """Wait until a probe is due; False once the store is left."""
        with self._changed:
            while not self._left:
                probe_at_ns = self._breaker.probe_at_ns
                wait_ns = None if probe_at_ns is None else probe_at_ns - self._clock.now_ns()
                if wait_ns is not None and wait_ns <= 0:
                    return True
                self._changed.wait(None if wait_ns is None else wait_ns / NS_PER_S)
        return False


_CLOSED, _HALF_OPEN, _OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
_SAID = {
    (_CLOSED, _OPEN): (logging.WARNING, "the pool does not answer and is not asked any more, only probed"),
    (_OPEN, _HALF_OPEN): (logging.DEBUG, "the pool is probed"),
    (_HALF_OPEN, _OPEN): (logging.DEBUG, "the pool does not answer the probe"),
    (_HALF_OPEN, _CLOSED): (logging.WARNING, "the pool answers and is asked again"),
}
"""What the log says of each change."""

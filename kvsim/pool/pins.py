"""Who is pinned in the pool, and until when.

Semantics of `mooncake_master` 0.3.13:

- a soft-pinned object goes only when the others did not reach max(share / 2, used_ratio - watermark) of all objects,
  and then up to there; its pin begins with its put, ends after its TTL and is prolonged by nothing; a hard-pinned one
  never goes; a put of an existing object pins nothing.

Hints the master does not have: of objects pinned alike those of less priority go first; the end of a session turns what
it pinned into ordinary cache (0.3.13 can only rewrite an object, with SoftPinAction.DISABLE, or remove it).
"""

from enum import Enum
from heapq import heappop, heappush

from kvcore.eviction.runs import Lineage
from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.units import NS_PER_S
from kvsim.pool.extents import Extents, Mark

DEFAULT_SOFT_PIN_TTL_NS = 1_800 * NS_PER_S
"""`default_kv_soft_pin_ttl` of the master."""


class SoftPins(Enum):
    """The master's `allow_evict_soft_pinned_objects`."""

    GO_LAST = "true"
    STAY = "false"


class Pins:
    """What the hints of puts leave on their blocks, and when it ends."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, Lineage]] = []  # heap
        self._by_session: dict[str, set[Lineage]] = {}
        self._ended: set[str] = set()

    def mark(self, hints: Hints, now_ns: int) -> Mark | None:
        """What a put with these hints leaves on its blocks."""
        if hints is NO_HINTS:
            return None
        mark = Mark(hints.pin, hints.priority, _end_ns(hints, now_ns), hints.session)
        ends_at_once = mark.until_ns is not None and mark.until_ns <= now_ns
        is_pinned = mark.pin is not Pin.NONE and hints.session not in self._ended and not ends_at_once
        return mark if is_pinned else mark.released

    def note(self, lineage: Lineage, mark: Mark) -> None:
        """Blocks of the lineage bear the mark, which is a pin."""
        if mark.until_ns is not None:
            heappush(self._ends, (mark.until_ns, lineage))
        if mark.session is not None:
            self._by_session.setdefault(mark.session, set()).add(lineage)

    def end_session(self, session: str, extents: Extents) -> None:
        """Release what it pinned, also what its stores under way will bring."""
        self._ended.add(session)
        for lineage in self._by_session.pop(session, ()):
            extents.release(lineage, lambda mark: mark.session == session)

    def expire(self, now_ns: int, extents: Extents) -> None:
        """Release the pins whose time is over; it matters to nobody before something is evicted."""
        while self._ends and self._ends[0][0] <= now_ns:
            _, lineage = heappop(self._ends)
            extents.release(lineage, lambda mark: mark.until_ns is not None and mark.until_ns <= now_ns)


def _end_ns(hints: Hints, now_ns: int) -> int | None:
    if hints.pin is not Pin.SOFT:
        return None
    return now_ns + (DEFAULT_SOFT_PIN_TTL_NS if hints.ttl_ns is None else hints.ttl_ns)

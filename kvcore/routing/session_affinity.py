"""A session stays where it is: `SessionRouter` of vLLM's production stack (vllm_router/routers/routing_logic.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from kvcore.routing.least_loaded import LeastLoaded
from kvcore.routing.router import Arrival, Fact, InstanceId, Snapshot


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """The instance that the session's name hashes to, whatever its load; without a session the least loaded one.

    Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998) instead of the
    source's ring: it needs no state, and an instance that joins or leaves moves exactly the sessions it wins or had.
    Without a session the source takes the instance with the fewest requests per second.
    """

    reads: ClassVar[frozenset[Fact]] = frozenset({Fact.SESSION, Fact.LOAD})

    def choose(self, arrival: Arrival, snapshots: Sequence[Snapshot]) -> int:
        """See the class."""
        session = arrival.session
        if session is None:
            return LeastLoaded().choose(arrival, snapshots)
        return max(range(len(snapshots)), key=lambda index: _rank(session, snapshots[index].instance))


def _rank(session: str, instance: InstanceId) -> bytes:
    return blake2b(f"{instance} {session}".encode(), digest_size=16).digest()

"""Which instance takes a request: a pure choice over what was known of the instances some time ago."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, NewType, Protocol

InstanceId = NewType("InstanceId", int)
"""Name of an instance; it stays the same while others come and go."""


class Fact(Enum):
    """What a router may be told beyond the arrival's number, the prompt's length and the instances' names."""

    SESSION = "Arrival.session"
    LOAD = "the numbers of Snapshot"
    PREFIX = "Arrival.cached_lens"
    POOL = "Arrival.pool_hit_len"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One instance's load: what it was at `taken_at_ns`, plus what this router has sent it since."""

    instance: InstanceId
    taken_at_ns: int = 0
    num_waiting: int = 0
    """Requests that are not in the running batch, whatever they wait for."""
    num_running: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens of requests without a first token that neither the instance nor the pool was known to hold."""
    num_prompt_tokens: int = 0
    """All prompt tokens of its requests, computed or not: what decoding them reads."""

    def sent(self, prompt_len: int, uncached_len: int) -> "Snapshot":
        """The same after one more request of `prompt_len` tokens, `uncached_len` of which must be computed there.

        Without it every request of one interval goes to the same instance (Mitzenmacher, "How useful is old
        information?", 2000); routers that poll correct their copy in the same way (vLLM's DPLBAsyncMPClient).
        """
        return replace(
            self,
            num_waiting=self.num_waiting + 1,
            num_queued_tokens=self.num_queued_tokens + uncached_len,
            num_prompt_tokens=self.num_prompt_tokens + prompt_len,
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request when it arrives; nothing of it tells the future. Lengths in tokens.

    A fact that the router does not read may be left out.
    """

    number: int
    """Requests that this router has routed before."""
    prompt_len: int
    session: str | None = None
    """None: it belongs to no session."""
    cached_lens: tuple[int, ...] = ()
    """For each snapshot, the prefix of the prompt that the instance is thought to have cached."""
    pool_hit_len: int | None = None
    """The prefix that the shared pool holds; None: there is none, or it is not known."""

    def uncached_len(self, index: int) -> int:
        """Tokens of the prompt that neither the instance at `index` nor the pool is known to hold."""
        cached_len = self.cached_lens[index] if self.cached_lens else 0
        return self.prompt_len - max(cached_len, self.pool_hit_len or 0)


class Router(Protocol):
    """A policy: an immutable value whose choice depends on its arguments alone."""

    reads: ClassVar[frozenset[Fact]]
    """The facts that the choice depends on; nobody need gather the others."""

    def choose(self, arrival: Arrival, snapshots: Sequence[Snapshot]) -> int:
        """Index into the non-empty `snapshots` of the instance that takes the request."""


def least(costs: Sequence[float], arrival: Arrival) -> int:
    """Index of the smallest cost; of equal ones the first from `arrival.number` on, cyclically.

    The start of the scan moves on with every request, as in vLLM's DPLBAsyncMPClient, so that a tie favours nobody.
    """
    start = arrival.number % len(costs)
    return min(range(len(costs)), key=lambda index: (costs[index], (index - start) % len(costs)))

"""What an engine may do with the pool for the time being: less than it is set up to do, in an incident."""

from dataclasses import dataclass, replace
from enum import Enum

from kvcore.admission import AdmitLater
from kvcore.plans import PoolPolicy


class Switch(Enum):
    """Whether one use of the pool is allowed."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Access:
    """`reads` off: nothing is looked up and nothing offered. `writes` off: what would be stored is kept in mind.

    It is about what is planned from now on. What is under way ends as it would have, a question at its deadline at the
    latest; an offer made before may still be granted.
    """

    reads: Switch = Switch.ON
    writes: Switch = Switch.ON

    def within(self, other: "Access") -> "Access":
        """What both allow."""
        if self is ALL_ACCESS or other is ALL_ACCESS:  # nearly always, and asked for with every request that waits
            return other if self is ALL_ACCESS else self
        return Access(_both(self.reads, other.reads), _both(self.writes, other.writes))

    def limit(self, policy: PoolPolicy) -> PoolPolicy:
        """What `policy` comes to under this: for `KVRequest.policy` of each request, until the access changes.

        Blocks not stored for it are in `Experience.unsaved`, and are offered when they are touched with writes on.
        """
        if self.reads is Switch.OFF:
            policy = replace(policy, max_load_attempts=0)
        if self.writes is Switch.OFF and policy.stores:
            policy = replace(policy, admission=AdmitLater())
        return policy


def _both(one: Switch, other: Switch) -> Switch:
    return other if one is Switch.ON else one


ALL_ACCESS = Access()
NO_ACCESS = Access(Switch.OFF, Switch.OFF)

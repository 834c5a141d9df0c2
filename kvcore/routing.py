"""Which instance takes a request: a pure choice."""

from dataclasses import dataclass
from typing import Protocol


class Router(Protocol):
    """Chooses among `num_instances` for the n-th arrival (n counts from 0)."""

    def choose(self, arrival: int, num_instances: int) -> int:
        """Index of the instance, in [0, num_instances)."""


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each in turn, whatever they hold."""

    def choose(self, arrival: int, num_instances: int) -> int:
        """The arrival's number modulo the number of instances."""
        return arrival % num_instances

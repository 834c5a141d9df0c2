"""What goes wrong in a scenario: the tables `[[faults]]`."""

from typing import Literal

from kvsim.toml import Count, Table


class FaultConfig(Table):
    """An instance's part of the pool dies, with its memory and disk: its engine, which another process is, does not."""

    kind: Literal["pool_client_dies", "pool_client_returns"]
    """It dies; or it comes back, and lends one empty segment."""
    at_s: Count
    """When, in simulated time."""
    instance: Count

"""What a user says about the worth of what a request stores: how long, and against what, it is to be kept."""

from dataclasses import dataclass
from enum import Enum

from kvcore.errors import require

MAX_PRIORITY = 100


class Pin(Enum):
    """How a store holds on to a block."""

    NONE = "none"
    """Evicted in its turn."""
    SOFT = "soft"
    """Evicted when what is not pinned does not suffice, until its time is over."""
    HARD = "hard"
    """Never evicted; it can be removed."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Advice to the store about the blocks of one request; a store may know less of it, and then does less.

    `pin` and `ttl_ns` are Mooncake 0.3.13's (`ReplicateConfig.soft_pin_action`, `soft_pin_ttl_ms`, `with_hard_pin`;
    github.com/kvcache-ai/Mooncake/issues/3028): a soft pin begins with the write and no read prolongs it. None: for as
    long as the store does by default; 0: not at all. `session` is who pinned: when it ends its pins are released, also
    those of stores that are still under way. `priority`: of blocks pinned alike those of less go first, whatever their
    age; Mooncake has none, 0 to 100 are those of TensorRT-LLM's retention priority.
    """

    session: str | None = None
    pin: Pin = Pin.NONE
    ttl_ns: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        require(self.ttl_ns is None or self.ttl_ns >= 0, "ttl_ns", self.ttl_ns, "at least 0, or None")
        soft = self.ttl_ns is None or self.pin is Pin.SOFT
        require(soft, "ttl_ns", self.ttl_ns, f"None with pin {self.pin.name}: only a soft pin ends by itself")
        valid = 0 <= self.priority <= MAX_PRIORITY
        require(valid, "priority", self.priority, f"0 (gone first) to {MAX_PRIORITY}")


NO_HINTS = Hints()

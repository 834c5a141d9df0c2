"""One request inside an instance: what the engine's scheduler knows about it."""

from dataclasses import dataclass, field
from enum import Enum

from kvcore.gpu_cache import NO_TABLES, Names, Tables
from kvcore.request import KVRequest
from kvcore.types import Segments


class Status(Enum):
    """As the engine names them."""

    WAITING = "waiting"
    LOADING = "waiting for remote KV"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request of `input_len` prompt tokens that ends after `max_tokens` >= 1 generated ones (lengths in tokens).

    `segments` name the content of its full blocks of one hash unit each, prompt and output; `names` the same for the
    blocks of each group, since it was submitted. `kv` is None where there is no pool.
    """

    index: int
    input_len: int
    max_tokens: int
    segments: Segments
    kv: KVRequest | None = None
    status: Status = Status.WAITING
    num_tokens: int = 0
    num_computed: int = 0
    names: Names = ()
    tables: Tables = NO_TABLES
    local_hit_len: int = 0
    external_hit_len: int = 0
    admitted: bool = False
    num_preemptions: int = 0
    end_len: int = field(init=False)
    """Its length when it is complete."""

    def __post_init__(self) -> None:
        self.num_tokens = self.input_len
        self.end_len = self.input_len + self.max_tokens

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.input_len

    @property
    def remaining_output(self) -> int:
        """Tokens it will still generate."""
        return self.end_len - self.num_tokens

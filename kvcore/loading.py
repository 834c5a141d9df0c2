"""Whether a hit in the pool is worth fetching."""

from dataclasses import dataclass
from typing import Protocol

from kvcore.group_runs import GroupRuns


class Loading(Protocol):
    """Weighs a load against computing the same tokens."""

    def worth(self, local_hit_len: int, hit_len: int, blocks: GroupRuns) -> bool:
        """Whether to offer tokens [local_hit_len, hit_len), for which `blocks` would be fetched."""


@dataclass(frozen=True, slots=True)
class LoadAlways:
    """Every hit is fetched."""

    def worth(self, local_hit_len: int, hit_len: int, blocks: GroupRuns) -> bool:
        """Yes."""
        return True

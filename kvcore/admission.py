"""Which computed blocks are worth storing."""

from dataclasses import dataclass
from typing import Protocol

from kvcore.group_runs import GroupRuns


class Admission(Protocol):
    """Chooses among the blocks that a later request could need."""

    def admit(self, blocks: GroupRuns, again: GroupRuns, computed_len: int) -> GroupRuns:
        """The part of `blocks` to store.

        `again`: those whose content this engine has had before, and did not store. `computed_len`: tokens of the
        sequence that are computed. Blocks that are not admitted now are in `again` when they are touched next.
        """


@dataclass(frozen=True, slots=True)
class AdmitAll:
    """Every block is stored."""

    def admit(self, blocks: GroupRuns, again: GroupRuns, computed_len: int) -> GroupRuns:
        """All of them."""
        return blocks

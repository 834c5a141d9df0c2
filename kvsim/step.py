"""One step of an engine: who runs in it, and what deciding it has changed."""

from kvsim.sequence import Sequence


class Step:
    """What runs in one step: (sequence, tokens computed before it, tokens it computes), in the engine's order."""

    __slots__ = ("admitted", "num_stores", "preempted", "scheduled")

    def __init__(self) -> None:
        self.scheduled: list[tuple[Sequence, int, int]] = []
        self.admitted: list[tuple[Sequence, int, int]] = []
        """For the first time, with local and granted external hit (tokens)."""
        self.preempted: list[tuple[Sequence, int]] = []
        """With the computed tokens that are lost."""
        self.num_stores = 0
        """Plans whose bytes leave when the step ends."""

    def is_pure_decode(self) -> bool:
        """Every sequence computes the last token that it generated, and so generates the next one."""
        for sequence, before, _ in self.scheduled:
            if not before + 1 == sequence.num_tokens > sequence.input_len:
                return False
        return True

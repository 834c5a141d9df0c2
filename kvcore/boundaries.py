"""Where a hit may end: prefix lengths that a later request can resume at."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvcore.errors import require
from kvcore.units import align_down


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Every positive multiple of `step` (none when `step` is None), and `extra`, in tokens."""

    step: int | None
    extra: tuple[int, ...] = ()

    def between(self, low: int, high: int) -> Iterator[int]:
        """The boundaries p with low < p <= high, each once, in ascending order."""
        regular = range(align_down(low, self.step) + self.step, high + 1, self.step) if self.step else range(0)
        odd = sorted({p for p in self.extra if low < p <= high and p not in regular})
        if not odd:
            yield from regular
            return
        yield from sorted((*regular, *odd))

    def last(self, low: int, high: int) -> int:
        """The largest boundary p with low < p <= high, or 0."""
        regular = align_down(high, self.step) if self.step else 0
        last = max((regular, *(p for p in self.extra if p <= high)))
        return last if last > low else 0


def hit_boundaries(alignment: int) -> Boundaries:
    """Where a lookup may find a hit, whatever the writer's retention was: every aligned length."""
    return Boundaries(alignment)


def replay_boundary(num_prompt_tokens: int, alignment: int) -> int:
    """Where a request that replays the same prompt resumes: at least one token is computed."""
    return align_down(max(0, num_prompt_tokens - 1), alignment)


def store_boundaries(alignment: int, retention_interval: int | None, num_prompt_tokens: int) -> Boundaries:
    """Which lengths a writer keeps resumable.

    `retention_interval` None: every aligned length. 0: only the replay boundary of this prompt. k > 0 (a multiple of
    `alignment`): every k tokens, and the replay boundary.
    """
    if retention_interval is None:
        return Boundaries(alignment)
    valid = retention_interval >= 0 and retention_interval % alignment == 0
    require(valid, "retention_interval", retention_interval, f"None, 0 or a positive multiple of {alignment} tokens")
    return Boundaries(retention_interval or None, (replay_boundary(num_prompt_tokens, alignment),))

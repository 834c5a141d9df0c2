"""Where a hit may end: prefix lengths that a later request can resume at."""

from dataclasses import dataclass

from kvcore.errors import require
from kvcore.spec import ModelSpec
from kvcore.units import align_down


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Every positive multiple of `step` (none when `step` is None), and `extra`, in tokens."""

    step: int | None
    extra: tuple[int, ...] = ()

    def regular(self, low: int, high: int) -> range:
        """The multiples of `step` p with low < p <= high."""
        return range(align_down(low, self.step) + self.step, high + 1, self.step) if self.step else range(0)

    def odd(self, low: int, high: int) -> list[int]:
        """The other boundaries there, each once, ascending."""
        regular = self.regular(low, high)
        return sorted({p for p in self.extra if low < p <= high and p not in regular})

    def last(self, low: int, high: int) -> int:
        """The largest boundary p with low < p <= high, or 0."""
        regular = align_down(high, self.step) if self.step else 0
        last = max((regular, *(p for p in self.extra if p <= high)))
        return last if last > low else 0


def hit_boundaries(model: ModelSpec) -> Boundaries:
    """Where a lookup may find a hit, whatever the writer's retention was: every length a hit may have."""
    return Boundaries(model.hit_step)


def replay_boundaries(model: ModelSpec, num_prompt_tokens: int) -> tuple[int, ...]:
    """Where the engine resumes a request that begins with the same prompt.

    Without a draft head: the last hit length that leaves a token to compute. With one the engine gives up one step
    of hits, of the same prompt sent again and of a longer one; these differ when the prompt ends on a boundary.
    """
    resent = align_down(max(0, num_prompt_tokens - 1), model.hit_step)
    if not any(model.margins):
        return (resent,)
    extended = align_down(num_prompt_tokens, model.hit_step)
    return tuple(sorted({max(0, length - model.hit_step) for length in (resent, extended)}))


def store_boundaries(model: ModelSpec, retention_interval: int | None, num_prompt_tokens: int) -> Boundaries:
    """Which lengths a writer keeps resumable.

    `retention_interval` None: every length a hit may have. 0: only the replay boundaries of this prompt. k > 0 (a
    multiple of the alignment): every k tokens, and the replay boundaries.
    """
    if retention_interval is None:
        return hit_boundaries(model)
    valid = retention_interval >= 0 and retention_interval % model.alignment == 0
    bound = f"None, 0 or a positive multiple of {model.alignment} tokens"
    require(valid, "retention_interval", retention_interval, bound)
    return Boundaries(retention_interval or None, replay_boundaries(model, num_prompt_tokens))

"""How an engine fills its own prefix cache, and what happens to a sequence in it."""

from dataclasses import dataclass

from kvcore.engine.hit import Tails
from kvcore.engine.masks import require_retention
from kvcore.engine.model import EngineModel, Side
from kvcore.errors import require
from kvcore.spec import Recurrent
from kvcore.types import Runs
from kvcore.units import align_down


@dataclass(frozen=True, slots=True)
class Writer:
    """The engine's settings that decide what enters its prefix cache; lengths in tokens.

    Recurrent groups work in align mode: a state is kept where a chunk ends.
    """

    engine: EngineModel
    retention: int | None = None
    """None (every boundary), 0 (the prompt's alone) or a multiple of the alignment."""
    num_reprefilled: int = 0
    """The last tokens that a draft head of several modules computes again: those that it looks ahead, less one."""
    num_draft_states: int = 0
    """Blocks that a recurrent group keeps behind its state for drafts."""
    checkpoint_step: int | None = None
    """The last chunk of a prefill also saves a state inside it, multiples of this behind its start; None: it cannot."""
    stops_at_junctions: bool = False
    """Whether a state at a junction inside a block is entered as well; with a draft head where hits split blocks."""

    def __post_init__(self) -> None:
        require(self.engine.side is Side.GPU, "engine", self.engine.side, f"{Side.GPU}: the engine's own cache")
        require_retention(self.engine, self.retention)
        step = self.checkpoint_step
        require(step is None or step > 0, "checkpoint_step", step, "None or at least 1")
        marked = any(isinstance(self.engine.specs[group], Recurrent) for group in self.engine.eagle_groups)
        settles = not (self.num_reprefilled and marked)
        require(settles, "num_reprefilled", self.num_reprefilled, "0: vLLM enters a state under another one's length")

    def prompt_boundary(self, num_tokens: int, step: int) -> int:
        """The longest multiple of `step` at which a resent prompt of `num_tokens` can find a state; 0: nowhere.

        One token is always computed; a draft head computes a whole step more.
        """
        drafts = self.engine.has_drafts
        return max(0, align_down(num_tokens - (not drafts), step) - step * drafts)

    @property
    def enters_junctions(self) -> bool:
        """Whether `stops_at_junctions` means anything here."""
        engine = self.engine
        possible = engine.has_drafts and engine.model.splits_blocks and not self.num_reprefilled
        return self.stops_at_junctions and possible


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a sequence begins, or begins anew after a preemption; in tokens."""

    num_prompt_tokens: int
    hit_len: int = 0
    """What it found in the engine's cache."""
    loaded_len: int = 0
    """What is loaded behind that from elsewhere."""
    junction: int | None = None
    """Where another sequence left this one's prefix, as the lookup noticed; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine: tokens [start, end) of a sequence of which `num_tokens` are known.

    Tokens beyond those are drafts, which may be rejected: the next step may start before `end`.
    """

    start: int
    end: int
    num_tokens: int
    num_in_flight: int = 0
    """Tokens before `start` whose step has not ended."""

    @property
    def settled_len(self) -> int:
        """Tokens whose step has ended: blocks that only they read can be given up."""
        return max(0, self.start - self.num_in_flight)


@dataclass(frozen=True, slots=True)
class Entries:
    """The keys of one group in the cache, as `kvcore.engine.hit` takes them."""

    blocks: Runs = ()
    """Full blocks."""
    tails: Tails = ()
    """Lengths inside a block."""

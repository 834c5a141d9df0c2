"""The bounds of one engine."""

from dataclasses import dataclass

from kvcore.engine.blocks import longest_sequence
from kvcore.errors import require
from kvcore.gpu_cache import GpuCache, gpu_cache
from kvcore.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's own bounds on one step and on its memory; `num_blocks` leaves out the engine's null block."""

    model: ModelSpec
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int = 0
    retention: int | None = 0
    """Tokens between the lengths that groups with windows or states keep resumable; see `kvcore.engine.masks`."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")

    @property
    def block_size(self) -> int:
        """Tokens of the blocks by which content is named."""
        return self.model.hashed_step

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence, prompt and output, that the cache can hold."""
        return longest_sequence(self.model, self.num_blocks, self.max_num_batched_tokens)

    def make_cache(self) -> GpuCache:
        """An empty one with these bounds."""
        batch, longest = self.max_num_batched_tokens, self.capacity_tokens
        return gpu_cache(self.model, self.num_blocks, batch, longest, self.retention)

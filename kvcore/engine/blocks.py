"""How many blocks a sequence takes, in vLLM's count, and where its chunks end (vLLM 0.32)."""

from kvcore.errors import require
from kvcore.spec import ChunkedLocal, GroupSpec, ModelSpec, SlidingWindow
from kvcore.units import align_down, div_ceil

LONGEST = 2**40
"""Tokens of a sequence of a model that needs only so much of the past; a bound for a search."""


def admission_cap(spec: GroupSpec, max_num_new_tokens: int, max_len: int) -> int | None:
    """Blocks that a sequence is thought to hold at most, where the group gives blocks back; None: there is no bound.

    At most `max_num_new_tokens` are computed in a step, and `max_len` in all.
    """
    match spec:
        case SlidingWindow():
            kept_len = spec.window - 1 + spec.extra_retained_tokens
            return div_ceil(min(kept_len + max_num_new_tokens, max_len), spec.block_size) + 1
        case ChunkedLocal():
            return div_ceil(min(spec.chunk + max_num_new_tokens, max_len), spec.block_size)
    return None


def longest_sequence(model: ModelSpec, num_blocks: int, max_num_new_tokens: int) -> int:
    """Tokens of the longest sequence that `num_blocks` can hold, all groups together, at every one of its steps."""
    fits, fails = 0, LONGEST
    while fails - fits > 1:
        length = (fits + fails) // 2
        if sum(_most_held(spec, length, max_num_new_tokens) for spec in model.groups) <= num_blocks:
            fits = length
        else:
            fails = length
    return fits


def _most_held(spec: GroupSpec, length: int, max_num_new_tokens: int) -> int:
    num_blocks = div_ceil(length, spec.block_size)
    if not spec.positional:
        return min(num_blocks, 2)  # a state, and the one that a step makes of it
    cap = admission_cap(spec, max_num_new_tokens, length)
    return num_blocks if cap is None else min(num_blocks, cap)


def chunk_end(
    block_size: int, start: int, end: int, num_prompt_tokens: int, num_tokens: int, junction: int | None, max_chunk: int
) -> int:
    """Where a chunk [start, end) of a model with recurrent groups ends so that states are made where hits can end.

    Of a sequence of `num_tokens`, `num_prompt_tokens` of them its prompt; all groups have blocks of one size. States
    are kept at ends of blocks, so a chunk ends at one, and at the last one a resent sequence can use, and where another
    sequence left this one's prefix (`junction`). `start`: no chunk can be computed with so few tokens.
    """
    prefill_end = max(num_prompt_tokens, num_tokens - 1)
    if start >= prefill_end:
        return end
    if end < prefill_end:
        aligned_end = align_down(end, block_size)
        # A block that is longer than any chunk is computed in parts.
        end = aligned_end if aligned_end > start or block_size <= max_chunk else end
    stops = [align_down(num_tokens - 1, block_size)]
    if start % block_size:
        stops.append(align_down(start, block_size) + block_size)
    if junction is not None and start < junction < end:
        stops.append(start + align_down(junction - start, block_size))
    return max(start, min([stop for stop in stops if start < stop < end], default=end))


def require_simulated(model: ModelSpec) -> None:
    """Raise InvalidArgument for a model whose cache on the GPU `kvcore.gpu_cache` does not reproduce."""
    require(not model.eagle_groups, "eagle_groups", sorted(model.eagle_groups), "none: no draft head is simulated")
    require(not model.splits_blocks, "hit_unit", model.hit_step, f"{model.alignment}: hits end at ends of blocks")
    for spec in model.groups:
        require(spec.cacheable, "groups", spec, "groups that can be cached: no scratch is simulated")
        whole = not isinstance(spec, ChunkedLocal) or spec.chunk % spec.block_size == 0
        require(whole, "groups", spec, "chunks of whole blocks")
        retains = isinstance(spec, SlidingWindow) and spec.extra_retained_tokens > 0
        require(not retains, "groups", spec, "no extra_retained_tokens: no draft head is simulated")
        aligned = spec.positional or all(other.block_size == spec.block_size for other in model.groups)
        require(aligned, "groups", spec, "one block size beside recurrent groups, as vLLM makes them in align mode")

"""The hit length that vLLM finds, on runs (`find_longest_cache_hit` of both coordinators and of every manager)."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter
from typing import NamedTuple

from kvcore.engine.masks import lookup_runs
from kvcore.engine.model import EngineModel, MergedGroup, window_blocks
from kvcore.errors import require
from kvcore.runs import intersect
from kvcore.spec import ChunkedLocal, SlidingWindow
from kvcore.types import Runs
from kvcore.units import align_down

Tails = tuple[int, ...]
"""Ascending lengths in tokens, no multiples of the block size, at which a block that is not full has a key."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """What all groups of one spec have."""

    group: MergedGroup
    step: int
    """Hits of all groups together end on its multiples."""
    blocks: Runs
    tails: Tails

    @property
    def margin(self) -> int:
        """Tokens that it matches beyond a hit, and drops, for a draft head."""
        return min(self.group.spec.block_size, self.step) if self.group.peeks else 0


class Found(NamedTuple):
    """What a lookup finds, in tokens."""

    hit_len: int
    junction: int | None
    """Longest length that some group allowed on the way to a shorter hit: there another sequence left this one's
    prefix, and sparse groups keep what a hit there needs. None: the hit is as long."""


def hit_len(
    engine: EngineModel, present: Sequence[Runs], limit: int, hashed_len: int, tails: Sequence[Tails] = ()
) -> int:
    """Tokens that the engine takes as computed; see `find`."""
    return find(engine, present, limit, hashed_len, tails).hit_len


def find(
    engine: EngineModel, present: Sequence[Runs], limit: int, hashed_len: int, tails: Sequence[Tails] = ()
) -> Found:
    """Tokens that the engine takes as computed, at most `limit`, and the junction.

    `present` holds, per group of the model, the full blocks that have a key; `tails`, where hits end inside blocks,
    the keys of blocks that are not full. `hashed_len`: tokens of the sequence that have a block hash.
    """
    unit = engine.model.hashed_step
    require(align_down(limit, unit) <= hashed_len, "limit", limit, f"less than {hashed_len + unit}: no hash beyond")
    found = tuple(_keys(engine, group, present, tails) for group in engine.merged)
    if engine.alone:
        return Found(_group_hit_len(found[0], limit, found[0].margin), None)
    return _agreed(engine, found, limit, hashed_len)


def pool_hit_len(
    engine: EngineModel, present: Sequence[Runs], num_tokens: int, hashed_len: int, tails: Sequence[Tails] = ()
) -> int:
    """What the connector's lookup answers for a sequence of `num_tokens` when the pool holds `present` and `tails`.

    It asks for the aligned length only, and what it does not ask for is not there. A hit of the whole sequence is
    looked up once more, so that a token is left to compute.
    """
    step = engine.model.hit_step
    aligned_len = align_down(num_tokens, step)
    known, known_tails = _asked(engine, present, aligned_len), [_up_to(ends, aligned_len) for ends in tails]
    hit = hit_len(engine, known, aligned_len, hashed_len, known_tails)
    if hit < num_tokens or not hit:
        return hit
    return hit_len(engine, known, align_down(num_tokens - 1, step), hashed_len, known_tails)


def _asked(engine: EngineModel, present: Sequence[Runs], aligned_len: int) -> list[Runs]:
    """Where hits end inside blocks, everything is asked for."""
    ends = (((0, aligned_len // spec.block_size),) for spec in engine.specs)
    masks = (None for _ in engine.specs) if engine.model.splits_blocks else lookup_runs(engine, aligned_len)
    return [
        intersect(runs, end if mask is None else mask) for runs, end, mask in zip(present, ends, masks, strict=True)
    ]


def _up_to(tails: Tails, length: int) -> Tails:
    return tails[: bisect_right(tails, length)]


def _keys(engine: EngineModel, group: MergedGroup, present: Sequence[Runs], tails: Sequence[Tails]) -> _Keys:
    blocks = reduce(intersect, (present[index] for index in group.groups))
    shared = set.intersection(*(set(tails[index]) for index in group.groups)) if tails else set()
    return _Keys(group, engine.model.hit_step, blocks, tuple(sorted(shared)))


def _agreed(engine: EngineModel, found: tuple[_Keys, ...], limit: int, hashed_len: int) -> Found:
    """Each group lowers the candidate of the one before, until a round lowers nothing.

    A draft group's peek is paid for once: in later rounds it counts as proven, until a lookup without a peek lowers
    the candidate. That it was proven at a longer length is the engine's mistake, kept here.
    """
    trimmed: dict[int, int] = {}
    proven: set[int] = set()
    candidate, longest = limit, 0
    while True:
        length = candidate
        for index, keys in enumerate(found):
            if index in trimmed:
                length = min(length, trimmed[index])
                continue
            unproven = keys.group.drafts and index not in proven
            margin = keys.margin if unproven else 0
            allowed = _group_hit_len(keys, min(length + margin, hashed_len) if margin else length, margin)
            if unproven:
                proven.add(index)
            elif allowed < length:
                proven.clear()
            length = allowed
            longest = max(longest, length)
            if keys.group.reads_all:
                trimmed[index] = allowed
        lowered, candidate = length < candidate, min(length, candidate)
        if not lowered or engine.one_pass:
            return Found(candidate, longest if longest > candidate else None)


def _group_hit_len(keys: _Keys, top: int, margin: int) -> int:
    """What one manager finds in the first `top` tokens, less the `margin` that a draft head must see again."""
    match keys.group.spec:
        case SlidingWindow() as spec:
            return _window_hit_len(spec, keys, top, margin)
        case ChunkedLocal() as spec:
            return _chunk_hit_len(spec, keys, top)
    return _full_hit_len(keys, top, margin) if keys.group.reads_all else _state_hit_len(keys, top)


def _full_hit_len(keys: _Keys, top: int, margin: int) -> int:
    size = keys.group.spec.block_size
    first_run_end = keys.blocks[0][1] if keys.blocks and keys.blocks[0][0] == 0 else 0
    length = min(first_run_end, top // size) * size
    if keys.step < size:
        length = max(length, _last_tail(keys, min(top, length + size - 1)))
    return align_down(max(0, length - margin), keys.step)


def _state_hit_len(keys: _Keys, top: int) -> int:
    size = keys.group.spec.block_size
    per_step = max(1, keys.step // size)
    in_tail = _last_tail(keys, top) if keys.step < size else 0
    for start, end in reversed(keys.blocks[: bisect_left(keys.blocks, (top // size,))]):
        last = align_down(min(end, top // size), per_step)
        if last > start:
            return max(in_tail, last * size)
    return in_tail


def _last_tail(keys: _Keys, top: int) -> int:
    index = bisect_right(keys.tails, top)
    return keys.tails[index - 1] if index else 0


def _window_hit_len(spec: SlidingWindow, keys: _Keys, top: int, margin: int) -> int:
    """From the right, the first chain of enough blocks whose end, less the dropped one, is aligned.

    A window of one token asks for one block all the same. A chain that reaches block 0 counts however short it is;
    with a draft head it is aligned, dropped and aligned again.
    """
    size, shift = spec.block_size, margin // spec.block_size
    per_step, needed = keys.step // size, max(1, window_blocks(spec) + shift)
    for start, end in reversed(keys.blocks[: bisect_left(keys.blocks, (top // size,))]):
        last = align_down(min(end, top // size) - shift, per_step) + shift
        if last <= start:
            continue
        if last - needed >= start:
            return (last - shift) * size
        if start == 0:
            length = align_down(last, per_step)
            return align_down(max(0, length - shift), per_step) * size
    return 0


def _chunk_hit_len(spec: ChunkedLocal, keys: _Keys, top: int) -> int:
    """From the start of the chunk of token `top`; blocks before it count as there, those after a gap do not."""
    start, last = align_down(top, spec.chunk) // spec.block_size, top // spec.block_size
    index = bisect_right(keys.blocks, start, key=itemgetter(0))
    run_end = keys.blocks[index - 1][1] if index else 0
    return max(start, min(run_end, last)) * spec.block_size

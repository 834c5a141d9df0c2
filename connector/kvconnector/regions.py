"""Which bytes vLLM's own connector (MooncakeStoreConnector, 0.32) stores as a block's value; pure arithmetic.

It takes the KV cache as a list of *regions*: memory in which the blocks lie one after the other without a gap, whatever
is between their bytes. A block's value is that block of every region, in the order in which the engine shows its
layers; groups are not told apart, since the groups of one engine share their memory, block by block.

    region        | block 0 | block 1 | block 2 | ...         one per layer, per head and layer, or one for all layers
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvconnector.layout import CacheView, GroupLayout, Piece
from kvcore.errors import InvalidArgument

NO_REGION = 'not stored as MooncakeStoreConnector does it: set key_format to "kvtwin"'


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A view with one axis more where a block is several kernel blocks: axis 0 counts the engine's blocks."""

    view: CacheView
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Whether a block has no gap, in whatever order its axes lie."""
        return _is_dense(self.shape[1:], self.strides_bytes[1:], self.view.item_bytes)

    @property
    def size_bytes(self) -> int:
        """What a block's items take."""
        return math.prod(self.shape[1:]) * self.view.item_bytes


def region_layouts(
    views: Mapping[str, Sequence[CacheView]], groups: Sequence[Sequence[str]], num_blocks: int
) -> tuple[GroupLayout, ...]:
    """Equal layouts, one per group; `views` in the engine's order. A recurrent layer's states count as the first one.

    Raises InvalidArgument where that connector fails, or would write into blocks that were not meant.
    """
    layers = {layer for group in groups for layer in group}
    pieces: dict[int, Piece] = {}
    for layer, (view, *_) in views.items():
        for piece in _regions(view, num_blocks) if layer in layers else ():
            known = pieces.setdefault(piece.address, piece)
            _check(view, known == piece, f"blocks of one length at {piece.address:#x}")
    layout = GroupLayout(tuple(pieces.values()), num_blocks)
    _require_disjoint(layout)
    return (layout,) * len(groups)


def _regions(view: CacheView, num_blocks: int) -> list[Piece]:
    blocks = _by_block(view, num_blocks)
    start, size_bytes = view.allocation
    stride_bytes = blocks.strides_bytes[0]
    if not blocks.dense:
        regions = _regions_of_heads(blocks)
    else:
        _check(view, blocks.size_bytes <= stride_bytes, "blocks no longer than the way to the next one")
        whole = stride_bytes * num_blocks == size_bytes
        regions = [Piece(start if whole else view.address, stride_bytes, stride_bytes)]
    for region in regions:
        inside = start <= region.address and region.address + num_blocks * stride_bytes <= start + size_bytes
        _check(view, inside, f"{num_blocks} x {stride_bytes} bytes inside {size_bytes}")
    return regions


def _regions_of_heads(blocks: _Blocks) -> list[Piece]:
    """Axis 1 of a block is its heads, or its kernel blocks, in which that connector then finds no dense bytes."""
    view, stride_bytes = blocks.view, blocks.strides_bytes[0]
    dense = len(blocks.shape) > 1 and _is_dense(blocks.shape[2:], blocks.strides_bytes[2:], view.item_bytes)
    _check(view, dense, "blocks without gaps, or heads without gaps in blocks that are not split")
    step_bytes = blocks.strides_bytes[1]
    return [Piece(view.address + head * step_bytes, stride_bytes, stride_bytes) for head in range(blocks.shape[1])]


def _by_block(view: CacheView, num_blocks: int) -> _Blocks:
    count, stride_bytes = view.shape[0], view.strides_bytes[0]
    _check(view, count and count % num_blocks == 0, f"axis 0 to be a multiple of {num_blocks} blocks")
    split = count // num_blocks
    if split == 1:
        return _Blocks(view, view.shape, view.strides_bytes)
    shape = (num_blocks, split, *view.shape[1:])
    return _Blocks(view, shape, (split * stride_bytes, stride_bytes, *view.strides_bytes[1:]))


def _is_dense(shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int) -> bool:
    expected_bytes = item_bytes
    for stride_bytes, size in sorted(zip(strides_bytes, shape, strict=True)):
        if size == 1:
            continue
        if stride_bytes != expected_bytes:
            return False
        expected_bytes *= size
    return True


def _require_disjoint(layout: GroupLayout) -> None:
    """A region is all that lies between its first and last block; a load into one must not touch another."""
    pieces = sorted(layout.pieces, key=lambda piece: piece.address)
    for piece, after in itertools.pairwise(pieces):
        end = piece.address + layout.num_blocks * piece.stride_bytes
        if end > after.address:
            raise InvalidArgument("KV cache regions", (piece, after), f"apart; they overlap, and are {NO_REGION}")


def _check(view: CacheView, holds: object, expected: str) -> None:
    if not holds:
        raise InvalidArgument(
            f"KV cache of {view.layer}", (view.shape, view.strides_bytes), f"{expected}; {NO_REGION} (bytes)"
        )

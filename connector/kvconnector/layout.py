"""Where a block's bytes lie: pure arithmetic on addresses, shapes and strides.

The bytes of one block of one group are written one after the other: layer by layer in the group's order and, inside a
layer, axis by axis from the outermost in memory to the innermost. That order does not depend on how the attention
kernel cuts a block into kernel blocks, or on what lies between the blocks.

    one layer, block b:   address + b * stride  |<-- run -->|   gap   |<-- run -->|   ...  (one piece per run)
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcore.errors import InvalidArgument, require

MAX_PIECES = 4_096
"""More pieces in one block than this would move a few bytes each; such a layout is refused."""


@dataclass(frozen=True, slots=True)
class CacheView:
    """One layer's KV cache as the engine shows it: axis 0 counts blocks (or kernel blocks), strides are in bytes.

    `allocation` is (address, size in bytes) of the memory that it is a view of.
    """

    layer: str
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    allocation: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of every block: block b has it at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the blocks of one group lie; a block's value is its pieces in order."""

    pieces: tuple[Piece, ...]
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Length of one block's value."""
        return sum(piece.size_bytes for piece in self.pieces)

    def locate(self, block_id: int) -> list[tuple[int, int]]:
        """(address, size) of the block's pieces, in the order in which their bytes are stored."""
        assert 0 <= block_id < self.num_blocks, (block_id, self.num_blocks)
        return [(piece.address + block_id * piece.stride_bytes, piece.size_bytes) for piece in self.pieces]


def group_layouts(
    views: Mapping[str, Sequence[CacheView]], groups: Sequence[Sequence[str]], num_blocks: int
) -> tuple[GroupLayout, ...]:
    """`group_layout` of each group, which is a list of layers."""
    return tuple(group_layout([view for layer in layers for view in views[layer]], num_blocks) for layers in groups)


def group_layout(views: Sequence[CacheView], num_blocks: int) -> GroupLayout:
    """The layout of a group whose layers have these views, in the group's order; layers that share a cache count once.

    Raises InvalidArgument for a view whose blocks cannot be proven to be separate bytes.
    """
    require(views, "views", views, "at least one layer with a KV cache")
    distinct = {(view.address, view.shape, view.strides_bytes): view for view in views}
    pieces = [piece for view in distinct.values() for piece in _pieces(view, num_blocks)]
    return GroupLayout(tuple(pieces), num_blocks)


def _pieces(view: CacheView, num_blocks: int) -> list[Piece]:
    axes, block_stride_bytes = _block_axes(view, num_blocks)
    run_bytes, outer = _innermost_run(axes, view.item_bytes)
    _require_separate(view, run_bytes, [*outer, (num_blocks, block_stride_bytes)])
    num_pieces = math.prod(size for size, _ in outer)
    _check(view, num_pieces <= MAX_PIECES, f"at most {MAX_PIECES} pieces in a block, not {num_pieces}")
    steps = [[index * stride_bytes for index in range(size)] for size, stride_bytes in outer]
    return [
        Piece(view.address + sum(offsets_bytes), block_stride_bytes, run_bytes)
        for offsets_bytes in itertools.product(*steps)
    ]


_Axis = tuple[int, int]
"""(size, stride in bytes)."""


def _block_axes(view: CacheView, num_blocks: int) -> tuple[list[_Axis], int]:
    """The axes of one block from the outermost in memory to the innermost, and the bytes from block to block.

    A block of several kernel blocks has one axis more: the kernel blocks continue the token axis, so that axis comes
    right before it.
    """
    count = view.shape[0]
    _check(view, min(view.shape) > 0 and count % num_blocks == 0, f"axis 0 to be a multiple of {num_blocks} blocks")
    inner = sorted(zip(view.shape[1:], view.strides_bytes[1:], range(1, len(view.shape)), strict=True), key=_by_stride)
    axes = [(size, stride_bytes) for size, stride_bytes, _ in inner]
    kernel_blocks = count // num_blocks
    if kernel_blocks > 1:
        # Logical axes are [block, head, token, content]; only there is it known which axis counts tokens.
        _check(view, len(view.shape) == 4, "four axes when a block is several kernel blocks")
        token = next(index for index, (_, _, axis) in enumerate(inner) if axis == 2)
        axes.insert(token, (kernel_blocks, view.strides_bytes[0]))
    return axes, view.strides_bytes[0] * kernel_blocks


def _by_stride(axis: tuple[int, int, int]) -> tuple[int, int]:
    _, stride_bytes, index = axis
    return (-stride_bytes, index)


def _innermost_run(axes: list[_Axis], item_bytes: int) -> tuple[int, list[_Axis]]:
    """Bytes in one contiguous run, and the axes that are left around it."""
    run_bytes, outer = item_bytes, [axis for axis in axes if axis[0] > 1]
    while outer and outer[-1][1] == run_bytes:
        run_bytes *= outer.pop()[0]
    return run_bytes, outer


def _require_separate(view: CacheView, run_bytes: int, axes: list[_Axis]) -> None:
    """Each step along an axis must clear everything that the axes of smaller stride span."""
    span_bytes = run_bytes
    for size, stride_bytes in sorted(axes, key=lambda axis: axis[1]):
        _check(view, size == 1 or stride_bytes >= span_bytes, "axes that do not overlap")
        span_bytes += (size - 1) * stride_bytes


def _check(view: CacheView, holds: object, expected: str) -> None:
    if not holds:
        raise InvalidArgument(f"KV cache of {view.layer}", (view.shape, view.strides_bytes), f"{expected} (bytes)")

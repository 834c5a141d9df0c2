"""Blocks are found byte by byte in every layout, mean the same in every engine of one layout, and never overlap."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector.layout import MAX_PIECES, CacheView, GroupLayout, Piece, group_layout

from kvcore.errors import InvalidArgument

ITEM_BYTES = 4  # every item is a number of its own


@dataclass
class Cache:
    """One layer of an engine: logical axes [kernel block, head, token, content] somewhere in memory."""

    memory: np.ndarray
    logical: np.ndarray
    num_blocks: int
    heads_first: bool
    base: int = 0x7000_0000_0000

    def view(self, layer="layer"):
        address = self.base + self.logical.__array_interface__["data"][0] - self.memory.__array_interface__["data"][0]
        allocation = (self.base, self.memory.nbytes)
        return CacheView(layer, address, self.logical.shape, self.logical.strides, ITEM_BYTES, allocation)

    def block(self, block):
        """The block's items in the order of the layout, whatever its kernel blocks: [head, token, content] or
        [token, head, content]."""
        ratio = self.logical.shape[0] // self.num_blocks
        split = self.logical[block * ratio : (block + 1) * ratio]  # [r, head, token, content]
        order = (1, 0, 2, 3) if self.heads_first else (0, 2, 1, 3)
        return split.transpose(order).ravel()

    def read(self, pieces):
        start = self.memory.view(np.uint8)
        return np.concatenate([start[a - self.base : a - self.base + size] for a, size in pieces]).view(np.uint32)

    def write(self, pieces, items):
        start, data, done = self.memory.view(np.uint8), items.view(np.uint8), 0
        for address, size in pieces:
            start[address - self.base : address - self.base + size] = data[done : done + size]
            done += size


def make_cache(num_blocks, ratio, heads, tokens, content, *, heads_first, blocks_inside_heads=False, pads=(0, 0)):
    """A cache in one of the engine's physical orders, with `pads` unused items before it and between blocks."""
    inner = ["H", "N", "C"] if heads_first else ["N", "H", "C"]
    order = ["H", "B", "N", "C"] if blocks_inside_heads else ["B", *inner]
    size = {"B": num_blocks * ratio, "H": heads, "N": tokens, "C": content}
    stride, step = {}, 1
    for axis in reversed(order):
        stride[axis] = step
        step *= size[axis]
        if axis == order[order.index("B") + 1]:
            step += pads[1] if ratio == 1 else 0
    memory = np.zeros(pads[0] + step + pads[1], np.uint32)
    strides = [stride[axis] * ITEM_BYTES for axis in "BHNC"]
    logical = np.lib.stride_tricks.as_strided(memory[pads[0] :], [size[axis] for axis in "BHNC"], strides)
    logical[...] = np.arange(1, logical.size + 1).reshape(logical.shape)
    return Cache(memory, logical, num_blocks, heads_first)


sizes = st.integers(1, 3)


@st.composite
def caches(draw, shape=None, heads_first=None):
    """A cache whose blocks hold heads x tokens x content items, cut into any number of kernel blocks."""
    heads, tokens, content = shape or (draw(sizes), draw(st.sampled_from([2, 4, 6])), draw(sizes))
    ratio = draw(st.sampled_from([1, 2]))
    first = draw(st.booleans()) if heads_first is None else heads_first
    return make_cache(
        draw(sizes),
        ratio,
        heads,
        tokens // ratio,
        content,
        heads_first=first,
        blocks_inside_heads=first and draw(st.booleans()),
        pads=(draw(sizes), draw(st.integers(0, 2))),
    )


@given(caches())
def test_a_block_s_pieces_are_its_items_in_order(cache):
    layout = group_layout([cache.view()], cache.num_blocks)
    for block in range(cache.num_blocks):
        assert cache.read(layout.locate(block)).tolist() == cache.block(block).tolist()


@given(st.data())
def test_what_one_engine_wrote_another_one_reads_wherever_its_blocks_lie(data):
    shape = data.draw(st.tuples(sizes, st.sampled_from([2, 4, 6]), sizes))
    heads_first = data.draw(st.booleans())
    writer, reader = (data.draw(caches(shape, heads_first)) for _ in range(2))
    source = data.draw(st.integers(0, writer.num_blocks - 1))
    target = data.draw(st.integers(0, reader.num_blocks - 1))
    before = [reader.block(block).tolist() for block in range(reader.num_blocks)]
    value = writer.read(group_layout([writer.view()], writer.num_blocks).locate(source))
    reader.write(group_layout([reader.view()], reader.num_blocks).locate(target), value)
    for block in range(reader.num_blocks):
        expected = writer.block(source).tolist() if block == target else before[block]
        assert reader.block(block).tolist() == expected


def test_control_blocks_taken_to_be_contiguous_are_wrong():
    cache = make_cache(3, 1, 2, 4, 3, heads_first=True, blocks_inside_heads=True)
    view = cache.view()
    naive = GroupLayout((Piece(view.address, view.strides_bytes[0], 2 * 4 * 3 * ITEM_BYTES),), 3)
    assert cache.read(naive.locate(1)).tolist() != cache.block(1).tolist()


def test_control_the_token_axis_of_kernel_blocks_matters():
    """Kernel blocks one after the other, each [head, token, content], are not the block's [head, token, content]."""
    split = make_cache(2, 2, 2, 2, 1, heads_first=True)
    whole = make_cache(2, 1, 2, 4, 1, heads_first=True)
    in_memory_order = split.logical[:2].ravel()
    value = split.read(group_layout([split.view()], 2).locate(0))
    assert value.tolist() == split.block(0).tolist() != in_memory_order.tolist()
    assert group_layout([split.view()], 2).block_bytes == group_layout([whole.view()], 2).block_bytes


def test_dense_blocks_are_one_piece_and_layers_keep_their_order():
    first, second = make_cache(4, 1, 2, 8, 4, heads_first=True), make_cache(4, 2, 2, 4, 4, heads_first=False)
    second.base += 1 << 32
    layout = group_layout([second.view("b"), first.view("a")], 4)
    assert [piece.address for piece in layout.pieces] == [second.view().address, first.view().address]
    assert layout.block_bytes == 2 * 2 * 8 * 4 * ITEM_BYTES
    assert layout.locate(3)[0] == (second.view().address + 3 * 2 * 8 * 4 * ITEM_BYTES, 2 * 8 * 4 * ITEM_BYTES)


def test_layers_that_share_a_cache_are_stored_once():
    cache = make_cache(2, 1, 1, 2, 2, heads_first=True)
    assert len(group_layout([cache.view("a"), cache.view("shares a")], 2).pieces) == 1


def view(shape, strides, item_bytes=2):
    return CacheView("model.layers.0", 1 << 40, shape, strides, item_bytes, (1 << 40, 1 << 30))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (view((4, 2, 8), (16, 0, 2)), "overlap"),
        (view((4, 2, 8), (16, 16, 2)), "overlap"),
        (view((4, 2, 8), (31, 16, 2)), "overlap"),
        (view((5, 2, 8), (32, 16, 2)), "multiple of 4"),
        (view((8, 2, 8), (32, 16, 2)), "four axes"),
        (view((0, 2, 8), (32, 16, 2)), "multiple of 4"),
        (view((4, MAX_PIECES + 1, 8), (1 << 20, 32, 2)), "pieces"),
    ],
)
def test_what_cannot_be_proven_is_refused(refused, why):
    with pytest.raises(InvalidArgument, match=why) as error:
        group_layout([refused], 4)
    assert "model.layers.0" in str(error.value)


def test_a_group_without_layers_is_refused():
    with pytest.raises(InvalidArgument, match="views"):
        group_layout([], 4)

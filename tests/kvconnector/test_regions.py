"""Values of vLLM's MooncakeStoreConnector: the same addresses and lengths as its own code gives, or a refusal."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector.config import ConnectorConfig
from kvconnector.keys import InTreeFormat, Place
from kvconnector.layout import CacheView, group_layouts
from kvconnector.pool_config import PoolConfig
from kvconnector.regions import region_layouts

from kvcore.errors import InvalidArgument
from kvcore.keys import Namespace
from kvcore.spec import FullAttention, ModelSpec

pytestmark = pytest.mark.engine

# The physical orders that vLLM knows, of layer, block, head, token and content.
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
WORKING = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC")


def allocate(order, num_layers, num_blocks, split, heads, tokens, content, pads=(0, 0)):
    """Views of each layer on one allocation with `pads` unused items before and behind it, as vLLM makes them."""
    import torch

    size = {"L": num_layers, "B": num_blocks * split, "H": heads, "N": tokens, "C": content}
    stride, step = {}, 1
    for axis in reversed(order):
        stride[axis] = step
        step *= size[axis]
    memory = torch.zeros(pads[0] + step + pads[1], dtype=torch.float32)
    shape, strides = [size[axis] for axis in "BHNC"], [stride[axis] for axis in "BHNC"]
    return [memory.as_strided(shape, strides, pads[0] + layer * stride["L"]) for layer in range(num_layers)]


PADS = st.sampled_from([0, 0, 3])
BLOCKS = st.integers(1, 4)


@st.composite
def allocations(draw, orders=ORDERS, splits=(1, 1, 2), pads=PADS, num_blocks=BLOCKS):
    """(caches by layer, layers of each group, blocks); groups may share memory, and layers too."""
    order, num_blocks, heads = draw(st.sampled_from(orders)), draw(num_blocks), draw(st.integers(1, 3))
    layers, split = draw(st.integers(1, 3)), draw(st.sampled_from(splits))
    tokens, content = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    tensors = allocate(order, layers, num_blocks, split, heads, tokens, content, (draw(pads), draw(pads)))
    caches = {f"0.{layer}": tensor for layer, tensor in enumerate(tensors)}
    groups = [list(caches)]
    for group in range(1, draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))
        caches |= {f"{group}.{layer}": draw(shown(tensor)) for layer, tensor in enumerate(chosen)}
        groups.append([f"{group}.{layer}" for layer in range(len(chosen))])
    names = draw(st.permutations(list(caches)))
    return {name: caches[name] for name in names}, groups, num_blocks


def shown(tensor):
    """A recurrent layer shows several states; the first one counts."""
    return st.sampled_from([tensor, [tensor, tensor[:, :1]]])


def states(cache):
    return cache if isinstance(cache, list) else [cache]


def views_of(caches):
    def view(layer, tensor):
        memory, item_bytes = tensor.untyped_storage(), tensor.element_size()
        strides_bytes = tuple(stride * item_bytes for stride in tensor.stride())
        allocation = (memory.data_ptr(), memory.nbytes())
        return CacheView(layer, tensor.data_ptr(), tuple(tensor.shape), strides_bytes, item_bytes, allocation)

    return {layer: [view(layer, tensor) for tensor in states(cache)] for layer, cache in caches.items()}


def in_tree_layout(caches, num_blocks):
    """vLLM's layout of the caches, as its worker registers them; AssertionError where it fails."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata, RankLocalStoreLayout
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    layout = RankLocalStoreLayout(KeyMetadata("m", 0, 0, 0, 0), block_size=16, hash_block_size=16)
    tensors = [group_kernel_blocks(states(cache)[0], num_blocks) for cache in caches.values()]
    layout.register_kv_caches(tensors, num_blocks)
    return layout


def in_tree_pieces(layout, block_ids):
    """Per block, its (address, size) pairs in the order in which vLLM stores them."""
    chunks = [(16 * number, 16 * number + 16) for number in range(len(block_ids))]
    addresses, sizes, _ = layout.prepare_values(chunks, block_ids, [0] * len(chunks))
    return [list(zip(*pieces, strict=True)) for pieces in zip(addresses, sizes, strict=True)]


def bytes_of(pieces):
    return Counter(byte for address, size in pieces for byte in range(address, address + size))


def misses_bytes(stored, caches, groups, num_blocks):
    """Whether the pieces that are stored of each block lack some of the blocks' own bytes."""
    own = group_layouts(views_of(caches), groups, num_blocks)
    blocks = [(stored[block], layout.locate(block)) for block in range(num_blocks) for layout in own]
    return not all(bytes_of(pieces).keys() >= bytes_of(needed).keys() for pieces, needed in blocks)


def is_harmful(layout, caches, groups, num_blocks):
    """Whether vLLM's own regions overlap, leave the memory, or lack bytes."""
    stored = in_tree_pieces(layout, list(range(num_blocks)))
    if misses_bytes(stored, caches, groups, num_blocks):
        return True
    pieces = [piece for block in stored for piece in block]
    memory = states(next(iter(caches.values())))[0].untyped_storage()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    overlap = any(a + size > b for (a, size), (b, _) in pairwise(sorted(pieces)))
    return overlap or any(address < start or address + size > end for address, size in pieces)


@given(allocations(), st.data())
def test_pieces_are_vllm_s_or_refused_where_it_fails_or_harms(allocation, data):
    caches, groups, num_blocks = allocation
    try:
        theirs = in_tree_layout(caches, num_blocks)
    except AssertionError:
        theirs = None
    try:
        layouts = region_layouts(views_of(caches), groups, num_blocks)
    except InvalidArgument as refused:
        assert "kvtwin" in str(refused)
        assert theirs is None or is_harmful(theirs, caches, groups, num_blocks)
        return
    assert theirs is not None
    assert not is_harmful(theirs, caches, groups, num_blocks)
    block_ids = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=4))
    expected = in_tree_pieces(theirs, block_ids)
    for layout in layouts:
        assert [layout.locate(block_id) for block_id in block_ids] == expected


@given(allocations(WORKING, splits=(1,), pads=st.just(0), num_blocks=st.integers(2, 4)))
def test_every_order_that_vllm_moves_safely_is_served(allocation):
    """And then a value has each byte of the group's layers, once."""
    caches, groups, num_blocks = allocation
    layout = region_layouts(views_of(caches), groups, num_blocks)[0]
    stored = [layout.locate(block) for block in range(num_blocks)]
    assert all(set(bytes_of(pieces).values()) == {1} for pieces in stored)
    assert not misses_bytes(stored, caches, groups, num_blocks)


def test_layers_of_groups_that_are_never_cached_are_not_in_a_value():
    first, second = allocate("LBHNC", 2, 3, 1, 2, 4, 2)
    views = views_of({"cached": first, "scratch": second})
    names = InTreeFormat(Namespace(""), "m", ((Place(0, 0, 0, 0),), ()))
    layout, _ = names.layouts(views, [["cached"], ["scratch"]], 3)
    assert layout.locate(0) == [(first.data_ptr(), 2 * 4 * 2 * 4)]


def test_control_the_own_order_of_a_split_block_is_another():
    """Kernel blocks lie one after the other; the own format puts a head's tokens together, vLLM does not."""
    (cache,) = allocate("LBHNC", 1, 3, 2, 2, 4, 2)
    caches, groups = {"a": cache}, [["a"]]
    expected = in_tree_pieces(in_tree_layout(caches, 3), [1])
    assert [region_layouts(views_of(caches), groups, 3)[0].locate(1)] == expected
    assert [group_layouts(views_of(caches), groups, 3)[0].locate(1)] != expected


def test_control_layers_in_another_order_are_another_value():
    first, second = allocate("LBHNC", 2, 3, 1, 2, 4, 2)
    expected = in_tree_pieces(in_tree_layout({"b": second, "a": first}, 3), [1])
    assert [region_layouts(views_of({"b": second, "a": first}), [["a", "b"]], 3)[0].locate(1)] == expected
    assert [region_layouts(views_of({"a": first, "b": second}), [["a", "b"]], 3)[0].locate(1)] != expected


def test_a_worker_takes_the_format_s_layouts():
    from kvconnector.worker import WorkerHalf

    first, second = allocate("LBHNC", 2, 3, 2, 2, 4, 2)
    caches = {"b": second, "a": first}
    names = InTreeFormat(Namespace(""), "m", ((Place(0, 0, 0, 0),),))
    store = SimpleNamespace(register=lambda address, size_bytes: None)
    config = ConnectorConfig(PoolConfig("nowhere:1"))
    worker = WorkerHalf(config, store, None, 0, ModelSpec((FullAttention(16),)), names.layouts)
    groups = [SimpleNamespace(layer_names=["a", "b"])]
    worker.register_kv_caches(caches, SimpleNamespace(num_blocks=3, kv_cache_groups=groups))
    assert worker.close()
    assert [worker._layouts[0].locate(2)] == in_tree_pieces(in_tree_layout(caches, 3), [2])


@pytest.mark.parametrize(
    ("order", "split", "pads", "why"),
    [
        ("BHLNC", 1, (0, 0), "inside|overlap"),
        ("LHBNC", 2, (0, 0), "without gaps"),
        ("BLHNC", 1, (0, 3), "inside|overlap"),
        ("BLNHC", 1, (3, 0), "inside"),
    ],
)
def test_what_that_connector_cannot_store_is_refused(order, split, pads, why):
    caches = {str(layer): tensor for layer, tensor in enumerate(allocate(order, 2, 3, split, 2, 4, 2, pads))}
    with pytest.raises(InvalidArgument, match=f'({why}).*set key_format to "kvtwin"'):
        region_layouts(views_of(caches), [list(caches)], 3)

"""The KV cache groups of a model as vLLM makes them, so that all take equal pages of one pool of blocks.

vLLM 0.32, v1/core/kv_cache_utils.py, `get_kv_cache_groups`, for one pipeline stage, without draft layers and with the
layouts that its backends for NVIDIA GPUs prefer. Every rule here is compared with vLLM's own in tests/differential.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvcore.errors import InvalidArgument
from kvcore.spec import FullAttention, GroupSpec, Recurrent
from kvcore.units import div_ceil
from kvsim.llm.cache import LayerCache

Layers: TypeAlias = dict[LayerCache, int]
"""How many layers keep what, in the order of their first appearance in the model."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table.

    Sizes are of one block of the group (of a recurrent group: the states at one boundary) over all of its layers, on
    one rank. Of the ranks of an instance `num_shards` hold different bytes; the others hold replicas of one of them.
    """

    spec: GroupSpec
    num_layers: int
    block_bytes: int
    """What is in it: what moves between a rank and the pool."""
    page_bytes: int
    """What it takes of the GPU's memory, with padding; where pages of groups differ, a block takes the largest."""
    num_shards: int

    @property
    def pool_bytes(self) -> int:
        """Of one block in the pool: all different shards, replicas once."""
        return self.block_bytes * self.num_shards


class Pages(Enum):
    """How pages of several sizes share one pool of blocks."""

    EQUAL = "all become as large as the largest"
    SIDE_BY_SIDE = "a block holds pages of several sizes: DeepSeek-V4's layout"


def kv_groups(layers: Layers, pages: Pages) -> tuple[KVGroup, ...]:
    """The groups, in the order in which their kinds first appear."""
    buckets = _buckets(layers)
    if len(buckets) == 1:
        return (_group(layers),)
    if pages is Pages.SIDE_BY_SIDE and len({cache.page_bytes for cache in layers}) > 1:
        return _packed_groups(buckets)
    return _equal_groups(_equal_pages(layers))


def gpu_block_bytes(groups: Sequence[KVGroup]) -> int:
    """GPU memory of one rank that one block of the shared pool takes."""
    return max(group.page_bytes for group in groups)


def _kind(cache: LayerCache) -> tuple[object, ...]:
    """What caches of one bucket have in common: they need a new block at the same tokens, and drop one, too."""
    spec = cache.spec
    if isinstance(spec, FullAttention):
        return (FullAttention, spec.block_size)
    page_bytes = cache.page_bytes if isinstance(spec, Recurrent) else None
    return (replace(spec, layout=""), page_bytes)


def _buckets(layers: Layers) -> list[Layers]:
    buckets: dict[tuple[object, ...], Layers] = {}
    for cache, num_layers in layers.items():
        buckets.setdefault(_kind(cache), {})[cache] = num_layers
    return list(buckets.values())


def _group(layers: Layers) -> KVGroup:
    first = next(iter(layers))
    assert all(cache.num_shards == first.num_shards for cache in layers), layers
    return KVGroup(
        first.spec,
        sum(layers.values()),
        sum(cache.content_bytes * num_layers for cache, num_layers in layers.items()),
        sum(cache.page_bytes * num_layers for cache, num_layers in layers.items()),
        first.num_shards,
    )


def _split(layers: Layers, num_groups: int) -> list[KVGroup]:
    """Layers dealt out in turn."""
    parts = [
        {cache: div_ceil(num_layers - turn, num_groups) for cache, num_layers in layers.items()}
        for turn in range(num_groups)
    ]
    return [_group(part) for part in parts]


# --- pages of one size ------------------------------------------------------------------------------------------------


def _equal_pages(layers: Layers) -> Layers:
    """Every page as large as the largest: by more tokens in a block, or else by padding."""
    largest = max(cache.page_bytes for cache in layers)
    unified: Layers = {}
    for cache, num_layers in layers.items():
        cache = _enlarged(cache, largest)
        unified[cache] = unified.get(cache, 0) + num_layers
    return unified


def _enlarged(cache: LayerCache, page_bytes: int) -> LayerCache:
    times, rest = divmod(page_bytes, cache.page_bytes)
    if isinstance(cache.spec, Recurrent) or rest:
        return replace(cache, page_bytes=page_bytes)
    spec = replace(cache.spec, block_size=cache.spec.block_size * times)
    return replace(cache, spec=spec, content_bytes=cache.content_bytes * times, page_bytes=page_bytes)


def _equal_groups(layers: Layers) -> tuple[KVGroup, ...]:
    """Groups of as many layers as the smallest kind has, or the largest where that is less than half as many again."""
    fewest, most = min(layers.values()), max(layers.values())
    group_size = most if most < 1.5 * fewest else fewest
    return tuple(group for cache, n in layers.items() for group in _split({cache: n}, div_ceil(n, group_size)))


# --- pages side by side -----------------------------------------------------------------------------------------------


class _Bucket(NamedTuple):
    layers: Layers
    by_page: dict[int, int]
    """Layers by page size."""

    @property
    def repeats(self) -> int:
        return max(self.by_page.values())

    @property
    def balanced(self) -> bool:
        """As many layers of each page size: a pattern that repeats, so that it can be split."""
        return len(set(self.by_page.values())) == 1


def _packed_groups(buckets: Sequence[Layers]) -> tuple[KVGroup, ...]:
    """A group per bucket; patterns that repeat are split into groups of about as many repeats."""
    found = [_Bucket(layers, _by_page(layers)) for layers in buckets]
    balanced = [bucket for bucket in found if bucket.balanced]
    floor = max((bucket.repeats for bucket in balanced if len(bucket.by_page) > 1), default=None)
    if floor is None:
        raise InvalidArgument("layers", buckets, "a kind of layers whose pages of several sizes repeat")
    repeats = _least_padding([bucket.repeats for bucket in balanced], floor)
    counts = [div_ceil(bucket.repeats, repeats) if bucket.balanced else 1 for bucket in found]
    return tuple(group for bucket, n in zip(found, counts, strict=True) for group in _split(bucket.layers, n))


def _by_page(layers: Layers) -> dict[int, int]:
    by_page: dict[int, int] = {}
    for cache, num_layers in layers.items():
        by_page[cache.page_bytes] = by_page.get(cache.page_bytes, 0) + num_layers
    return by_page


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size from `floor` on that rounding the counts up to its multiples adds least to; the larger of two."""
    return min(range(floor, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))

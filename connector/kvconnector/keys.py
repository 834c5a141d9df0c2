"""How blocks are named in the pool, and which bytes are their values: one choice, made when the engine starts.

`OwnFormat` is the product's own. `InTreeFormat` is that of vLLM's MooncakeStoreConnector, byte for byte, for engines
that share a pool with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from kvconnector.layout import CacheView, GroupLayout, group_layouts
from kvconnector.regions import region_layouts
from kvcore.errors import require
from kvcore.keys import BlockKey, Namespace, format_key
from kvcore.ranks import Sharding
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, SlidingWindow

LayoutsOf: TypeAlias = Callable[
    [Mapping[str, Sequence[CacheView]], Sequence[Sequence[str]], int], tuple[GroupLayout, ...]
]
"""(views of each layer, in the engine's order; layers of each group; blocks) -> where the values of each group lie."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """How blocks of this engine are named in the pool; a block is present when all shards of it are.

    `cuts` says per group which of the `num_ranks` ranks hold which shard; without, each rank has one of its own.
    """

    namespace: Namespace
    hash_block_size: int
    num_ranks: int
    cuts: tuple[Sharding, ...] = ()

    def num_shards(self, group: int) -> int:
        """Objects that a block of the group is."""
        return self.cuts[group].num_shards if self.cuts else self.num_ranks


def format_group(key: BlockKey) -> str:
    """What ranks and groups store of the same tokens has one name: without any part of it the rest is of less use."""
    return f"kvtwin:{key.namespace}-{key.block_hash.hex()}"


class KeyFormat(Protocol):
    """What engines that share a pool have in common; keys stay `BlockKey` until `text`."""

    @property
    def namespace(self) -> Namespace:
        """Of this engine's keys when it starts."""

    def text(self, key: BlockKey) -> str:
        """The name of the object; different keys give different names."""

    def group(self, key: BlockKey) -> str:
        """The name of what is leased and evicted together, where that is wanted."""

    def layouts(
        self, views: Mapping[str, Sequence[CacheView]], groups: Sequence[Sequence[str]], num_blocks: int
    ) -> tuple[GroupLayout, ...]:
        """See `LayoutsOf`."""


@dataclass(frozen=True, slots=True)
class OwnFormat:
    """Keys of `kvcore.keys`; a value is the blocks of its group's layers, without what lies between them."""

    namespace: Namespace

    def text(self, key: BlockKey) -> str:
        """See `kvcore.keys.format_key`."""
        return format_key(key)

    def group(self, key: BlockKey) -> str:
        """See `format_group`."""
        return format_group(key)

    def layouts(
        self, views: Mapping[str, Sequence[CacheView]], groups: Sequence[Sequence[str]], num_blocks: int
    ) -> tuple[GroupLayout, ...]:
        """See `kvconnector.layout`."""
        return group_layouts(views, groups, num_blocks)


class Place(NamedTuple):
    """The ranks in the name of a shard: tensor (of ranks with equal bytes, one), prefill and decode context, stage."""

    tp: int
    pcp: int
    dcp: int
    pp: int


@dataclass(frozen=True, slots=True)
class InTreeFormat:
    """Keys and values of vLLM's MooncakeStoreConnector (0.32).

    `namespace` is that connector's `cache_prefix`, of any characters, and empty unless set. `places` has, per group,
    one place for each shard, and nothing for a group that is never cached, which has no number in a key either.
    """

    namespace: Namespace
    model_name: str
    places: tuple[tuple[Place, ...], ...]
    _names: tuple[tuple[str, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers = iter(range(len(self.places)))
        names = (self._group_names(next(numbers), places) if places else () for places in self.places)
        object.__setattr__(self, "_names", tuple(names))

    def text(self, key: BlockKey) -> str:
        """`PREFIX@MODEL@tp_rank:T@pcpP@dcpD@pp_rank:S@group:G@HASH`, without `PREFIX@` when that is empty."""
        namespace, group, shard, block_hash = key
        name = f"{self._names[group][shard]}@{block_hash.hex()}"
        return f"{namespace}@{name}" if namespace else name

    def group(self, key: BlockKey) -> str:
        """`vllm-mooncake-store:PREFIX@MODEL@HASH`, without `PREFIX@` when that is empty."""
        prefix = f"{key.namespace}@" if key.namespace else ""
        return f"vllm-mooncake-store:{prefix}{self.model_name}@{key.block_hash.hex()}"

    def layouts(
        self, views: Mapping[str, Sequence[CacheView]], groups: Sequence[Sequence[str]], num_blocks: int
    ) -> tuple[GroupLayout, ...]:
        """See `kvconnector.regions`; layers that are only in groups without a place belong to no value."""
        cached = [layers if places else () for layers, places in zip(groups, self.places, strict=True)]
        return region_layouts(views, cached, num_blocks)

    def _group_names(self, number: int, places: Sequence[Place]) -> tuple[str, ...]:
        return tuple(
            f"{self.model_name}@tp_rank:{place.tp}@pcp{place.pcp}@dcp{place.dcp}@pp_rank:{place.pp}@group:{number}"
            for place in places
        )


def require_in_tree(model: ModelSpec) -> None:
    """Raises InvalidArgument for a model of which the two connectors do not store the same blocks.

    Of a window, each of both stores what the other one's lookup needs. That connector's lookup thread ends with an
    assertion where a chunk's last block is not in the pool, which nothing needs and `kvcore` does not store.
    """
    groups = model.groups
    _require(not model.splits_blocks, "a model whose hits end with blocks; here they may end inside them")
    _require(not any(isinstance(group, ChunkedLocal) for group in groups), "no chunked local attention")
    retaining = any(isinstance(group, SlidingWindow) and group.extra_retained_tokens for group in groups)
    _require(not retaining, "no window that retains extra tokens, which MooncakeStoreConnector does not store")
    whole = all(isinstance(group, FullAttention) for group in groups)
    _require(whole or not model.eagle_groups, "no draft head beside windows or recurrent states")


def _require(holds: object, expected: str) -> None:
    require(holds, "key_format", "vllm", f'{expected}: set key_format to "kvtwin"')

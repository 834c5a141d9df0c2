"""Who holds, stores and loads which part of a block when an engine is many ranks. Pure functions of the layout.

A block of a group is cut into *shards*, each of which is one object of the pool (`BlockKey.rank` is its number). Ranks
that hold the same bytes hold the same shard, and take turns at storing it:

    8 ranks of tensor parallelism, 2 KV heads      rank    0  1  2  3 | 4  5  6  7
                                                   shard   0  0  0  0 | 1  1  1  1
    who stores block k of group g                          the rank of four with (k - g) % 4

Every rank loads its own shard, so a block is present only where all of its shards are (`everywhere`): a lookup asks
for all of them, whoever stored them.

The same as in vLLM 0.32's own store connector (kv_connector/v1/mooncake/store/worker.py): which ranks have equal bytes
under tensor parallelism, their shard's number in one stage, the stride and the phase of who stores (`put_step`), and
that ranks of prefill context parallelism and pipeline stages never share. Different: under decode context parallelism
that connector lets every tensor rank store its own object; here ranks with equal tokens and heads share one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple, TypeAlias

from kvcore.errors import require
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.runs import intersect
from kvcore.types import GroupId, Runs


class Rank(NamedTuple):
    """A worker's place in each dimension, from 0."""

    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The ranks of one engine: pipeline stages x prefill context x tensor parallelism, in vLLM's order, tensor fastest.

    `dcp` ranks deal the tokens of a block out among them. They are no ranks of their own: of the ranks of one stage,
    counted prefill context fastest, each `dcp` in a row.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp", "pcp"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "ranks, at least 1")
        allowed = self.tp % self.dcp == 0 if self.pcp == 1 else self.dcp in (1, self.pcp, self.tp * self.pcp)
        bound = f"a divisor of tp = {self.tp}, or with pcp > 1 one of 1, pcp and tp x pcp"
        require(allowed, "dcp", self.dcp, bound)

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.pp * self.pcp * self.tp

    @property
    def undealt(self) -> "RankLayout":
        """For groups whose tokens are not dealt out: recurrent states, and draft layers that every rank holds."""
        return replace(self, dcp=1)

    def place(self, rank: int) -> Rank:
        """Where a rank of [0, num_ranks) is."""
        rest, tp = divmod(rank, self.tp)
        pp, pcp = divmod(rest, self.pcp)
        return Rank(pp, pcp, tp)

    def context_of(self, place: Rank) -> int:
        """Which share of a block's tokens is there, of [0, dcp)."""
        return (place.tp * self.pcp + place.pcp) % self.dcp


_Content: TypeAlias = tuple[int, int, int, int]
"""(stage, prefill context rank, part of the KV heads, share of the tokens)."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the blocks of one group lie on the ranks.

    `num_kv_heads`: 1 for a latent (MLA), which every tensor rank holds whole; `layout.tp` for a recurrent state, of
    which each rank has its own part. `stages`: pipeline stages with layers of the group, None for all.
    """

    layout: RankLayout
    num_kv_heads: int
    stages: tuple[int, ...] | None = None
    holders: tuple[tuple[int, ...], ...] = field(init=False)
    """Per shard, the ranks that hold it, ascending."""

    def __post_init__(self) -> None:
        tp, heads = self.layout.tp, self.num_kv_heads
        divides = heads >= 1 and (tp % heads == 0 or heads % tp == 0)
        require(divides, "num_kv_heads", heads, f"a divisor or a multiple of tp = {tp}")
        known = self.stages is None or (self.stages and set(self.stages) <= set(range(self.layout.pp)))
        require(known, "stages", self.stages, f"some of the stages 0 to {self.layout.pp - 1}")
        contents = self._contents()
        object.__setattr__(self, "holders", tuple(map(tuple, contents.values())))
        whole = len({content[2:] for content in contents}) == min(heads, tp) * self.layout.dcp
        require(whole, "layout.dcp", self.layout.dcp, f"no more than the {tp // min(heads, tp)} ranks of each KV head")

    @property
    def num_shards(self) -> int:
        """Objects that a block is; their numbers are [0, num_shards)."""
        return len(self.holders)

    def shard_of(self, rank: int) -> int | None:
        """What the rank holds and loads of every block; None where no layer of the group is."""
        return next((shard for shard, holders in enumerate(self.holders) if rank in holders), None)

    def owner(self, shard: int, group: GroupId, block: int) -> int:
        """The rank that stores this shard of the block at this position, whatever the pool holds.

        Successive blocks take turns; groups begin at different ranks, so that short sequences do so too.
        """
        holders = self.holders[shard]
        return holders[(block - group) % len(holders)]

    def turns(self, rank: int, group: GroupId, blocks: range) -> range:
        """Those of the successive blocks whose shard on this rank it is the rank's turn to store."""
        shard = self.shard_of(rank)
        if shard is None:
            return blocks[:0]
        holders = self.holders[shard]
        phase = holders.index(rank) + group - blocks.start
        return range(blocks.start + phase % len(holders), blocks.stop, len(holders))

    def keys(self, namespace: Namespace, group: GroupId, block_hash: BlockHash) -> tuple[BlockKey, ...]:
        """All objects of a block: what a lookup must prove, and no rank loads another."""
        return tuple(BlockKey(namespace, group, shard, block_hash) for shard in range(self.num_shards))

    def _contents(self) -> dict[_Content, list[int]]:
        """What ranks hold of a block, with those that hold it."""
        layout, num_parts = self.layout, min(self.num_kv_heads, self.layout.tp)
        holders: dict[_Content, list[int]] = {}
        for rank, place in enumerate(map(layout.place, range(layout.num_ranks))):
            if self.stages is None or place.pp in self.stages:
                content = (place.pp, place.pcp, place.tp * num_parts // layout.tp, layout.context_of(place))
                holders.setdefault(content, []).append(rank)
        return holders


def everywhere(found: Sequence[Runs]) -> Runs:
    """The blocks of which every shard was found; `found` has one entry for each."""
    require(found, "found", found, "the answer for each shard")
    return reduce(intersect, found)

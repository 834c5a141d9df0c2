"""Shards, owners and proofs over random layouts: cases S05 and S15, and vLLM's own stripes."""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockHash, Namespace
from kvcore.planner import Planner
from kvcore.ranks import RankLayout, Sharding, everywhere
from kvcore.runs import from_blocks, num_blocks
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from kvcore.types import GroupId

B = 16


@st.composite
def layouts(draw):
    tp, pp, pcp = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    valid = [d for d in range(1, tp + 1) if tp % d == 0] if pcp == 1 else [1, pcp, tp * pcp]
    return RankLayout(tp=tp, pp=pp, dcp=draw(st.sampled_from(valid)), pcp=pcp)


@st.composite
def shardings(draw, layout):
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    some = st.sets(st.integers(0, layout.pp - 1), min_size=1).map(lambda stages: tuple(sorted(stages)))
    stages = draw(st.none() | some)
    try:
        return Sharding(draw(st.sampled_from([layout, layout.undealt])), heads, stages)
    except InvalidArgument:
        assume(False)


CUT = layouts().flatmap(shardings)
RUNS = st.frozensets(st.integers(0, 40)).map(from_blocks)


def positions(runs):
    return [block for start, end in runs for block in range(start, end)]


# -- S15: who stores ---------------------------------------------------------------------------------------------------


def owned(cut, rank, group, blocks):
    return from_blocks(block for run in blocks for block in cut.turns(rank, group, range(*run)))


def stores(owned, cut, group, blocks):
    """(shard, block) of all that is stored, by any rank, with repetition."""
    ranks = range(cut.layout.num_ranks)
    return sorted((cut.shard_of(rank), block) for rank in ranks for block in positions(owned(cut, rank, group, blocks)))


def everything_once(cut, blocks):
    return sorted((shard, block) for shard in range(cut.num_shards) for block in positions(blocks))


@given(CUT, st.integers(0, 5), RUNS)
def test_owners_together_store_every_shard_of_every_block_once(cut, group, blocks):
    assert stores(owned, cut, group, blocks) == everything_once(cut, blocks)
    for shard, block in everything_once(cut, blocks):
        owner = cut.owner(shard, GroupId(group), block)
        assert cut.shard_of(owner) == shard
        assert block in positions(owned(cut, owner, GroupId(group), blocks))


def everybody(cut, rank, group, blocks):
    """Each replica stores all it has."""
    return blocks if cut.shard_of(rank) is not None else ()


def those_that_find_it_absent(cut, rank, group, blocks):
    """Each replica asks the pool for itself; the answers differ."""
    return tuple(run for index, run in enumerate(blocks) if (index + rank) % 3)


def tensor_rank_0(cut, rank, group, blocks):
    return blocks if cut.layout.place(rank).tp == 0 else ()


@pytest.mark.parametrize("wrong", [everybody, those_that_find_it_absent, tensor_rank_0])
def test_the_check_of_owners_rejects(wrong):
    cut, blocks = Sharding(RankLayout(tp=4), 2), ((0, 3), (5, 6), (8, 12))
    assert stores(owned, cut, 0, blocks) == everything_once(cut, blocks)
    assert stores(wrong, cut, 0, blocks) != everything_once(cut, blocks)


@given(CUT, st.integers(0, 5), st.integers(0, 100))
def test_a_split_of_the_blocks_changes_no_owner(cut, group, start):
    whole = [(rank, owned(cut, rank, group, ((start, start + 20),))) for rank in range(cut.layout.num_ranks)]
    for rank, blocks in whole:
        parts = [owned(cut, rank, group, ((start, start + 7),)), owned(cut, rank, group, ((start + 7, start + 20),))]
        assert positions(blocks) == positions(parts[0]) + positions(parts[1])


@given(CUT)
def test_replicas_share_the_work_evenly_and_groups_begin_elsewhere(cut):
    for shard, holders in enumerate(cut.holders):
        shares = [num_blocks(owned(cut, rank, GroupId(0), ((3, 24),))) for rank in holders]
        assert max(shares) - min(shares) <= 1
        assert {cut.owner(shard, GroupId(group), 0) for group in range(len(holders))} == set(holders)


def vllm_stripes(tp, factor, shard, group, block):
    """Ranks whose turn it is by vLLM's rule: `chunk % put_step == (tp_rank + group) % put_step`."""
    return [rank for rank in range(tp) if rank // factor == shard and block % factor == (rank + group) % factor]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(0, 6), st.integers(0, 40))
def test_shards_and_turns_are_vllms_under_tensor_parallelism(tp, heads, group, block):
    cut = Sharding(RankLayout(tp=tp), heads)
    factor = max(1, tp // heads)
    assert [cut.shard_of(rank) for rank in range(tp)] == [rank // factor for rank in range(tp)]
    for shard in range(cut.num_shards):
        assert [cut.owner(shard, GroupId(group), block)] == vllm_stripes(tp, factor, shard, group, block)


@pytest.mark.engine
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2)])
def test_equal_bytes_are_where_the_installed_vllm_says(tp, dcp):
    """With `dcp` > 1 vLLM shares nothing, and we no less."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    state = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.bfloat16,))
    layout = RankLayout(tp=tp, dcp=dcp)
    for heads, spec in [(2, full), (8, full), (1, latent), (tp, state)]:
        worker = SimpleNamespace(dcp_size=dcp, tp_size=tp, num_kv_head=heads)
        factor = MooncakeStoreWorker._spec_tp_replication_factor(worker, spec)
        dealt = layout if spec is latent and dcp > 1 else layout.undealt
        sizes = {len(holders) for holders in Sharding(dealt, heads).holders}
        assert sizes == {factor} if dcp == 1 else min(sizes) >= factor


# -- which ranks hold what ---------------------------------------------------------------------------------------------


def bytes_on(cut, rank):
    """What a rank holds of a block: (stage, heads, share of tokens), and its prefill rank, which never shares."""
    place, layout = cut.layout.place(rank), cut.layout
    heads = cut.num_kv_heads
    if heads >= layout.tp:
        own = tuple(range(place.tp * heads // layout.tp, (place.tp + 1) * heads // layout.tp))
    else:
        own = (place.tp // (layout.tp // heads),)
    return place.pp, place.pcp, own, (place.tp * layout.pcp + place.pcp) % layout.dcp


@given(CUT)
def test_ranks_share_a_shard_exactly_when_they_hold_the_same_bytes(cut):
    ranks = [rank for rank in range(cut.layout.num_ranks) if cut.shard_of(rank) is not None]
    for left in ranks:
        for right in ranks:
            assert (cut.shard_of(left) == cut.shard_of(right)) == (bytes_on(cut, left) == bytes_on(cut, right))
    without = set(range(cut.layout.num_ranks)) - set(ranks)
    assert {cut.layout.place(rank).pp for rank in without}.isdisjoint(cut.layout.place(rank).pp for rank in ranks)


def test_by_hand():
    eight = RankLayout(tp=8)
    assert Sharding(eight, 2).holders == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Sharding(eight, 1).holders == (tuple(range(8)),)
    assert Sharding(eight, 8).num_shards == Sharding(eight, 64).num_shards == 8
    assert Sharding(RankLayout(tp=8, dcp=4), 1).holders == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Sharding(RankLayout(tp=8, dcp=2), 2).holders == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert Sharding(RankLayout(tp=2, pp=2), 1).holders == ((0, 1), (2, 3))
    assert Sharding(RankLayout(tp=2, pp=2), 1, stages=(1,)).holders == ((2, 3),)
    assert Sharding(RankLayout(tp=2, pcp=2, dcp=4), 1).holders == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankLayout(tp=0), "tp = 0: expected ranks, at least 1"),
        (lambda: RankLayout(tp=4, dcp=3), "dcp = 3: expected a divisor of tp = 4"),
        (lambda: RankLayout(tp=4, pcp=2, dcp=4), "dcp = 4: expected a divisor of tp = 4, or with pcp > 1 one of"),
        (lambda: Sharding(RankLayout(tp=4), 3), "num_kv_heads = 3: expected a divisor or a multiple of tp = 4"),
        (lambda: Sharding(RankLayout(tp=4, dcp=4), 2), "layout.dcp = 4: expected no more than the 2 ranks of each"),
        (lambda: Sharding(RankLayout(pp=2), 1, (2,)), r"stages = \(2,\): expected some of the stages 0 to 1"),
        (lambda: everywhere([]), "found = .*: expected the answer for each shard"),
    ],
)
def test_an_impossible_layout_is_the_callers_mistake(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


# -- S05: what a lookup must prove -------------------------------------------------------------------------------------

PLANNERS = [
    Planner(ModelSpec((FullAttention(B),))),
    Planner(ModelSpec((FullAttention(B), SlidingWindow(B, window=2 * B + 1)))),
    Planner(ModelSpec((FullAttention(2 * B), SlidingWindow(B, window=3 * B)))),
]


@st.composite
def damaged_pools(draw):
    """A planner, how its groups are cut, the objects that all ranks stored of a prompt, and one that is lost since."""
    planner, layout = draw(st.sampled_from(PLANNERS)), draw(layouts())
    cuts = [draw(shardings(layout)) for _ in planner.model.groups]
    num_tokens = draw(st.integers(2 * B + 1, 12 * B))
    objects = {
        (group, cut.shard_of(rank), block)
        for group, (cut, blocks) in enumerate(zip(cuts, planner.store(0, num_tokens, num_tokens), strict=True))
        for rank in range(layout.num_ranks)
        for block in positions(owned(cut, rank, GroupId(group), blocks))
    }
    return planner, cuts, num_tokens, objects, draw(st.sampled_from(sorted(objects)))


def proven(planner, cuts, num_tokens, objects, shards_asked):
    """Per group what the pool is found to hold, asked for the shards `shards_asked(cut)`."""
    asked = planner.lookup(0, num_tokens)
    return tuple(
        everywhere(
            [from_blocks(b for b in positions(runs) if (group, shard, b) in objects) for shard in shards_asked(cut)]
        )
        for group, (cut, runs) in enumerate(zip(cuts, asked, strict=True))
    )


def every_rank_gets_what_was_promised(case, shards_asked):
    planner, cuts, num_tokens, objects, lost = case
    pool = objects - {lost}
    present = proven(planner, cuts, num_tokens, pool, shards_asked)
    hit_len = planner.hit(0, num_tokens, present)
    for group, (cut, blocks) in enumerate(zip(cuts, planner.load(0, hit_len, present), strict=True)):
        for rank in range(cut.layout.num_ranks):
            shard = cut.shard_of(rank)
            if shard is not None:
                assert {(group, shard, block) for block in positions(blocks)} <= pool, "no rank misses its part"
    if planner.model.groups[lost[0]].prefix_closed:
        assert hit_len <= lost[2] * planner.model.groups[lost[0]].block_size, "it ends before the damaged block"
    return hit_len


def all_shards(cut):
    return range(cut.num_shards)


@given(damaged_pools())
def test_a_hit_ends_before_a_block_that_one_rank_has_lost(case):
    hit_len = every_rank_gets_what_was_promised(case, all_shards)
    planner, cuts, num_tokens, objects, (group, _, block) = case
    whole = [from_blocks({b for g, _, b in objects if g == index}) for index in range(len(cuts))]
    whole[group] = from_blocks(set(positions(whole[group])) - {block})
    assert hit_len == planner.hit(0, num_tokens, tuple(whole)), "and not earlier than it must"


@pytest.mark.parametrize("asked", [lambda cut: [0], lambda cut: range(cut.num_shards - 1)], ids=["first", "not last"])
def test_the_check_rejects_a_lookup_that_asks_for_some_ranks_only(asked):
    cut = Sharding(RankLayout(tp=2, pp=2), 4)
    objects = {(0, shard, block) for shard in range(4) for block in range(6)}
    case = (PLANNERS[0], [cut], 6 * B + 1, objects, (0, 3, 2))
    assert every_rank_gets_what_was_promised(case, all_shards) == 2 * B
    with pytest.raises(AssertionError):
        every_rank_gets_what_was_promised(case, asked)


@given(CUT)
def test_the_keys_of_a_block_are_those_that_ranks_load(cut):
    namespace, block_hash = Namespace("n"), BlockHash(b"h")
    proof = {key.rank for key in cut.keys(namespace, GroupId(3), block_hash)}
    loaded = {cut.shard_of(rank) for rank in range(cut.layout.num_ranks)} - {None}
    assert proof == loaded
    assert all(key[:2] == (namespace, 3) and key.block_hash == block_hash for key in cut.keys(namespace, 3, block_hash))

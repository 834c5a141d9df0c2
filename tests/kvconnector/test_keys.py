"""Names of objects: of the connector's own format, and of vLLM's MooncakeStoreConnector, by its own code."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvconnector.config import KeyNames, read_config
from kvconnector.keys import InTreeFormat, OwnFormat, Place, require_in_tree

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockHash, BlockKey, Namespace, format_key
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, Scratch, SlidingWindow
from kvcore.types import GroupId

HASHES = st.binary(min_size=4, max_size=32).map(BlockHash)
PREFIXES = st.text(max_size=8)
MODELS = st.text(min_size=1, max_size=8)
NUMBERS = st.integers(0, 70)
PLACES = st.builds(Place, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
GROUPS = st.lists(st.lists(PLACES, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple).filter(any)


def test_the_own_format_is_kvcore_s():
    key = BlockKey(Namespace("ab12"), GroupId(1), 2, BlockHash(b"\x01\xff"))
    assert OwnFormat(Namespace("ab12")).text(key) == format_key(key)


def test_a_key_as_vllm_writes_it():
    names = InTreeFormat(Namespace("team"), "Qwen3-8B", ((Place(0, 0, 0, 0),), (), (Place(3, 0, 0, 1),)))
    key = BlockKey(names.namespace, GroupId(2), 0, BlockHash(b"\x01\xff"))
    assert names.text(key) == "team@Qwen3-8B@tp_rank:3@pcp0@dcp0@pp_rank:1@group:1@01ff"
    assert names.text(key._replace(namespace=Namespace(""))) == names.text(key).removeprefix("team@")


def test_what_ranks_and_groups_store_of_the_same_tokens_is_one_group():
    own = OwnFormat(Namespace("ab12"))
    in_tree = InTreeFormat(Namespace("team"), "Qwen3-8B", ((Place(0, 0, 0, 0),) * 3,) * 2)
    for names in (own, in_tree):
        key = BlockKey(names.namespace, GroupId(1), 2, BlockHash(b"\x01\xff"))
        assert names.group(key) == names.group(key._replace(group=GroupId(0), rank=0))
        others = (key._replace(block_hash=BlockHash(b"\x02")), key._replace(namespace=Namespace("x")))
        assert names.group(key) not in map(names.group, others)


# -- vLLM's own code ---------------------------------------------------------------------------------------------------


@pytest.mark.engine
@given(PREFIXES, MODELS, GROUPS, st.data())
def test_names_are_those_of_vllm_s_pool_key(prefix, model, places, data):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import worker
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata, PoolKey

    names = InTreeFormat(Namespace(prefix), model, places)
    group = data.draw(st.sampled_from([index for index, shards in enumerate(places) if shards]))
    shard, block_hash = data.draw(st.integers(0, len(places[group]) - 1)), data.draw(HASHES)
    tp, pcp, dcp, pp = places[group][shard]
    number = sum(map(bool, places[:group]))  # theirs counts only the groups that are cached
    metadata = KeyMetadata(model, tp, pcp, dcp, pp, group_id=number, cache_prefix=prefix)
    key = BlockKey(names.namespace, GroupId(group), shard, block_hash)
    assert names.text(key) == PoolKey(metadata, block_hash.hex()).to_string()
    assert names.text(key._replace(block_hash=BlockHash(block_hash + b"\0"))) != names.text(key)
    assert names.group(key) == worker._make_mooncake_group_id(metadata, names.text(key).rsplit("@", 1)[-1])


KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec", "HiSparseHotSpec")


def spec_of(kind):
    import torch
    from vllm.v1 import kv_cache_interface as interface

    make = getattr(interface, kind)
    if kind == "MambaSpec":
        return make(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    if kind == "HiSparseHotSpec":  # never cached
        return make(block_size=16, page_size=64, blocks_per_request=1)
    options = {"sliding_window": 32} if kind == "SlidingWindowSpec" else {}
    return make(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, **options)


def cache_config(kinds):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([f"layer.{number}"], spec_of(kind)) for number, kind in enumerate(kinds)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(tp, pp, num_kv_heads):
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        world_size=tp * pp,
    )
    model = SimpleNamespace(model="some/where/the-model/", get_total_num_kv_heads=lambda: num_kv_heads)
    return SimpleNamespace(parallel_config=parallel, model_config=model, speculative_config=None)


def in_tree_worker(engine, config, rank):
    """vLLM's worker of that rank as far as it makes keys, without a store and a process group."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    worker, parallel = object.__new__(MooncakeStoreWorker), engine.parallel_config
    worker.store = None
    worker.tp_size, worker.pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    worker.pcp_size = worker.dcp_size = 1
    worker.tp_rank, worker.pp_rank = rank % worker.tp_size, rank // worker.tp_size % worker.pp_size
    worker.num_kv_head = engine.model_config.get_total_num_kv_heads()
    worker.hash_block_size, worker.store_tp_size = 16, None
    worker._kv_cache_groups = config.prefix_cacheable_groups
    worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
    worker.token_dbs = worker._build_token_databases(
        KeyMetadata("the-model", worker.tp_rank, 0, 0, worker.pp_rank), None
    )
    worker._init_lookup_key_prefixes()
    return worker


@pytest.mark.engine
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4, 8, 64]),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3).filter(lambda kinds: set(kinds) != {"HiSparseHotSpec"}),
    HASHES,
)
def test_each_rank_has_vllm_s_keys_and_a_lookup_asks_for_the_same(tp, pp, num_kv_heads, kinds, block_hash):
    from kvconnector.vllm_compat import in_tree_model_name, in_tree_places, shardings

    engine, config = engine_config(tp, pp, num_kv_heads), cache_config(kinds)
    names = InTreeFormat(Namespace(""), in_tree_model_name(engine), in_tree_places(engine, config))
    cuts = shardings(engine, config)
    for rank in range(tp * pp):
        theirs = in_tree_worker(engine, config, rank)
        for number, group in enumerate(config.prefix_cacheable_group_ids):
            key = BlockKey(names.namespace, GroupId(group), cuts[group].shard_of(rank), block_hash)
            assert names.text(key) == theirs.token_dbs[number].key_for(block_hash)
            asked = {names.text(key._replace(rank=shard)) for shard in range(len(names.places[group]))}
            assert asked == {f"{prefix}@{block_hash.hex()}" for prefix in theirs._lookup_key_prefixes[number]}
    never_cached = set(range(len(kinds))) - set(config.prefix_cacheable_group_ids)
    assert not any(names.places[group] for group in never_cached)


@pytest.mark.engine
def test_control_ranks_that_are_taken_to_differ_have_other_keys():
    from kvconnector.vllm_compat import in_tree_places

    engine, config = engine_config(4, 1, 2), cache_config(["FullAttentionSpec"])
    alike = in_tree_places(engine, config)
    assert [place.tp for place in alike[0]] == [0, 1]
    assert in_tree_worker(engine, config, 3).token_dbs[0].metadata.tp_rank == 1 != 3


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name):
    from kvconnector.vllm_compat import in_tree_places

    engine = engine_config(2, 1, 2)
    setattr(engine.parallel_config, name, 2)
    with pytest.raises(InvalidArgument, match=f"{name}.*kvtwin"):
        in_tree_places(engine, cache_config(["FullAttentionSpec"]))


@pytest.mark.engine
def test_blocks_on_the_host_are_refused():
    from kvconnector.vllm_compat import in_tree_places

    config = replace(cache_config(["FullAttentionSpec"]), hisparse_host_num_blocks=4)
    with pytest.raises(InvalidArgument, match=r"hisparse_host_num_blocks.*kvtwin"):
        in_tree_places(engine_config(1, 1, 2), config)


FULL, WINDOW = FullAttention(16), SlidingWindow(16, 32)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ModelSpec((FULL, Recurrent(16)), hash_unit=4, hit_unit=4), "hits end with blocks"),
        (ModelSpec((FULL, ChunkedLocal(16, 64))), "chunked"),
        (ModelSpec((FULL, SlidingWindow(16, 32, 8))), "retains"),
        (ModelSpec((FULL, WINDOW), eagle_groups=frozenset({1})), "draft head"),
    ],
)
def test_models_of_which_other_blocks_are_stored_are_refused(model, why):
    with pytest.raises(InvalidArgument, match=f'{why}.*set key_format to "kvtwin"'):
        require_in_tree(model)


@pytest.mark.parametrize(
    "model",
    [
        ModelSpec((FULL, WINDOW, Scratch(16))),
        ModelSpec((FULL, Recurrent(16))),
        ModelSpec((FULL,), eagle_groups=frozenset({0})),
    ],
)
def test_others_are_not(model):
    require_in_tree(model)


def read(**extra):
    return read_config({"master_server_address": "10.0.0.1:50051", **extra}, "kv_both", {})


def test_the_format_is_a_setting():
    assert read().key_format is KeyNames.KVTWIN
    config = read(key_format="vllm", cache_prefix="team")
    assert (config.key_format, config.cache_prefix) == (KeyNames.VLLM, "team")


@pytest.mark.parametrize(
    ("extra", "fix"),
    [
        ({"key_format": "lmcache"}, "one of kvtwin, vllm"),
        ({"key_format": "vllm", "model_id": "m"}, "model_id.*set cache_prefix"),
        ({"key_format": "vllm", "namespace": {"a": "b"}}, "namespace.*set cache_prefix"),
        ({"cache_prefix": "team"}, "cache_prefix.*set namespace"),
        ({"key_format": "vllm", "store_tp_size": 8}, "store_tp_size.*leave this one out"),
        ({"key_format": "vllm", "enable_store_tp_lcm": True}, "enable_store_tp_lcm.*leave this one out"),
    ],
)
def test_what_has_no_place_in_the_keys_is_refused_with_the_fix(extra, fix):
    with pytest.raises(InvalidArgument, match=fix):
        read(**extra)

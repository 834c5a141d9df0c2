"""What the connector reads out of vLLM's configuration, for the vLLM that is installed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcore.errors import InvalidArgument
from kvcore.keys import namespace_digest
from kvcore.spec import ChunkedLocal, FullAttention, Recurrent, Scratch, SlidingWindow

pytestmark = pytest.mark.engine


def attention(kind, block_size=16, **options):
    import torch
    from vllm.v1 import kv_cache_interface

    spec = getattr(kv_cache_interface, kind)
    return spec(block_size=block_size, num_kv_heads=2, head_size=8, dtype=torch.float32, **options)


def mamba(mode="align"):
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode)


def cache_config(*specs, **options):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, **options)


def engine_config(**changes):
    """The parts of a VllmConfig that are read."""
    fields = {
        "model": "org/model", "revision": None, "quantization": None, "dtype": "torch.bfloat16", "cache_dtype": "auto",
        "kv_cache_layout": "LBHNC", "prefix_caching_hash_algo": "sha256", "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "world_size": 1, "rank": 0, "block_size": 16, "prefix_match_unit": None,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_prefix_caching": True,
        "speculative_config": None, "get_total_num_kv_heads": lambda: 2, **changes,
    }  # fmt: skip
    everything = SimpleNamespace(**fields)
    return SimpleNamespace(
        model_config=everything,
        cache_config=everything,
        parallel_config=everything,
        kv_transfer_config=object(),
        speculative_config=everything.speculative_config,
    )


def describe(*specs, drafts=(), alignment=None, **engine):
    from kvconnector.vllm_compat import describe_model

    caches = cache_config(*specs, cache_hit_alignment_tokens=alignment)
    for group in drafts:
        caches.kv_cache_groups[group].is_eagle_group = True
    return describe_model(engine_config(**engine), caches)


def shapes(model):
    return tuple(replace(group, layout="") for group in model.groups)


def test_every_attention_type_has_its_spec():
    model = describe(
        attention("FullAttentionSpec"),
        attention("MLAAttentionSpec", 32),
        attention("SlidingWindowSpec", sliding_window=64),
        attention("ChunkedLocalAttentionSpec", attention_chunk_size=32),
        mamba(),
        attention("CircularBufferSpec"),
    )
    assert shapes(model) == (
        FullAttention(16),
        FullAttention(32),
        SlidingWindow(16, 64),
        ChunkedLocal(16, 32),
        Recurrent(64),
        Scratch(16),
    )
    assert (model.hit_step, model.margins) == (64, (0,) * 6)


def test_layers_of_different_sizes_in_one_group_count_once():
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    inner = {"a": attention("FullAttentionSpec"), "b": attention("FullAttentionSpec")}
    assert shapes(describe(UniformTypeKVCacheSpecs(16, inner))) == (FullAttention(16),)


def test_a_block_takes_what_all_layers_of_its_group_do():
    from kvconnector.vllm_compat import block_bytes
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    page_bytes = 2 * 16 * 2 * 8 * 4  # keys and values, tokens, heads, entries, float32
    inner = {"a": attention("FullAttentionSpec"), "b": attention("FullAttentionSpec", 32)}
    caches = cache_config(attention("FullAttentionSpec"), mamba(), UniformTypeKVCacheSpecs(16, inner))
    caches.kv_cache_groups[0].layer_names[:] = ["x", "y", "z"]
    assert block_bytes(caches) == (3 * page_bytes, 4 * 4 * 4, 3 * page_bytes)


EAGLE = SimpleNamespace(use_eagle_block_drop=lambda: True)
DRAFTS_WITHOUT_DROP = SimpleNamespace(use_eagle_block_drop=lambda: False)


@pytest.mark.parametrize(
    ("speculative", "drafts", "margins"),
    [
        (None, (), (0, 0, 0)),
        (DRAFTS_WITHOUT_DROP, (1,), (0, 0, 0)),
        (EAGLE, (1,), (0, 16, 0)),
        (EAGLE, (), (16, 16, 16)),
    ],
)
def test_groups_with_draft_layers_prove_one_block_more(speculative, drafts, margins):
    """One group is of another layout than the flagged one; when none is flagged, each may hold draft layers."""
    window = attention("SlidingWindowSpec", sliding_window=64)
    groups = attention("FullAttentionSpec"), attention("MLAAttentionSpec"), window
    assert describe(*groups, drafts=drafts, speculative_config=speculative).margins == margins


def test_hits_end_inside_blocks_where_the_engine_s_do():
    groups = attention("FullAttentionSpec", 64), mamba()
    split = describe(*groups, alignment=16, prefix_match_unit=16)
    assert (split.hit_step, split.hashed_step, split.tail_groups) == (16, 16, (0,))
    assert describe(*groups, alignment=64).hit_step == 64


@pytest.mark.parametrize(
    ("spec", "named"),
    [(lambda: mamba("none"), "mamba_cache_mode"), (lambda: attention("CrossAttentionSpec"), "CrossAttentionSpec")],
)
def test_what_is_not_supported_is_named(spec, named):
    with pytest.raises(InvalidArgument, match=named):
        describe(spec())


def test_sharding_by_context_is_refused():
    from kvconnector.vllm_compat import shardings

    caches = cache_config(attention("FullAttentionSpec"))
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        with pytest.raises(InvalidArgument, match=f"{name} = 2: expected 1"):
            shardings(engine_config(**{name: 2}), caches)


def test_sleep_mode_is_refused_where_the_connector_would_not_be_told(monkeypatch):
    from kvconnector import vllm_compat
    from kvconnector.connector import KVTwinConnector

    class Untold:
        """As in 0.32."""

    class Told:
        """As from 0.33 on."""

        def unregister_kv_caches(self):
            pass

    asleep = engine_config(enable_sleep_mode=True)
    monkeypatch.setattr(vllm_compat, "KVConnectorBase_V1", Untold)
    vllm_compat.require_memory_that_stays(engine_config())
    vllm_compat.require_memory_that_stays(engine_config(enable_sleep_mode=False))
    with pytest.raises(InvalidArgument, match="enable_sleep_mode = True: expected False"):
        vllm_compat.require_memory_that_stays(asleep)
    monkeypatch.setattr(vllm_compat, "KVConnectorBase_V1", Told)
    vllm_compat.require_memory_that_stays(asleep)
    assert KVTwinConnector.supports_sleep_mode(object())


def heads(spec, num_heads):
    return replace(attention(spec), num_kv_heads=num_heads)


@pytest.mark.parametrize(
    ("tp", "spec", "total", "fields", "num_shards"),
    [
        (1, lambda: heads("FullAttentionSpec", 2), 2, {}, 1),
        (4, lambda: heads("MLAAttentionSpec", 1), 16, {}, 1),  # a latent is on every rank
        (4, lambda: heads("FullAttentionSpec", 1), 2, {"num_key_value_heads": 2}, 2),
        (4, lambda: heads("FullAttentionSpec", 1), 4, {"num_key_value_heads": 4}, 4),
        (4, lambda: heads("FullAttentionSpec", 2), 8, {"num_key_value_heads": 8}, 4),
        (4, mamba, 1, {}, 4),
        # Layers may differ: what is one head of two here may be one of four there.
        (4, lambda: heads("FullAttentionSpec", 1), 2, {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, 4),
        (4, lambda: heads("FullAttentionSpec", 1), 2, {"kv_heads_per_layer": [2, 4]}, 4),
        (4, lambda: heads("FullAttentionSpec", 1), 2, {"blocks": [{"attention": {"n_heads_in_group": 8}}]}, 4),
        (4, lambda: heads("FullAttentionSpec", 1), 2, {"other": {"num_attention_groups": 2}, "kv_heads": None}, 2),
        (4, lambda: heads("FullAttentionSpec", 1), 3, {}, 4),
    ],
)
def test_ranks_share_a_shard_only_where_their_bytes_are_certainly_equal(tp, spec, total, fields, num_shards):
    from kvconnector.vllm_compat import shardings

    engine = engine_config(tensor_parallel_size=tp, pipeline_parallel_size=2, world_size=tp * 2)
    engine.model_config.get_total_num_kv_heads = lambda: total
    engine.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: fields)
    (cut,) = shardings(engine, cache_config(spec()))
    assert (cut.num_shards, cut.layout.num_ranks) == (2 * num_shards, 2 * tp)  # stages never share
    # The layers of a draft head are in no field of the model's own configuration.
    engine.speculative_config = SimpleNamespace(method="eagle")
    latent = spec().__class__.__name__.startswith("MLA")
    assert shardings(engine, cache_config(spec()))[0].num_shards == 2 * (1 if latent else tp)


def test_layers_that_do_not_fit_the_configuration_are_refused():
    from kvconnector.vllm_compat import shardings

    engine = engine_config(tensor_parallel_size=4, world_size=4)
    engine.model_config.get_total_num_kv_heads = lambda: 2
    with pytest.raises(InvalidArgument, match=r"num_kv_heads = \[2\]: expected 1 on each rank, of 2 on 4"):
        shardings(engine, cache_config(heads("FullAttentionSpec", 2)))


def test_engines_that_cut_blocks_otherwise_share_no_namespace():
    from kvconnector.vllm_compat import namespace_fields

    caches, digests = cache_config(heads("FullAttentionSpec", 1)), set()
    for fields in ({}, {"swa_kv_heads": 4}):
        engine = engine_config(tensor_parallel_size=4, world_size=4)
        engine.model_config.get_total_num_kv_heads = lambda: 2
        engine.model_config.hf_text_config = fields
        digests.add(namespace_digest({**namespace_fields(engine, caches), "positions": ""}))
    assert len(digests) == 2


ONE_LATENT, WHOLE_HEADS, HEAD = (
    lambda tp: (heads("MLAAttentionSpec", 1),),
    lambda tp: (heads("FullAttentionSpec", max(1, 2 // tp)),),
    lambda tp: (heads("FullAttentionSpec", 1),),
)
DRAFTS = SimpleNamespace(method="eagle", model="org/draft", revision=None)
SWA = {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("specs", "total", "sizes", "engine", "shared"),
    [
        (ONE_LATENT, 16, (1, 2), {}, True),
        (ONE_LATENT, 16, (1, 8), {}, True),
        (ONE_LATENT, 16, (2, 4), {"pipeline_parallel_size": 2}, True),
        (ONE_LATENT, 16, (1, 2), {"speculative_config": DRAFTS}, True),  # a draft layer with a latent has it whole, too
        (HEAD, 1, (1, 2), {}, True),
        (HEAD, 1, (1, 4), {}, True),
        (HEAD, 2, (2, 4), {}, True),
        (HEAD, 2, (4, 8), {}, True),
        (WHOLE_HEADS, 2, (1, 2), {}, False),  # an object of both heads, objects of one
        (WHOLE_HEADS, 2, (1, 4), {}, False),
        (HEAD, 1, (1, 2), {"speculative_config": DRAFTS}, False),
        (HEAD, 2, (2, 4), {"hf_text_config": SWA}, False),  # a rank may hold one head of two, or of four
        (HEAD, 3, (3, 4), {}, False),
        (lambda tp: (mamba(),), 1, (1, 2), {}, False),  # each rank has a part of the state, whatever its size
        (lambda tp: (heads("MLAAttentionSpec", 1), mamba()), 1, (1, 2), {}, False),
        # Of a request's own buffers nothing is stored: they need not be the same.
        (lambda tp: (heads("MLAAttentionSpec", 1), attention("CircularBufferSpec")), 1, (1, 2), {}, True),
    ],
)
def test_engines_of_two_tensor_parallel_sizes_share_where_their_objects_are_the_same(
    specs, total, sizes, engine, shared
):
    from kvconnector.vllm_compat import namespace_fields

    digests = set()
    for tp in sizes:
        config = engine_config(**{"tensor_parallel_size": tp, "get_total_num_kv_heads": lambda: total, **engine})
        block_size = 64 if any(type(spec).__name__ == "MambaSpec" for spec in specs(tp)) else 16
        config.cache_config.block_size = block_size
        caches = cache_config(*(replace(spec, block_size=block_size) for spec in specs(tp)))
        digests.add(namespace_digest(namespace_fields(config, caches)))
    assert (len(digests) == 1) == shared


def test_stages_with_other_layers_share_nothing(monkeypatch):
    from kvconnector.vllm_compat import namespace_fields

    def digest(pp):
        fields = namespace_fields(
            engine_config(pipeline_parallel_size=pp), cache_config(attention("FullAttentionSpec"))
        )
        return namespace_digest(fields)

    whole, staged = digest(1), digest(3)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "4,5,3")
    assert digest(1) == whole
    assert len({whole, staged, digest(3)}) == 3


def test_the_hash_unit_is_the_common_divisor_of_the_groups():
    from kvconnector.vllm_compat import hash_block_size

    two = cache_config(attention("FullAttentionSpec", 32), attention("SlidingWindowSpec", 48, sliding_window=64))
    assert hash_block_size(engine_config(), two) == 16
    assert hash_block_size(engine_config(block_size=32), cache_config(attention("FullAttentionSpec", 32))) == 32


def test_engines_whose_bytes_or_hashes_differ_have_different_namespaces(monkeypatch):
    from kvconnector.vllm_compat import namespace_fields

    one_group = cache_config(attention("FullAttentionSpec"))
    base = namespace_digest(namespace_fields(engine_config(), one_group))
    assert base == namespace_digest(namespace_fields(engine_config(), cache_config(attention("FullAttentionSpec"))))
    changes = {
        "model": "org/other", "revision": "v2", "quantization": "fp8", "dtype": "torch.float32", "cache_dtype": "fp8",
        "kv_cache_layout": "LBNHC", "prefix_caching_hash_algo": "sha256_cbor", "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2, "calculate_kv_scales": True,
        "hf_text_config": SimpleNamespace(rope_theta=10_000.0, rope_scaling={"type": "yarn", "factor": 4.0}),
        "speculative_config": SimpleNamespace(method="eagle", model="org/draft", revision=None),
    }  # fmt: skip
    digests = {namespace_digest(namespace_fields(engine_config(**{k: v}), one_group)) for k, v in changes.items()}
    spec = attention("FullAttentionSpec")
    others = [replace(spec, num_kv_heads=4), replace(spec, head_size=16), replace(spec, block_size=32)]
    others += [attention("SlidingWindowSpec", sliding_window=64), attention("SlidingWindowSpec", sliding_window=32)]
    digests |= {
        namespace_digest(namespace_fields(engine_config(block_size=other.block_size), cache_config(other)))
        for other in others
    }
    digests.add(namespace_digest(namespace_fields(engine_config(), cache_config(spec, spec))))
    monkeypatch.setenv("PYTHONHASHSEED", "another")
    digests.add(namespace_digest(namespace_fields(engine_config(), one_group)))
    assert len(digests - {base}) == len(changes) + len(others) + 2


def test_data_parallel_ranks_share_a_namespace_with_each_other_and_with_engines_that_have_none():
    from kvconnector.vllm_compat import namespace_fields

    one_group = cache_config(attention("FullAttentionSpec"))
    alone = namespace_fields(engine_config(), one_group)
    for rank in range(2):
        ranked = {"data_parallel_size": 2, "data_parallel_rank": rank, "data_parallel_index": rank}
        assert namespace_fields(engine_config(**ranked), one_group) == alone


def test_states_of_other_types_and_other_layers_have_other_namespaces():
    import torch
    from kvconnector.vllm_compat import namespace_fields
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = [mamba(), replace(mamba(), dtypes=(torch.bfloat16,)), replace(mamba(), shapes=((2, 8),))]
    configs = [cache_config(spec) for spec in specs]
    drafted = KVCacheGroupSpec(["layer.0", "draft.0"], mamba())
    configs.append(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[drafted]))
    assert len({namespace_digest(namespace_fields(engine_config(block_size=64), each)) for each in configs}) == 4


def test_factors_that_go_by_the_longest_sequence_are_told_apart():
    from kvconnector.vllm_compat import namespace_fields

    def digest(kind, max_model_len):
        config = engine_config(hf_text_config=SimpleNamespace(rope_scaling={"type": kind}), max_model_len=max_model_len)
        return namespace_digest(namespace_fields(config, cache_config(attention("FullAttentionSpec"))))

    assert digest("longrope", 4_096) != digest("longrope", 131_072)
    assert digest("yarn", 4_096) == digest("yarn", 131_072)


def test_the_resolved_layout_is_the_engine_s():
    from kvconnector.vllm_compat import namespace_fields

    resolved = cache_config(attention("FullAttentionSpec"), kv_cache_layout="LBNHC")
    assert namespace_fields(engine_config(kv_cache_layout=None), resolved)["kv_layout"] == "LBNHC"


def test_the_plugin_makes_the_connector_known_and_may_run_twice():
    from kvconnector.plugin import register
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    connector = KVConnectorFactory.get_connector_class_by_name("KVTwinConnector")
    from kvconnector.connector import KVTwinConnector

    assert connector is KVTwinConnector


@pytest.mark.parametrize("version", ["0.34.0", "0.3.2", "1.0", "0.320.1", "dev"])
def test_a_version_that_nobody_has_tried_is_named_beside_those_that_were(version):
    from kvconnector.vllm_compat import untested_version

    warning = untested_version(version)
    assert all(part in warning for part in (f"vLLM {version} has not been tested", "0.32 (run on CPU)", "0.33 ("))


def test_a_version_that_was_tried_is_not_warned_of():
    from kvconnector.vllm_compat import untested_version

    tried = ("0.32.0", "0.32.1", "0.33.0", "0.33.0+cu130", "0.32.0.dev1")
    assert [untested_version(version) for version in tried] == [None] * 5
    assert untested_version() is None, "the installed one"


def test_every_method_vllm_requires_of_a_connector_is_there_and_takes_its_arguments():
    import inspect

    from kvconnector.connector import KVTwinConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    assert not inspect.isabstract(KVTwinConnector)
    sleep = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    since_0_33 = set() if hasattr(KVConnectorBase_V1, "supports_sleep_mode") else sleep
    own = {name for name in vars(KVTwinConnector) if not name.startswith("_")}
    for name in own - since_0_33:
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        if callable(theirs):
            assert list(inspect.signature(getattr(KVTwinConnector, name)).parameters) == list(
                inspect.signature(theirs).parameters
            ), name


@pytest.mark.parametrize("where", ["vllm_compat.torch.cpu._is_amx_tile_supported", "vllm_compat.platform.machine"])
def test_processors_that_pack_blocks_otherwise_share_nothing(monkeypatch, where):
    """A CPU with AMX keeps the keys of bfloat16 in tiles, under the same layout, shape and length."""
    from kvconnector.vllm_compat import namespace_fields

    config = cache_config(attention("FullAttentionSpec"))
    before = namespace_digest(namespace_fields(engine_config(), config))
    monkeypatch.setattr(f"kvconnector.{where}", lambda: "another")
    assert namespace_digest(namespace_fields(engine_config(), config)) != before

"""The models and the presence of `random_models` as the installed vLLM sees them, and its own answers about them.

Nothing is imported from vLLM at the top, so that the tests can be collected everywhere.
"""

import functools
from types import SimpleNamespace

from kvcore.engine.model import EngineModel, EngineRules
from kvcore.spec import ChunkedLocal, FullAttention, Recurrent, Scratch, SlidingWindow
from tests.differential.random_models import cacheable, is_sharded


@functools.cache
def vllm():
    """vLLM's modules under the names that are used here, its specs registered."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator as store
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core import kv_cache_coordinator as coordinator
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    KVCacheSpecRegistry._ensure_registered()
    return SimpleNamespace(torch=torch, store=store, interface=interface, coordinator=coordinator, utils=utils)


def installed_rules():
    """The rules of the installed vLLM, recognised by what it can do."""
    return EngineRules(
        pool_windows_cover_retained=hasattr(vllm().store, "_coverage_spec"),
        junctions_cover_peek=hasattr(vllm().utils, "trim_null_head"),
    )


def engine_of(subject, side):
    return EngineModel(subject.model, side, installed_rules())


@functools.cache
def vllm_spec(group):
    interface, torch = vllm().interface, vllm().torch
    common = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 2 if group.layout.startswith("wide") else 1,
        "dtype": torch.float16,
        "dcp_sharded": is_sharded(group),
    }
    match group:
        case FullAttention(layout="sink"):
            return interface.SinkFullAttentionSpec(**common, sink_len=group.block_size)
        case FullAttention(layout="latent" | "latent replicated"):
            return interface.MLAAttentionSpec(**common)
        case FullAttention():
            return interface.FullAttentionSpec(**common)
        case SlidingWindow():
            latent = group.layout.startswith("latent")
            cls = interface.SlidingWindowMLASpec if latent else interface.SlidingWindowSpec
            return cls(**common, sliding_window=group.window, extra_retained_tokens=group.extra_retained_tokens)
        case ChunkedLocal():
            return interface.ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.chunk)
        case Recurrent():
            return interface.MambaSpec(
                block_size=group.block_size, shapes=((1,),), dtypes=(torch.float16,), mamba_cache_mode="align"
            )
        case Scratch():
            return interface.CircularBufferSpec(**common)
    raise AssertionError(group)


def vllm_groups(subject, scaled):
    """vLLM's group specs, with the block sizes that context parallelism leaves or those before it."""
    interface, utils = vllm().interface, vllm().utils
    groups = []
    for index, group in enumerate(subject.unscaled):
        spec = vllm_spec(group)
        if index in subject.uniform:
            layers = {f"{index}.{layer}": spec for layer in range(2)}
            spec = interface.UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=layers)
        if scaled:
            spec = utils.resolve_dcp_kv_cache_spec(spec, subject.context_parallel_size)
        groups.append(interface.KVCacheGroupSpec([str(index)], spec, is_eagle_group=index in subject.flagged))
    return groups


def gpu_coordinator(subject, retention=None):
    """vLLM's coordinator of its own prefix cache."""
    config = vllm().interface.KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[],
        kv_cache_groups=vllm_groups(subject, scaled=False),
        prefix_cache_retention_interval=retention,
    )
    return vllm().coordinator.get_kv_cache_coordinator(
        config,
        max_model_len=1_000_000,
        max_in_flight_tokens=1_000_000,
        use_eagle=subject.use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=subject.context_parallel_size,
        pcp_world_size=1,
        scheduler_block_size=subject.model.alignment,
        hash_block_size=subject.model.hashed_step,
    )


def pool_coordinator(subject, retention=None):
    """The in-tree Mooncake connector's coordinator."""
    groups = vllm_groups(subject, scaled=True)
    return vllm().store.MooncakeStoreCoordinator(
        [groups[index] for index in cacheable(subject)],
        scheduler_block_size=subject.model.alignment,
        hash_block_size=subject.model.hashed_step,
        use_eagle=subject.use_eagle,
        retention_interval=retention,
        enable_partial_hash_hits=subject.model.splits_blocks,
    )


def fill(pool, units):
    """Give vLLM's own BlockPool exactly the keys of these units, per group, all of one of its blocks."""
    assert pool.reset_prefix_cache()
    entries, block = pool.cached_block_hash_to_block, pool.blocks[1]
    for group, present in enumerate(units):
        for unit in present:
            entries.insert(vllm().utils.make_block_hash_with_group_id(b"%d" % unit, group), block)


def block_hashes(model, num_tokens):
    """One per hash unit; each is its own index."""
    return [b"%d" % unit for unit in range(num_tokens // model.hashed_step)]


def gpu_hit_len(coordinator, model, presence, limit):
    """What the GPU's coordinator finds when its pool has exactly `presence`."""
    fill(coordinator.block_pool, presence.units)
    _, hit_len, _ = coordinator.find_longest_cache_hit(block_hashes(model, presence.num_tokens), limit)
    return hit_len


def store_hit_len(coordinator, subject, presence, limit):
    """What the connector's coordinator finds when the store has exactly `presence`."""
    index_of = {group: index for index, group in enumerate(cacheable(subject))}
    keys = {(index_of[group], b"%d" % unit) for group in index_of for unit in presence.units[group]}
    pool = vllm().store.ExternalCachedBlockPool(subject.model.hashed_step, keys)
    _, hit_len = coordinator.find_longest_cache_hit(block_hashes(subject.model, presence.num_tokens), limit, pool)
    return hit_len


class FakeStore:
    """As much of Mooncake's client as a lookup needs; it notes what it is asked for."""

    def __init__(self, keys):
        self.keys, self.asked = keys, []

    def batch_is_exist(self, keys):
        self.asked += keys
        return [int(key in self.keys) for key in keys]


def connector_lookup(coordinator, subject, presence):
    """(hit, keys asked for) of the in-tree connector's worker, from asking the store to its answer."""
    worker = connector_worker(coordinator, subject, presence)
    worker._tail_key_boundaries = lambda *_: ()  # only checks; see test_differences
    found = type(worker).lookup(worker, presence.num_tokens, block_hashes(subject.model, presence.num_tokens))
    return found.hit_length, worker.store.asked


def connector_worker(coordinator, subject, presence):
    """As much of the connector's worker as answers a lookup, before a store that has exactly `presence`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import PoolKey
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker

    model, groups = subject.model, cacheable(subject)
    key = PoolKey.build_key_string
    keys = {key(f"group {group}", (b"%d" % unit).hex()) for group in groups for unit in presence.units[group]}
    worker = object.__new__(MooncakeStoreWorker)
    worker._capacity_only = False
    worker.coord = coordinator
    worker.token_dbs = [SimpleNamespace(block_size=model.groups[group].block_size) for group in groups]
    worker._kv_cache_groups = coordinator.kv_cache_groups
    worker._lookup_key_prefixes = [[f"group {group}"] for group in groups]
    worker.hash_block_size = model.hashed_step
    worker.store = FakeStore(keys)
    worker._record_kv_connector_operation = lambda *_, **__: None
    return worker

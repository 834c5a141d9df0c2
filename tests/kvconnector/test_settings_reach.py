"""What is set in the engine's configuration is what both halves are made with: vLLM's own objects, and no Mooncake."""

from types import SimpleNamespace

import pytest
from kvconnector.policies import LoadingKind
from kvconnector.replication import Replication

from kvcore.loading import LoadCheaper
from kvcore.units import NS_PER_US

pytestmark = pytest.mark.engine

EXTRA = {
    "master_server_address": "nowhere:1",
    "mode": "embedded",
    "enable_ssd_offload": True,
    "ssd_offload_path": "/ssd",
    "replica_num": 2,
    "enable_group_semantics": True,
    "retention_interval": 64,
    "loading": LoadingKind.CHEAPER.value,
    "prefill_ns_per_token": 1_000,
    "bandwidth_bytes_per_s": 10**9,
    "latency_us": 7,
}


@pytest.fixture
def make(monkeypatch):
    """Makes a half with these settings; what its client of the pool was made with is in `told`."""
    from kvconnector import connector
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    told = []

    def store(config, clock, text, group):
        told.append((config, group))

    monkeypatch.setattr(connector, "MooncakeStore", store)

    def made(role, **extra):
        config = modelless_engine.make_config(16, 64, 1, 1, 64, "fcfs", True, 1)
        config.kv_transfer_config.kv_connector_extra_config = EXTRA | extra
        groups = [
            KVCacheGroupSpec(["a", "b"], modelless_engine.full(16)),
            KVCacheGroupSpec(["c"], modelless_engine.window(16, 32)),
        ]
        caches = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        caches.hash_block_size = caches.cache_hit_alignment_tokens = 16
        return connector.KVTwinConnector(config, getattr(connector.KVConnectorRole, role), caches)

    return SimpleNamespace(half=made, told=told)


def test_a_worker_lends_memory_and_stores_copies_by_its_own_name(make):
    worker = make.half("WORKER")
    ((pool, group),) = make.told
    assert (pool.global_segment_bytes, pool.ssd_path) == (4 << 30, "/ssd/engine0-rank0")
    assert pool.replication == Replication(2, grouped=True)
    assert group.__name__ == "group"
    assert worker.get_mem_pool_context() is None


def test_a_scheduler_lends_nothing_and_decides_as_it_is_told(make):
    half = make.half("SCHEDULER")._scheduler
    ((pool, _),) = make.told
    assert (pool.global_segment_bytes, pool.ssd_path) == (0, "")
    assert half._planner.retention == 64
    loading = half._policy.loading
    assert isinstance(loading, LoadCheaper)
    assert loading.costs.latency_ns == 7 * NS_PER_US
    one, other = loading.costs.block_ns
    assert one == 2 * other > 0, "two layers take twice as long as one"


def test_a_worker_s_cache_is_where_its_settings_say(make, monkeypatch):
    from kvconnector import connector

    monkeypatch.setattr(connector, "DeviceMemory", lambda kind: SimpleNamespace(context=lambda: ("in memory of", kind)))
    worker = make.half("WORKER", custom_mem_pool="nvlink")
    where, kind = worker.get_mem_pool_context()
    assert (where, kind.value) == ("in memory of", "nvlink")

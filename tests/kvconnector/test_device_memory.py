"""The KV cache's memory from an allocator of Mooncake's: which, and that its absence is an error at the start."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from kvconnector.pool_config import MemoryPool

from kvcore.errors import InvalidArgument

pytestmark = pytest.mark.engine


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for a GPU and for a Mooncake that has allocators for it."""
    import torch

    module = ModuleType("mooncake.allocator")
    for name in ("NVLinkAllocator", "BarexAllocator"):
        made = SimpleNamespace(
            get_allocator=lambda device, name=name: SimpleNamespace(allocator=lambda: (name, device))
        )
        setattr(module, name, made)
    monkeypatch.setitem(sys.modules, "mooncake.allocator", module)
    monkeypatch.setattr("mooncake.allocator", module, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool of", *allocator))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: ("in", pool))
    return torch.device("cuda", 3)


def allocator_called(name):
    return SimpleNamespace(get_allocator=lambda device: SimpleNamespace(allocator=lambda: (name, device)))


@pytest.mark.parametrize(
    ("kind", "allocator"), [(MemoryPool.NVLINK, "NVLinkAllocator"), (MemoryPool.BAREX, "BarexAllocator")]
)
def test_the_cache_is_allocated_by_mooncake_s_allocator_of_this_worker_s_gpu(gpu, kind, allocator):
    from kvconnector.device_memory import DeviceMemory

    memory = DeviceMemory(kind)
    assert memory.context() == ("in", ("pool of", allocator, gpu))
    assert memory.context() == memory.context(), "one pool, whenever it is asked for"


def test_a_mooncake_without_allocators_is_an_error_that_names_the_setting():
    from kvconnector.device_memory import DeviceMemory

    with pytest.raises(InvalidArgument, match=r"custom_mem_pool = 'nvlink'.*built for GPUs"):
        DeviceMemory(MemoryPool.NVLINK)


def test_a_host_without_a_gpu_is_an_error_that_names_the_setting(gpu, monkeypatch):
    import torch
    from kvconnector.device_memory import DeviceMemory

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match=r"custom_mem_pool = 'barex'.*a GPU"):
        DeviceMemory(MemoryPool.BAREX)


def test_vllm_s_own_allocator_beside_it_is_an_error():
    from kvconnector.vllm_compat import require_one_allocator

    require_one_allocator(SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=False)))
    with pytest.raises(InvalidArgument, match="enable_cumem_allocator = True"):
        require_one_allocator(SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=True)))

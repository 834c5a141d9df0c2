"""Memory for the KV cache on a GPU that Mooncake allocates, for what vLLM's cannot do: NVLink from node to node."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from kvconnector.pool_config import MemoryPool
from kvcore.errors import InvalidArgument

_ALLOCATORS = {MemoryPool.NVLINK: "NVLinkAllocator", MemoryPool.BAREX: "BarexAllocator"}


class DeviceMemory:
    """The pool of one worker's GPU; it must live as long as the cache. Raises InvalidArgument where there is none."""

    def __init__(self, kind: MemoryPool) -> None:
        allocator = _allocator(kind)
        device = torch.device("cuda", torch.cuda.current_device())
        self._pool: Any = torch.cuda.MemPool(allocator.get_allocator(device).allocator())

    def context(self) -> AbstractContextManager[object]:
        """What this thread allocates in it comes from the pool."""
        context: AbstractContextManager[object] = torch.cuda.use_mem_pool(self._pool)
        return context


def _allocator(kind: MemoryPool) -> Any:
    try:
        import mooncake.allocator
    except ImportError as error:
        expected = f"a Mooncake built for GPUs, 0.3.8 or later ({error}): install one, or leave this out"
        raise InvalidArgument("custom_mem_pool", kind.value, expected) from error
    if not torch.cuda.is_available():
        raise InvalidArgument("custom_mem_pool", kind.value, "a GPU: leave this out without one")
    return getattr(mooncake.allocator, _ALLOCATORS[kind])

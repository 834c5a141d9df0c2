"""What a router thinks the instances have cached: it keeps the books on what it sent them."""

from kvcore.pool import BlockPool
from kvcore.types import Segments


class PrefixIndex:
    """One model of an instance's GPU cache per instance, fed with prompts that were sent and answers that came back.

    An approximation: sequences are taken to be cached from the moment they are added, whole, one after the other. The
    real instance computes them later, together, and evicts for those that run at once. Routers without KV events do it
    like this (SGLang's cache-aware router, Dynamo with --no-kv-events); here the model is the engine's own block pool,
    so that it forgets in the engine's order and at the engine's size instead of after a time.
    """

    def __init__(self, num_instances: int, num_blocks: int) -> None:
        """Empty caches of `num_blocks` blocks each."""
        self._caches = [BlockPool(num_blocks) for _ in range(num_instances)]

    def cached_blocks(self, segments: Segments, limit_blocks: int) -> tuple[int, ...]:
        """For each instance, the longest prefix of a sequence that it has, of at most `limit_blocks`."""
        return tuple(cache.match(segments, limit_blocks).num_blocks for cache in self._caches)

    def add(self, instance: int, segments: Segments, num_blocks: int) -> None:
        """The instance at this index gets the first `num_blocks` blocks of a sequence, at most as many as it has."""
        cache = self._caches[instance]
        holding = cache.hold(cache.match(segments, num_blocks))
        cache.allocate(holding, num_blocks - holding.num_blocks)
        cache.cache(holding, segments, num_blocks)
        cache.free(holding)

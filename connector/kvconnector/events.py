"""What listeners are told of the pool: KV events, which vLLM publishes with those about the engine's own cache.

Told is what comes and goes through this engine: what all of its ranks have stored, what a load found to be gone, and
everything when the cache is reset. What the pool evicts for want of room is the store's to tell.
"""

from functools import partial
from typing import Any

from kvconnector.vllm_compat import KVCacheEvent, event_extra_keys, lora_name, published
from kvcore.group_runs import GroupRuns
from kvcore.keys import BlockHash
from kvcore.kv_events import BlocksRemoved, BlocksStored, Medium, Place, Prompt, removed_events, stored_events
from kvcore.spec import ModelSpec
from kvcore.types import GroupId

MAX_TOLD = 1 << 20
"""Blocks that listeners are to know of; of more, those told longest ago are taken back, there or not."""


class PoolEvents:
    """One per engine that publishes events. It is given blocks as `GroupRuns` of their request.

    On a reset each block is taken back by name: vLLM's event that clears everything would clear, for listeners, the
    engine's own cache too, and would come after what the next step put there.
    """

    def __init__(self, model: ModelSpec, hash_block_size: int, kv_cache_config: Any, max_told: int = MAX_TOLD) -> None:
        self._kinds = model.kinds
        self._unit = hash_block_size
        self._kv_cache_config = kv_cache_config
        self._max_told = max_told
        self._told: dict[tuple[GroupId, BlockHash], None] = {}
        self._events: list[BlocksStored | BlocksRemoved] = []

    def stored(self, request: Any, blocks: GroupRuns) -> None:
        """The blocks are in the pool, each with every shard; some may have been there before."""
        for index, runs in enumerate(blocks):
            if not runs:
                continue
            for event in stored_events(self._prompt(request, index), runs, self._place(index)):
                self._events.append(event)
                for block_hash in event.block_hashes:
                    key = event.place.group, block_hash
                    self._told.pop(key, None)
                    self._told[key] = None
        self._take_back(len(self._told) - self._max_told)

    def gone(self, request: Any, blocks: GroupRuns) -> None:
        """A shard of each of the blocks was not in the pool, or was not what its key names."""
        for index, runs in enumerate(blocks):
            if not runs:
                continue
            for event in removed_events(self._prompt(request, index), runs, self._place(index)):
                self._events.append(event)
                for block_hash in event.block_hashes:
                    self._told.pop((event.place.group, block_hash), None)

    def reset(self) -> None:
        """Nothing that was told is loaded any more. The engine's own cache may have been left as it is."""
        self._take_back(len(self._told))

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order, as vLLM publishes them."""
        events, self._events = self._events, []
        return [published(event, self._kv_cache_config) for event in events]

    def _take_back(self, count: int) -> None:
        """Of the blocks that were told, the `count` oldest."""
        removed: dict[GroupId, list[BlockHash]] = {}
        for _ in range(count):
            key = group, block_hash = next(iter(self._told))
            del self._told[key]
            removed.setdefault(group, []).append(block_hash)
        self._events += [BlocksRemoved(_place(group), tuple(hashes)) for group, hashes in removed.items()]

    def _place(self, index: int) -> Place:
        return _place(GroupId(self._kinds[index].group))

    def _prompt(self, request: Any, index: int) -> Prompt:
        num_tokens = self._kinds[index].num_tokens
        step = num_tokens // self._unit
        hashes = request.block_hashes[step - 1 :: step]
        keys_of = partial(event_extra_keys, request, num_tokens)
        return Prompt(request.all_token_ids, num_tokens, hashes, keys_of, lora_name(request))


def _place(group: GroupId) -> Place:
    return Place(Medium.CPU, group)

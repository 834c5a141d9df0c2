"""A connector to stand beside ours under MultiConnector: it promises what it is told to, and always wins.

Three steps after its load began the blocks hold RECEIVED. Until then they hold NOT_YET, which is nothing in earnest.
"""

from dataclasses import dataclass

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

NOT_YET, RECEIVED = 3.0, 0.5
NUM_STEPS = 3


@dataclass
class Loads(KVConnectorMetadata):
    """Block ids to fill, by request."""

    blocks: dict[str, list[int]]


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """`promised_len` is what each prompt is promised, in tokens; `on_received` is called when it has been kept."""

    promised_len = 0

    @staticmethod
    def on_received():
        """Set by whoever wants to know."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._granted, self._loading = {}, {}

    # -- scheduler ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        num_tokens = max(0, self.promised_len - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            self._granted[request.request_id] = table[: self.promised_len // self._block_size]

    def build_connector_meta(self, scheduler_output):
        granted, self._granted = self._granted, {}
        return Loads(granted)

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    # -- worker ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches):
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        for request_id, blocks in self._get_connector_metadata().blocks.items():
            self._write(blocks, NOT_YET)
            self._loading[request_id] = (blocks, NUM_STEPS)

    def get_finished(self, finished_req_ids):
        received = set()
        for request_id, (blocks, num_steps) in list(self._loading.items()):
            self._loading[request_id] = (blocks, num_steps - 1)
            if num_steps == 1:
                del self._loading[request_id]
                self._write(blocks, RECEIVED)
                received.add(request_id)
                self.on_received()
        return None, received

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def _write(self, blocks, value):
        for cache in self._caches:
            dimension = list(cache.shape).index(self._num_blocks)
            cache.index_fill_(dimension, torch.tensor(blocks), value)

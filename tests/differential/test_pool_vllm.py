"""The pool on runs against the installed vLLM's own block pool, driven through its full-attention manager."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.kvcore.block_reference import BlockMatch, identities, random_program
from tests.kvcore.test_pool import AnonymousLast, CachedFirst, HeadFirst, NewestCopy, RunPool

pytestmark = pytest.mark.engine

BLOCK_SIZE = 16


def block_hash(identity):
    return b"%d:%d" % identity


def identity_of(block):
    """What `block_hash` and vLLM's four bytes of group id made a hash of; None for a block without one."""
    return block.block_hash and tuple(int(part) for part in block.block_hash[:-4].split(b":"))


@dataclass
class Request:
    """As much of vLLM's Request as its block pool reads."""

    request_id: str
    blocks: list
    start: int = 0
    shared_prefix_boundary: int = 0
    block_hashes: Any = ()


@dataclass
class Reader:
    """Blocks pinned by a transfer."""

    blocks: list
    start: int


class VllmPool:
    """vLLM's BlockPool and FullAttentionManager behind the operations of kvcore.pool.BlockPool."""

    def __init__(self, num_blocks):
        import torch
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
        self.manager = FullAttentionManager(self.spec, self.pool, True, 0, scheduler_block_size=BLOCK_SIZE)
        self.request_ids = map(str, count())

    @property
    def num_free(self):
        return self.pool.get_num_free_blocks()

    @property
    def num_cached(self):
        return sum(block.block_hash is not None for block in self.pool.blocks)

    def free_queue(self):
        return [identity_of(block) for block in self.pool.free_block_queue.get_all_free_blocks()]

    def match(self, segments, limit_blocks):
        hashes = [block_hash(identity) for identity in identities(segments)]
        limit = limit_blocks * BLOCK_SIZE
        (blocks,), hit_len = self.manager.find_longest_cache_hit(
            hashes, limit, [0], self.pool, self.spec, drop_eagle_block=False, alignment_tokens=BLOCK_SIZE
        )
        assert hit_len == len(blocks) * BLOCK_SIZE
        return BlockMatch(blocks)

    def hold(self, match):
        request_id = next(self.request_ids)
        self.manager.add_local_computed_blocks(request_id, match.blocks, match.num_blocks * BLOCK_SIZE, 0)
        return Request(request_id, self.manager.req_to_blocks[request_id])

    def allocate(self, request, n):
        num_tokens = (len(request.blocks) + n) * BLOCK_SIZE
        self.manager.allocate_new_blocks(request.request_id, num_tokens, num_tokens)

    def cache(self, request, segments, upto):
        request.block_hashes = [block_hash(identity) for identity in identities(segments)]
        self.manager.cache_blocks(request, upto * BLOCK_SIZE, replay_boundaries=())

    def pin(self, holding, run):
        start, end = run
        blocks = holding.blocks[start - holding.start : end - holding.start]
        self.pool.touch(blocks)
        return Reader(blocks, start)

    def free(self, holding):
        if isinstance(holding, Reader):
            self.pool.free_blocks(reversed(holding.blocks))
        else:
            self.manager.free(holding.request_id)

    def reset(self):
        return self.pool.reset_prefix_cache()


def test_equals_vllm_after_every_step():
    programs = [random_program(seed, lambda n: [RunPool(n), VllmPool(n)], 250) for seed in range(40)]
    assert sum(program.num_steps for program in programs) == 10_000
    assert sum(program.num_hits for program in programs) > 2_000


@pytest.mark.parametrize("wrong", [HeadFirst, NewestCopy, AnonymousLast, CachedFirst])
def test_a_wrong_pool_does_not_equal_vllm(wrong):
    with pytest.raises(AssertionError, match="step"):
        for seed in range(20):
            random_program(seed, lambda n: [wrong(n), VllmPool(n)], 100)

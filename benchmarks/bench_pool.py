"""Time per operation: the pool on runs against vLLM's BlockPool, on the same operations.

    python benchmarks/bench_pool.py [--requests N] [--without-vllm]

Sessions whose prompts grow from turn to turn compete for one pool: each request matches and holds its prefix, computes
the rest in chunks of 2,048 tokens, decodes 256 tokens with one allocation at each block boundary, and is freed, eight
requests at a time. Block hashes are made beforehand. Both must end with the same free queue.
"""

import argparse
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns
from types import SimpleNamespace

from kvcore.pool import BlockPool

BLOCK_SIZE = 16
CHUNK_BLOCKS = 2_048 // BLOCK_SIZE
DECODE_BLOCKS = 256 // BLOCK_SIZE
NUM_SESSIONS = 24
NUM_RUNNING = 8
POOL_PROMPTS = 16
OPERATIONS = ("match", "hold", "allocate", "cache", "free")


@dataclass
class Request:
    """One turn of a session: blocks of a prompt that all share, then of the session's own stream."""

    segments: tuple
    prompt_blocks: int
    block_hashes: list = field(default_factory=list)

    @property
    def num_blocks(self):
        return self.prompt_blocks + DECODE_BLOCKS


def make_requests(prompt_blocks, num_requests):
    """Each turn adds an eighth of prompt_blocks to its session, which starts anew when it is 3/2 of them long."""
    rng = random.Random(0)
    shared, streams = prompt_blocks // 8, count(1)
    sessions = {}
    for _ in range(num_requests):
        index = rng.randrange(NUM_SESSIONS)
        stream, size = sessions.get(index, (0, prompt_blocks * 2))
        size += prompt_blocks // 8
        if size > prompt_blocks * 3 // 2:
            stream, size = next(streams), prompt_blocks // 2
        sessions[index] = stream, size
        yield Request(((0, 0, shared), (stream, shared, size + DECODE_BLOCKS)), size)


class RunPool:
    """kvcore's pool; a request's blocks are its Holding."""

    def __init__(self, num_blocks):
        pool = BlockPool(num_blocks)
        self.pool = pool
        self.hold, self.allocate, self.free = pool.hold, pool.allocate, pool.free

    def match(self, request):
        return self.pool.match(request.segments, request.prompt_blocks - 1)

    def cache(self, holding, request, _num_cached, upto):
        self.pool.cache(holding, request.segments, upto)

    def free_queue(self):
        num_anonymous, runs = self.pool.eviction_order()
        return [None] * num_anonymous + [(s, index) for s, a, b in runs for index in reversed(range(a, b))]


class EnginePool:
    """vLLM's pool, called as its managers do for one full-attention group; a request's blocks are a list."""

    def __init__(self, num_blocks):
        from vllm.v1.core.block_pool import BlockPool as EngineBlockPool

        self.pool = EngineBlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)

    def match(self, request):
        blocks = []
        for block_hash in request.block_hashes[: request.prompt_blocks - 1]:
            cached = self.pool.get_cached_block(block_hash, [0])
            if not cached:
                break
            blocks.append(cached[0])
        return SimpleNamespace(num_blocks=len(blocks), blocks=blocks)

    def hold(self, match):
        self.pool.touch(match.blocks)
        return list(match.blocks)

    def allocate(self, blocks, n):
        blocks.extend(self.pool.get_new_blocks(n))

    def cache(self, blocks, request, num_cached, upto):
        self.pool.cache_full_blocks(request, blocks, num_cached, upto, BLOCK_SIZE, 0)

    def free(self, blocks):
        self.pool.free_blocks(reversed(blocks))

    def free_queue(self):
        blocks = self.pool.free_block_queue.get_all_free_blocks()
        return [b.block_hash and tuple(int(part) for part in b.block_hash[:-4].split(b":")) for b in blocks]


class Stopwatch:
    """Runs operations of a pool and keeps count and time of each kind."""

    def __init__(self, pool):
        self.pool = pool
        self.num_calls = Counter()
        self.spent_ns = Counter()

    def __call__(self, operation, *arguments):
        method = getattr(self.pool, operation)
        start_ns = perf_counter_ns()
        result = method(*arguments)
        self.spent_ns[operation] += perf_counter_ns() - start_ns
        self.num_calls[operation] += 1
        return result


def serve(request, do):
    """The operations of one request; yields where the engine's step ends."""
    match = do("match", request)
    computed = match.num_blocks
    blocks = do("hold", match)
    while computed < request.num_blocks:
        left = request.prompt_blocks - computed
        n = min(CHUNK_BLOCKS, left) if left > 0 else 1
        do("allocate", blocks, n)
        do("cache", blocks, request, computed, computed + n)
        computed += n
        yield
    do("free", blocks)


def run(pool, requests):
    """Serve all requests, NUM_RUNNING at a time, one step each in turn."""
    do = Stopwatch(pool)
    waiting, running = deque(requests), deque()
    while waiting or running:
        while waiting and len(running) < NUM_RUNNING:
            running.append(serve(waiting.popleft(), do))
        steps = running.popleft()
        if next(steps, steps) is None:
            running.append(steps)
    return do


def table(title, runs, engine):
    print(f"{title}\n  operation      calls   runs us/op" + (" vLLM us/op    ratio" if engine else ""))
    for operation in (*OPERATIONS, "all"):
        kinds = OPERATIONS if operation == "all" else (operation,)
        calls = sum(runs.num_calls[kind] for kind in kinds)
        columns = [sum(do.spent_ns[kind] for kind in kinds) / calls / 1e3 for do in (runs, engine) if do]
        ratio = f"{columns[1] / columns[0]:9.1f}" if engine else ""
        print(f"  {operation:10s} {calls:9,d}" + "".join(f" {column:12.2f}" for column in columns) + ratio)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--without-vllm", action="store_true")
    options = parser.parse_args()
    for prompt_tokens in (12_000, 131_072):
        prompt_blocks = prompt_tokens // BLOCK_SIZE
        requests = list(make_requests(prompt_blocks, options.requests))
        pool, engine, reference = RunPool(POOL_PROMPTS * prompt_blocks), None, None
        runs = run(pool, requests)
        if not options.without_vllm:
            for request in requests:
                names = ((s, index) for s, start, end in request.segments for index in range(start, end))
                request.block_hashes = [b"%d:%d" % name for name in names]
            reference = EnginePool(POOL_PROMPTS * prompt_blocks)
            engine = run(reference, requests)
            assert pool.free_queue() == reference.free_queue(), "the two pools differ"
        table(f"{prompt_tokens:,}-token prompts, {POOL_PROMPTS * prompt_blocks:,} blocks", runs, engine)


if __name__ == "__main__":
    main()

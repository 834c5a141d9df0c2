"""What a lookup asks and costs: kvcore's frontier against the lookup code of the installed vLLM, in one run.

    python benchmarks/bench_lookup.py            both over an in-memory set of keys
    python benchmarks/bench_lookup.py --master   and over a real mooncake_master on loopback (start to answer)

The layout: one latent group of 256-token blocks, four window-128 groups of 64-token blocks in four shards each, as a
model with compressed layers has it at TP4. Either side starts from the request's block hashes and ends with the hit
length; both build the key strings that go over the wire. The pool holds everything, half of it, or nothing.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowSpec

from kvcore.group_runs import GroupRuns
from kvcore.keys import BlockHash, BlockKey, Namespace, format_key, shard_keys, whole_blocks
from kvcore.planner import Planner
from kvcore.runs import normalize
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from kvcore.types import Run

HASH_UNIT = 64
MODEL = ModelSpec((FullAttention(256), *[SlidingWindow(64, 128)] * 4))
SHARDS = (1, 4, 4, 4, 4)
LENGTHS = (32_768, 131_072, 1_048_576)
NAMESPACE = Namespace("0123456789abcdef")

Exists = Callable[[Sequence[str]], Sequence[int]]
"""Per key 1 when it is there, else 0: `batch_is_exist`."""


class Counted:
    """An `Exists` that counts the keys it is asked for, and its calls."""

    def __init__(self, exists: Exists) -> None:
        self._exists = exists
        self.keys = self.calls = 0

    def batch_is_exist(self, keys: Sequence[str]) -> Sequence[int]:
        """The answer of the store behind it."""
        self.keys += len(keys)
        self.calls += 1
        return self._exists(keys)


def frontier_lookup(num_tokens: int, hashes: Sequence[bytes], store: Counted) -> int:
    """The hit length as kvcore finds it, of a sequence of which the engine holds nothing."""
    dialogue = Planner(MODEL).frontier(0, num_tokens)
    while dialogue.open:
        dialogue.answered(_ask(dialogue.question, hashes, store))
    return dialogue.hit_len


def _ask(question: GroupRuns, hashes: Sequence[bytes], store: Counted) -> GroupRuns:
    keys = our_keys(question, hashes)
    present = [code == 1 for code in store.batch_is_exist(list(map(format_key, keys)))]
    return whole_blocks(tuple(enumerate(SHARDS)), question, present)


def our_keys(blocks: GroupRuns, hashes: Sequence[bytes]) -> list[BlockKey]:
    """Every shard of the blocks."""

    def hashes_of(group: int, run: Run) -> Sequence[BlockHash]:
        units = MODEL.groups[group].block_size // HASH_UNIT
        return cast(Sequence[BlockHash], hashes[(run[0] + 1) * units - 1 : run[1] * units : units])

    return shard_keys(NAMESPACE, tuple(enumerate(SHARDS)), hashes_of, blocks)


def vllm_worker() -> Any:
    """As much of vLLM's store worker as its `lookup` reads."""
    latent = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    window = SlidingWindowSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=128)
    groups = [KVCacheGroupSpec([f"layer.{index}"], latent if index == 0 else window) for index in range(5)]
    worker = SimpleNamespace(
        coord=MooncakeStoreCoordinator(groups, 256, HASH_UNIT),
        token_dbs=[SimpleNamespace(block_size=group.kv_cache_spec.block_size) for group in groups],
        hash_block_size=HASH_UNIT,
        _capacity_only=False,
        _kv_cache_groups=groups,
        _lookup_key_prefixes=[
            [f"model@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:{group}" for rank in range(shards)]
            for group, shards in enumerate(SHARDS)
        ],
        _record_kv_connector_operation=lambda *args, **kwargs: None,
    )
    worker._tail_key_boundaries = MethodType(MooncakeStoreWorker._tail_key_boundaries, worker)
    return worker


def vllm_lookup(worker: Any, num_tokens: int, hashes: Sequence[bytes], store: Counted) -> int:
    """The hit length as vLLM's in-tree connector finds it, on the worker."""
    worker.store = store
    return int(MooncakeStoreWorker.lookup(worker, num_tokens, hashes).hit_length)


def chain(num_tokens: int) -> list[bytes]:
    """32-byte names of the sequence's hash units."""
    return [unit.to_bytes(32, "big") for unit in range(1, num_tokens // HASH_UNIT + 1)]


def stored_keys(worker: Any, hashes: Sequence[bytes], stored_len: int) -> list[str]:
    """Both sides' names of every block of the first `stored_len` tokens."""
    blocks = tuple(normalize(((0, stored_len // spec.block_size),)) for spec in MODEL.groups)
    keys = our_keys(blocks, hashes)
    prefixes = worker._lookup_key_prefixes
    return [*map(format_key, keys), *(f"{prefixes[key.group][key.rank]}@{key.block_hash.hex()}" for key in keys)]


class MemoryPool:
    """A set of keys."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def fill(self, keys: Sequence[str]) -> None:
        """Hold these and no others."""
        self._keys = set(keys)

    def exists(self, keys: Sequence[str]) -> Sequence[int]:
        """1 for each that is held."""
        held = self._keys
        return [1 if key in held else 0 for key in keys]


class MasterPool:
    """A mooncake_master on loopback, with one client that lends memory and asks."""

    def __init__(self, folder: Path) -> None:
        import mooncake
        from mooncake.store import MooncakeDistributedStore

        os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        os.environ.setdefault("GLOG_minloglevel", "3")
        port, metrics_port = 50_751, 50_752
        binary = Path(mooncake.__file__).with_name("mooncake_master")
        flags = [f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1"]
        with (folder / "master.log").open("wb") as log:
            self._master = subprocess.Popen([str(binary), *flags], stdout=log, stderr=log)
        time.sleep(1.0)
        self._client = MooncakeDistributedStore()
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 16 << 20, "tcp", "", f"127.0.0.1:{port}")
        assert code == 0, code

    def fill(self, keys: Sequence[str]) -> None:
        """Hold these and no others."""
        self._client.remove_all(True)
        for start in range(0, len(keys), 4_096):
            part = list(keys[start : start + 4_096])
            assert self._client.put_batch(part, [b"x"] * len(part)) == 0

    def exists(self, keys: Sequence[str]) -> Sequence[int]:
        """The master's answer."""
        answers: Sequence[int] = self._client.batch_is_exist(list(keys))
        return answers

    def close(self) -> None:
        """End both."""
        self._client.close()
        self._master.kill()
        self._master.wait()


def median_ms(lookup: Callable[[], int], repeats: int, clock: Callable[[], float]) -> float:
    """Of `repeats` runs, in milliseconds of `clock`."""
    times = []
    for _ in range(repeats):
        start = clock()
        lookup()
        times.append(clock() - start)
    return statistics.median(times) * 1_000


def compare(pool: MemoryPool | MasterPool, clock: Callable[[], float], lengths: Sequence[int]) -> None:
    """One line per length and content."""
    titles = ("tokens", "stored", "hit", "keys", "rounds", "ms", "vLLM's", "ms", "keys", "time")
    print("".join(f"{title:>10}" for title in titles))
    worker = vllm_worker()
    for num_tokens in lengths:
        hashes = chain(num_tokens)
        for stored_len in (num_tokens, num_tokens // 2, 0):
            pool.fill(stored_keys(worker, hashes, stored_len))
            ours, theirs = Counted(pool.exists), Counted(pool.exists)
            hit_len = frontier_lookup(num_tokens + 1, hashes, ours)
            assert hit_len == vllm_lookup(worker, num_tokens + 1, hashes, theirs), (num_tokens, stored_len)
            our_keys_asked, rounds, their_keys_asked = ours.keys, ours.calls, theirs.keys
            repeats = max(3, min(50, 3_000_000 // num_tokens))
            our_ms = median_ms(partial(frontier_lookup, num_tokens + 1, hashes, ours), repeats, clock)
            their_ms = median_ms(partial(vllm_lookup, worker, num_tokens + 1, hashes, theirs), repeats, clock)
            print(
                f"{num_tokens:>10,}{stored_len:>10,}{hit_len:>10,}{our_keys_asked:>10,}{rounds:>10}{our_ms:>10.2f}"
                f"{their_keys_asked:>10,}{their_ms:>10.2f}"
                f"{their_keys_asked / our_keys_asked:>9.1f}x{their_ms / our_ms:>9.1f}x"
            )


def main() -> None:
    """CPU time over a set of keys; with --master, wall time over a master."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", action="store_true", help="also over a mooncake_master on loopback")
    with_master = parser.parse_args().master
    print("in memory, CPU time of the whole lookup")
    compare(MemoryPool(), time.process_time, LENGTHS)
    if with_master:
        print("\nover mooncake_master on loopback, wall time of the whole lookup")
        with tempfile.TemporaryDirectory() as folder:
            pool = MasterPool(Path(folder))
            try:
                compare(pool, time.perf_counter, LENGTHS[:2])
            finally:
                pool.close()


if __name__ == "__main__":
    main()

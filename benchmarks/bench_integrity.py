"""What verifying content costs: GB/s of making trailers, and of puts and gets on loopback against integrity "none".

    python benchmarks/bench_integrity.py [--rounds 15]

A block of one rank is one piece for each layer. Trailers are made over memory that is not in the caches, as blocks are
not, and timed by their thread's processor time. On loopback the modes take turns: bytes go through Mooncake's TCP
transport to a process that lends its memory, all on this machine. The fastest of a mode's rounds counts.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from kvconnector.pool_config import PoolConfig
from kvconnector.seal import Seal, SealedStore, checksum, keyed
from kvconnector.store import MooncakeStore, Pieces, PoolStore

from connector.testbed.pool import Pool
from kvcore.keys import BlockHash, BlockKey, Namespace
from kvcore.ports import StoreOutcome
from kvcore.units import NS_PER_S

MODES: dict[str, Seal | None] = {"none": None, "checksum": checksum(), "keyed": keyed(b"nobody else knows this")}
SHAPES = ((2, 8 << 10), (32, 8 << 10), (64, 32 << 10))
"""Layers, and bytes of a block in each: blocks of 16 KiB, 256 KiB and 2 MiB."""

SHARE = {"checksum": 1, "keyed": 16}
"""One in so many of the blocks is enough."""

MEMORY_BYTES = 192 << 20
JOB_BYTES = 24 << 20


class WallClock:
    """The process's clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


def blocks_in(memory: np.ndarray, num_layers: int, piece_bytes: int, total_bytes: int) -> list[Pieces]:
    """Blocks that lie in `memory` layer by layer, as an engine's do."""
    num_blocks = total_bytes // (num_layers * piece_bytes)
    layer_bytes = num_blocks * piece_bytes
    starts = [memory.ctypes.data + layer * layer_bytes for layer in range(num_layers)]
    return [[(start + block * piece_bytes, piece_bytes) for start in starts] for block in range(num_blocks)]


def print_speed(memory: np.ndarray, rounds: int) -> None:
    print(f"{'block':>10} {'pieces':>7} {'mode':>9} {'GB/s':>7} {'µs a block':>11}")
    for num_layers, piece_bytes in SHAPES:
        block_bytes = num_layers * piece_bytes
        blocks = blocks_in(memory, num_layers, piece_bytes, MEMORY_BYTES)
        for mode, seal in MODES.items():
            if seal is not None:
                used = blocks[: len(blocks) // SHARE[mode]]
                took_s = min(processor_seconds(seal, used) for _ in range(rounds)) / len(used)
                speed = f"{block_bytes / took_s / 1e9:7.2f} {took_s * 1e6:11.1f}"
                print(f"{kib(block_bytes):>10} {num_layers:>7} {mode:>9} {speed}")


def processor_seconds(seal: Seal, blocks: list[Pieces]) -> float:
    began_s = time.thread_time()
    trailers(seal, blocks)
    return time.thread_time() - began_s


def trailers(seal: Seal, blocks: list[Pieces]) -> None:
    for block in blocks:
        seal.trailer(b"0123456789abcdef-g0-r0-" + b"0" * 64, block)


def print_loopback(memory: np.ndarray, rounds: int) -> None:
    print(f"\na job of {JOB_BYTES >> 20} MiB on loopback")
    print(f"{'block':>10} {'mode':>9} {'put ms':>8} {'get ms':>8} {'put':>6} {'get':>6}")
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder))
        try:
            store = MooncakeStore(PoolConfig(pool.master.address, local_hostname="127.0.0.1"), WallClock())
            store.register(memory.ctypes.data, memory.nbytes)
            stores = {mode: SealedStore(store, seal) if seal else store for mode, seal in MODES.items()}
            for num_layers, piece_bytes in SHAPES:
                blocks = blocks_in(memory, num_layers, piece_bytes, JOB_BYTES)
                print_jobs(kib(num_layers * piece_bytes), stores, blocks, rounds)
            store.close()
        finally:
            pool.kill()


def print_jobs(block: str, stores: dict[str, PoolStore], blocks: list[Pieces], rounds: int) -> None:
    took: dict[str, list[tuple[float, float]]] = {mode: [] for mode in stores}
    for number in range(rounds + 1):
        for mode, store in stores.items():
            once = put_and_get(store, f"{mode}{number}", blocks)
            took[mode] += [once] if number else []  # the first round connects
    best = {mode: [min(times) for times in zip(*pairs, strict=True)] for mode, pairs in took.items()}
    for mode, (put_s, get_s) in best.items():
        put, get = put_s / best["none"][0], get_s / best["none"][1]
        print(f"{block:>10} {mode:>9} {put_s * 1e3:8.1f} {get_s * 1e3:8.1f} {put:6.2f} {get:6.2f}")


def put_and_get(store: PoolStore, namespace: str, blocks: list[Pieces]) -> tuple[float, float]:
    keys = [
        BlockKey(Namespace(namespace), 0, 0, BlockHash(number.to_bytes(32, "big"))) for number in range(len(blocks))
    ]
    deadline_ns = time.monotonic_ns() + 60 * NS_PER_S
    put_s = seconds(lambda: done(store.put(keys, blocks, deadline_ns)))
    get_s = seconds(lambda: done(store.get(keys, blocks, deadline_ns)))
    done(store.remove(keys, deadline_ns))
    return put_s, get_s


def done(outcomes: list[StoreOutcome]) -> None:
    assert set(outcomes) == {StoreOutcome.OK}, set(outcomes)


def seconds(call) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def kib(size_bytes: int) -> str:
    return f"{size_bytes >> 10} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    memory = np.frombuffer(np.random.default_rng(0).bytes(MEMORY_BYTES), np.uint8).copy()
    print_speed(memory, rounds)
    print_loopback(memory, rounds)


if __name__ == "__main__":
    main()

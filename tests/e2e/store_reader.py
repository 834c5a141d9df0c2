"""Reads objects "object 0", "object 1", ... of one byte each into its memory, once a line comes, and says what it got.

Arguments: the master's address, their number, their size, and what reads: "connector", or "mooncake", its bare client.
Answers READY, then READING, then a JSON line: one outcome per object, and whether its bytes are what was stored.
"""

import json
import os
import sys

import numpy as np

PIECES = 16


def read_as_the_connector(master, names, buffers):
    from kvconnector.pool_config import PoolConfig
    from kvconnector.store import MooncakeStore

    from kvcore.keys import BlockHash, BlockKey, Namespace
    from tests.kvconnector.test_transfer import MonotonicClock

    clock = MonotonicClock()
    store = MooncakeStore(PoolConfig(master, local_hostname="127.0.0.1"), clock, text=lambda key: names[key.rank])
    for pieces in buffers:
        store.register(pieces[0][0], sum(size for _, size in pieces))
    assert store.join(clock.now_ns() + 10**10)
    keys = [BlockKey(Namespace("n"), 0, number, BlockHash(b"\x01")) for number in range(len(names))]
    yield
    yield [outcome.value for outcome in store.get(keys, buffers, clock.now_ns() + 60 * 10**9)]


def read_as_mooncake(master, names, buffers):
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
    for pieces in buffers:
        assert client.register_buffer(pieces[0][0], sum(size for _, size in pieces)) == 0
    yield
    addresses = [[address for address, _ in pieces] for pieces in buffers]
    sizes = [[size for _, size in pieces] for pieces in buffers]
    codes = client.batch_get_into_multi_buffers(names, addresses, sizes)
    yield ["ok" if code > 0 else code for code in codes]


READERS = {"connector": read_as_the_connector, "mooncake": read_as_mooncake}


def main(master, number, size_bytes, reader):
    memory = np.zeros((int(number), int(size_bytes)), np.uint8)
    piece_bytes = int(size_bytes) // PIECES
    buffers = [
        [(row.ctypes.data + start, piece_bytes) for start in range(0, int(size_bytes), piece_bytes)] for row in memory
    ]
    reading = READERS[reader](master, [f"object {index}" for index in range(int(number))], buffers)
    next(reading)
    print("READY", flush=True)
    sys.stdin.readline()
    print("READING", flush=True)
    outcomes = next(reading)
    right = [bool((row == index + 1).all()) for index, row in enumerate(memory)]
    print(json.dumps({"outcomes": outcomes, "right": right}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

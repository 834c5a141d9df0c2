"""Lends a memory segment to the store and keeps it until stdin ends, so that data outlives the engines."""

import sys


def main(master, segment_bytes):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(segment_bytes), 16 << 20, "tcp", "", master)
    print(f"READY {code}", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

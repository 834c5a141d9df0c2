"""What the decision log costs: microseconds of the engine's thread and of the writer's, and bytes, for each request.

    python benchmarks/bench_record.py

Requests of several lengths in blocks of 16 tokens: one of which nothing is known, and a next turn of 2,048 tokens more.
The engine's thread hands a request over, the writer's makes ids and JSON. For comparison: a decode step on a GPU takes
5 to 50 ms, and few requests end in one.
"""

import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from kvconnector.record import Life, Origin, Recorder

from kvcore.keys import Namespace
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.request import KVRequest
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow

BLOCK = 16
TURN_BLOCKS = 128
REPEATS = 20
LENGTHS = (2_048, 32_768, 131_072, 1_048_576)
MODEL = ModelSpec((FullAttention(BLOCK), SlidingWindow(BLOCK, 4_096)))


class WallClock:
    """The process's clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class Timed(Recorder):
    """Notes the writer's time for each request, without what it waits for."""

    def __init__(self, path: str, key: str) -> None:
        self.writer_ns: list[int] = []
        super().__init__(path, Origin(MODEL, Namespace("0"), BLOCK, 8), WallClock(), key)

    def _described(self, closed):
        self._began_ns = time.thread_time_ns()
        return super()._described(closed)

    def _write(self, values):
        super()._write(values)
        if "ids" in values and "kvtwin_record" not in values:
            self.writer_ns.append(time.thread_time_ns() - self._began_ns)


def request_of(num_blocks: int, salt: int) -> SimpleNamespace:
    hashes = [hashlib.sha256(f"{salt} {block}".encode()).digest() for block in range(num_blocks)]
    return SimpleNamespace(num_tokens=num_blocks * BLOCK, block_hashes=hashes, arrival_time=time.time())


def measure(num_blocks: int, key: str) -> tuple[float, float, float, float, float]:
    """Medians: µs of the engine's thread; µs of the writer's for a new prompt and for a next turn; kB of both lines."""
    handed_ns = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Timed(str(Path(folder) / "log"), key)
        for salt in range(REPEATS):
            first = request_of(num_blocks, salt)
            for request in (first, grown(first, salt)):
                machine, life = KVRequest(Planner(MODEL), PoolPolicy(), request.num_tokens), Life(0)
                began_ns = time.perf_counter_ns()
                recorder.record(request, machine, life)
                handed_ns.append(time.perf_counter_ns() - began_ns)
            time.sleep(0.01)
        assert recorder.close()
        sizes = [len(line) for line in recorder.path.read_text().splitlines()[1:-1]]
    new, turn = recorder.writer_ns[::2], recorder.writer_ns[1::2]
    micros = [statistics.median(values) / 1e3 for values in (handed_ns, new, turn)]
    return *micros, statistics.median(sizes[::2]) / 1e3, statistics.median(sizes[1::2]) / 1e3


def grown(request: SimpleNamespace, salt: int) -> SimpleNamespace:
    """The next turn of its conversation."""
    more = request_of(TURN_BLOCKS, -1 - salt).block_hashes
    hashes = request.block_hashes + more
    return SimpleNamespace(num_tokens=len(hashes) * BLOCK, block_hashes=hashes, arrival_time=time.time())


def main() -> None:
    print("tokens      ids    engine's thread    writer, new prompt    writer, next turn    line, new    line, next")
    for num_tokens in LENGTHS:
        for key in ("", "a secret"):
            engine, new, turn, new_kb, turn_kb = measure(num_tokens // BLOCK, key)
            name = "keyed" if key else "plain"
            print(
                f"{num_tokens:>9,} {name:>6} {engine:>12.1f} us {new:>19,.0f} us {turn:>16,.0f} us"
                f" {new_kb:>12.1f} kB {turn_kb:>8.1f} kB"
            )


if __name__ == "__main__":
    main()

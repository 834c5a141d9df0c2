"""The simulated master equals the real one: random sequences of everything, step by step, and who survives."""

import random
import time
from itertools import count

import pytest

from kvcore.hints import NO_HINTS, Hints, Pin
from kvcore.types import GroupId, StreamId
from kvsim.pool.pins import SoftPins
from kvsim.pool.store import MooncakePool
from tests.differential.mooncake_master import master_and_client

G = GroupId(0)
BLOCK_BYTES = 16 << 10
CAPACITY = 1_024
LEASE_MS = 250
WATERMARK, RATIO = 0.9, 0.05
MS = 10**6
SETTLED_MS = 150
"""Nobody's lease ends so soon after a put that makes the master evict: its thread looks every 10 ms, or later."""

HINTS = {"none": NO_HINTS, "soft": Hints(pin=Pin.SOFT), "hard": Hints(pin=Pin.HARD)}


class Twin:
    """The simulated master, of objects that have a stream each: the real one knows nothing of sequences."""

    def __init__(self, make=MooncakePool):
        self.pool = make(CAPACITY * BLOCK_BYTES, (BLOCK_BYTES,), LEASE_MS * MS, WATERMARK, RATIO, SoftPins.GO_LAST)
        self.lease_ends = {}

    def call(self, name, key, now_ns, **more):
        answer = getattr(self.pool, name)(G, ((StreamId(key), 0, 1),), ((0, 1),), now_ns, **more)
        if name in ("exists", "get") and answer:
            self.lease_ends[key] = now_ns + LEASE_MS * MS
        return bool(answer)

    def has(self, key):
        return bool(self.pool.holds(G, ((StreamId(key), 0, 1),), ((0, 1),)))

    def would_cross(self):
        return self.pool.num_objects + 1 > WATERMARK * CAPACITY

    def settles_in_ns(self, now_ns):
        """How long until no lease ends within the next while."""
        ends = [end for end in self.lease_ends.values() if now_ns - 5 * MS <= end < now_ns + SETTLED_MS * MS]
        return max(ends) + 5 * MS - now_ns if ends else 0


class FirstInFirstOut(MooncakePool):
    """A wrong master: reads lease nothing and keep nothing young."""

    def _grant_found(self, group, segments, runs):
        return self._extents.found(group, segments, runs)


class Unpinned(MooncakePool):
    """A wrong master: pins are ignored."""

    def put(self, group, segments, runs, now_ns, hints=NO_HINTS, writer=None):
        return super().put(group, segments, runs, now_ns, NO_HINTS, writer)


class Real:
    """The same calls of a real master's client."""

    def __init__(self, master, client, prefix):
        from mooncake.store import ReplicateConfig, SoftPinAction

        self.master, self.client, self.prefix, self.value = master, client, prefix, bytes(BLOCK_BYTES)
        self.configs = {name: ReplicateConfig() for name in HINTS}
        self.configs["soft"].soft_pin_action = SoftPinAction.ENABLE
        self.configs["hard"].with_hard_pin = True

    def name(self, key):
        return f"{self.prefix}-{key}"

    def put(self, key, pin):
        return self.client.put(self.name(key), self.value, self.configs[pin]) == 0

    def exists(self, key):
        return self.client.is_exist(self.name(key)) == 1

    def get(self, key):
        return self.client.get(self.name(key)) == self.value

    def remove(self, key):
        return self.client.remove(self.name(key), True) == 0

    def await_eviction(self, below):
        """Until there are fewer objects; nobody's lease is renewed."""
        deadline = time.monotonic() + 2
        while len(self.master.stored_keys()) >= below and time.monotonic() < deadline:
            time.sleep(0.002)

    def present(self, keys):
        return {
            key
            for key, found in zip(keys, self.client.batch_is_exist(list(map(self.name, keys))), strict=True)
            if found == 1
        }


def play(twin, real, seed, num_steps):
    """Both do the same; returns the steps at which they answered differently, and the keys."""
    rng, fresh, differ = random.Random(seed), count(), []
    keys, now = [], time.monotonic_ns
    for step in range(num_steps):
        name = rng.choices(("put", "exists", "get", "remove", "wait"), (80, 12, 6, 2, 0.5))[0]
        if name == "wait":
            time.sleep(rng.choice((0.02, 1.2 * LEASE_MS / 1_000)))
        elif name == "put":
            pin = rng.choices(tuple(HINTS), (90, 8, 2))[0]
            crosses = twin.would_cross()
            while crosses and (pause_ns := twin.settles_in_ns(now())):
                time.sleep(pause_ns / 1e9)
            keys.append(next(fresh))
            before = twin.pool.num_objects + 1
            accepted = real.put(keys[-1], pin)
            if accepted == twin.call("put", keys[-1], now(), hints=HINTS[pin]):
                differ.append((step, name, keys[-1]))
            if crosses:
                real.await_eviction(before)
        elif keys:
            key = rng.choice(keys[-CAPACITY:])
            before = now()
            if getattr(real, name)(key) != twin.call(name, key, before):
                differ.append((step, name, key))
    return differ, keys


def disagreements(twin, running, seed, num_steps):
    """(answers that differ, keys that are here in one and not in the other, how many are gone from the real master)."""
    real = Real(*running, f"{seed}.{time.monotonic_ns()}")
    differ, keys = play(twin, real, seed, num_steps)
    present = real.present(keys)
    expected = {key for key in keys if twin.has(key)}
    real.client.remove_all(True)
    return differ, present ^ expected, len(keys) - len(present)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("master")
    with master_and_client(folder, CAPACITY * BLOCK_BYTES, LEASE_MS, WATERMARK, RATIO) as running:
        yield running


@pytest.mark.store
@pytest.mark.parametrize("seed", range(2))
def test_every_answer_and_every_survivor_is_a_real_masters(running, seed):
    differ, strays, gone = disagreements(Twin(), running, seed, 2_000)
    assert gone > 500
    assert (differ, strays) == ([], set())


@pytest.mark.store
@pytest.mark.parametrize("wrong", [FirstInFirstOut, Unpinned])
def test_a_wrong_master_is_found_out(running, wrong):
    _, strays, gone = disagreements(Twin(wrong), running, 0, 1_500)
    assert gone > 100
    assert len(strays) > 10

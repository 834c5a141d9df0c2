"""A pool that is full, evicts, is probed by all, loses a writer or its master: it costs hits, and they come back."""

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass

import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.e2e.test_faults import resumes_hitting
from tests.e2e.test_metrics import Watch

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

LEASE_S, DISCARD_S = 0.5, 3
FLAGS = (
    "--eviction_high_watermark_ratio=1",
    f"--default_kv_lease_ttl={int(LEASE_S * 1_000)}",
    f"--put_start_discard_timeout_sec={DISCARD_S}",
    f"--put_start_release_timeout_sec={DISCARD_S + 1}",
)
SEGMENT_BYTES = 64 << 20
LARGE_BYTES, BLOCK_BYTES = 1 << 20, 32 << 10


@dataclass
class Fleet:
    """A `producer`, which only stores, and an `engine` that also loads, on a pool that may become another one."""

    pool: Pool
    producer: Engine
    engine: Engine

    def generate(self, prompts, max_tokens=16):
        """By the engine, without what it has cached; when this returns, all is stored."""
        assert self.engine.call("reset_local")
        return self.touch(prompts, max_tokens)

    def touch(self, prompts, max_tokens=16):
        """The same, with what it has cached."""
        answer = self.engine.generate(prompts, max_tokens)
        self.engine.call("settle")
        return answer

    def leave_room_for(self, num_blocks):
        """From here on the pool has room for so many blocks, whatever it evicts."""
        from mooncake.store import ReplicateConfig

        self.pool.empty()
        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        with self.pool.client() as client:
            for number in range(SEGMENT_BYTES // LARGE_BYTES - num_blocks * BLOCK_BYTES // LARGE_BYTES - 3):
                assert client.put(f"large {number}", bytes(LARGE_BYTES), pinned) == 0
            small = (f"small {number}" for number in itertools.count())
            while client.put(next(small), bytes(BLOCK_BYTES), pinned) == 0:
                pass
        self.give_room(range(num_blocks))

    def give_room(self, numbers):
        """From here on there is room in the place of these pinned objects, each of a block."""
        with self.pool.client() as client:
            for number in numbers:
                assert client.remove(f"small {number}", True) == 0

    def use_another_pool(self):
        """From here on the pool is another one, which is empty."""
        self.pool.kill()
        self.pool.start()
        assert resumes_hitting(lambda: self.generate([[number % 900 + 3 for number in range(700)]]))
        self.pool.empty()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case-pool")
    pool = Pool(folder, SEGMENT_BYTES, FLAGS)
    model = write_tiny_model("qwen3", folder / "model")
    started = []

    def start(name, role):
        connector = {**CONNECTOR, "role": role}
        started.append(Engine({"model": model, "connector": connector}, folder / f"{name}.log", pool.environment()))
        return started[-1]

    try:
        producer, engine = start("producer", "kv_producer"), start("engine", "kv_both")
        yield Fleet(pool, producer.ready(), engine.ready())
    finally:
        for each in started:
            each.kill()
        pool.kill()


@contextlib.contextmanager
def meanwhile(pool, act):
    """Until the block ends, another client of the pool does `act(client)` again and again."""
    ended = threading.Event()

    def run():
        with pool.client() as client:
            while not ended.wait(0.02):
                act(client)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


def fill(client):
    """Store what nobody will ask for."""
    for _ in range(8):
        client.put(f"filler {time.monotonic_ns()}", bytes(256 << 10))


def names_of(engine, operation):
    """The keys of all these calls since faults were last ordered."""
    return {name for names in engine.call("calls", operation=operation) for name in names}


def test_who_only_stores_frees_all_its_blocks_also_when_everything_is_stored_already(fleet, prompt, faults):
    """Case S11: 50 equal prompts at once, and again without what the engine has cached."""
    prompts = [prompt(700)] * 50
    free_blocks = fleet.producer.call("free_blocks")
    faults(fleet.producer)
    for _ in range(2):
        assert fleet.producer.call("reset_local")
        answer = fleet.producer.generate(prompts)
        assert len(answer["tokens"]) == 50
        fleet.producer.call("settle")
        assert fleet.producer.call("free_blocks") == free_blocks
    assert fleet.producer.call("calls", operation="exists") == fleet.producer.call("calls", operation="get") == []
    hit = fleet.generate(prompts[:1])
    assert (hit["cached"], hit["tokens"]) == ([672], answer["tokens"][:1])


def test_what_a_dead_writer_left_half_stored_is_a_miss_and_can_be_stored_again(fleet, prompt):
    """Case S20: it is killed while its bytes are on their way to a holder that is frozen."""
    tokens = prompt(700)
    fleet.pool.empty()
    fleet.pool.owner.process.freeze()
    try:
        right = fleet.producer.generate([tokens])["tokens"]
        time.sleep(1)
        fleet.producer.kill()
    finally:
        fleet.pool.owner.process.thaw()
    assert fleet.pool.master.stored_keys() == []
    assert "\nmaster_key_count 0\n" not in fleet.pool.master.http("metrics"), "nothing is half stored"
    start = time.monotonic()
    first = fleet.generate([tokens])
    assert time.monotonic() - start < DISCARD_S
    assert (first["cached"], first["tokens"]) == ([0], right)
    assert resumes_hitting(lambda: fleet.generate([tokens]))["tokens"] == right
    assert time.monotonic() - start < 5 * DISCARD_S


def test_what_is_evicted_between_lookup_and_load_costs_time_and_no_token(fleet, prompt, faults):
    """Case S13: 16 prompts at once, leases shorter than the transfers, and somebody who fills the pool."""
    prompts = [prompt(1_500, number) for number in range(16)]
    right = fleet.generate(prompts)["tokens"]
    free_blocks = fleet.engine.call("free_blocks")
    faults(fleet.engine, {"on": "get", "do": "delay", "seconds": 0.05})
    watch, deadline = Watch(fleet.engine), time.monotonic() + 40
    with meanwhile(fleet.pool, fill):
        while not watch.changes().get("late_misses_total{}"):
            assert time.monotonic() < deadline, "nothing was evicted in time"
            assert fleet.generate(prompts)["tokens"] == right
    faults(fleet.engine)
    while (hit := fleet.generate(prompts))["cached"] != [1_472] * 16:
        assert time.monotonic() < deadline
    assert hit["tokens"] == right
    assert fleet.engine.call("free_blocks") == free_blocks


RESIDENTS = 6


def test_new_prompts_are_stored_in_a_full_pool_whose_prompts_are_all_asked_for_again_and_again(fleet, prompt, faults):
    """Case S14: what an engine has itself it does not ask the pool for, so that nothing is leased for ever."""
    fleet.leave_room_for(RESIDENTS * 21)
    residents, new = [prompt(700, number) for number in range(RESIDENTS)], prompt(700, RESIDENTS)
    faults(fleet.engine)
    fleet.touch(residents, 1)
    old_names = names_of(fleet.engine, "put")
    faults(fleet.engine)
    deadline = time.monotonic() + 20
    with control_that_asks_for_all(fleet.pool, old_names):
        for _ in range(5):
            fleet.touch([*residents, new], 1)
            time.sleep(LEASE_S / 4)
        new_names = names_of(fleet.engine, "put") - old_names
        assert not new_names <= set(fleet.pool.master.stored_keys()), "control: who asks for all keeps others out"
    assert not names_of(fleet.engine, "exists") & old_names
    while not new_names <= set(fleet.pool.master.stored_keys()):
        assert time.monotonic() < deadline
        fleet.touch([*residents, new], 1)
        time.sleep(LEASE_S / 4)


def control_that_asks_for_all(pool, names):
    return meanwhile(pool, lambda client: client.batch_is_exist(list(names)))


def test_what_the_pool_refused_is_offered_again_until_it_fits(fleet, prompt):
    """Case S21: of 21 blocks, 13 have room."""
    fleet.leave_room_for(13)
    tokens, watch = prompt(700), Watch(fleet.engine)
    right = fleet.generate([tokens], 4)["tokens"]
    changes = watch.changes()
    assert min(changes["keys_total{store,no_space}"], changes["rejected_blocks_total{}"]) > 0
    for _ in range(2):
        answer = fleet.generate([tokens], 4)
        assert answer["cached"][0] <= 13 * 32
        assert answer["tokens"] == right
    fleet.give_room(range(13, 42))
    assert resumes_hitting(lambda: fleet.generate([tokens], 4))["tokens"] == right


def test_requests_go_on_while_the_master_is_gone_and_hit_again_when_it_is_back(fleet, prompt):
    """Case S22: it dies under load, and comes back while there still is load."""
    fleet.use_another_pool()
    known, prompts = prompt(700), [prompt(300, number) for number in range(1, 9)]
    right = fleet.generate(prompts, 300)["tokens"]
    fleet.generate([known])
    fleet.engine.call("longest_step_s")
    answers = []
    load = threading.Thread(target=lambda: answers.extend(fleet.generate(prompts, 300) for _ in range(4)))
    load.start()
    time.sleep(0.5)
    fleet.pool.kill()
    time.sleep(4)
    fleet.pool.start()
    load.join(100)
    assert [answer["tokens"] for answer in answers] == [right] * 4
    longest_s = fleet.engine.call("longest_step_s")
    assert longest_s < 1.0  # 0.05 s on an idle machine; a call to a dead master takes Mooncake 4 s
    assert resumes_hitting(lambda: fleet.generate([known]))

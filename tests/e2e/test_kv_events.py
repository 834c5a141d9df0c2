"""A subscriber to the engine's KV events, over ZMQ as routers have it, finds in the pool what is in the pool."""

import time

import msgspec
import pytest
import zmq

from connector.testbed.processes import free_port
from connector.testbed.tiny_model import write_tiny_model
from kvcore.kv_events import BlocksRemoved, BlocksStored, EventIndex, Medium, Place
from kvcore.types import GroupId
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK = 32
WINDOW_GROUPS = {"qwen3": 0, "gemma3": 1}


class Subscriber:
    """What a router does: vLLM's batches as plain maps, and of the pool's events an index for each group."""

    def __init__(self, port):
        from vllm.distributed.kv_events import KVEventBatch

        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.bind(f"tcp://127.0.0.1:{port}")  # vLLM connects to an endpoint without a wildcard
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.indices, self.stored, self.removed = {}, {}, []

    def hear(self, quiet_s=0.5):
        """All that is published, until nothing has been for a while."""
        while self.socket.poll(quiet_s * 1_000):
            for event in self.decoder.decode(self.socket.recv_multipart()[2]).events:
                if getattr(event, "medium", None) == "CPU":
                    self.learn(event)

    def learn(self, event):
        place, hashes = Place(Medium.CPU, GroupId(event.group_idx)), tuple(event.block_hashes)
        index = self.indices.setdefault(event.group_idx, EventIndex(place))
        if type(event).__name__ == "BlockRemoved":
            self.removed += [(event.group_idx, block_hash) for block_hash in hashes]
            index.apply(BlocksRemoved(place, hashes))
            return
        self.stored.update({(event.group_idx, block_hash): event for block_hash in hashes})
        keys = tuple(event.extra_keys)
        value = BlocksStored(place, hashes, event.parent_block_hash, tuple(event.token_ids), event.block_size, keys)
        index.apply(value)

    def close(self):
        self.socket.close(linger=0)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def heard(request, pool, tmp_path_factory):
    """(engine, subscriber, how many of its groups are windows)."""
    folder, port = tmp_path_factory.mktemp(f"events-{request.param}"), free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}
    model = write_tiny_model(request.param, folder / "model")
    config = {"model": model, "connector": CONNECTOR, "options": {"kv_events_config": events}}
    environment = {**pool.environment(), "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    engine, subscriber = Engine(config, folder / "engine.log", environment), Subscriber(port)
    try:
        yield engine.ready(), subscriber, WINDOW_GROUPS[request.param]
    finally:
        subscriber.close()
        engine.kill()


def object_names(pool):
    """(group, block hash) of every object, out of its key."""
    keys = [key.split("-") for key in pool.master.stored_keys()]
    return {(int(group.removeprefix("g")), bytes.fromhex(block_hash)) for _, group, _, block_hash in keys}


def test_the_subscriber_knows_what_is_in_the_pool_and_where_it_belongs(heard, pool, prompt):
    engine, subscriber, num_windows = heard
    subscriber.hear()
    pool.empty()
    subscriber.stored.clear()
    first = prompt(700)
    second = first[:320] + prompt(200, 1)
    for tokens in (first, second):
        engine.generate([tokens], 1)
        engine.call("settle")
    subscriber.hear()
    assert subscriber.stored.keys() == object_names(pool)
    assert len(subscriber.indices) == num_windows + 1
    asked = (first, second, first[:320], prompt(320, 2))
    prefixes = [[index.prefix_blocks(tokens, BLOCK) for tokens in asked] for index in subscriber.indices.values()]
    assert max(prefixes) == [700 // BLOCK, 520 // BLOCK, 320 // BLOCK, 0]  # of the group that keeps all


def test_what_an_engine_finds_gone_is_taken_back(heard, pool, prompt, faults):
    """The object goes between the answer of the lookup and the get."""
    engine, subscriber, _ = heard
    tokens = prompt(700)
    engine.generate([tokens], 1)
    engine.call("settle")
    subscriber.hear()
    subscriber.removed.clear()
    assert engine.call("reset_local")
    faults(engine, {"on": "get", "do": "remove", "keys": [0]})
    engine.generate([tokens], 1)
    engine.call("settle")
    faults(engine)
    subscriber.hear()
    assert len(subscriber.removed) == 1
    assert subscriber.removed[0] in object_names(pool), "computed, stored and told again"
    assert subscriber.removed[0] in subscriber.stored


def test_a_reset_of_the_cache_takes_everything_back(heard, prompt):
    engine, subscriber, _ = heard
    engine.generate([prompt(300)], 1)
    engine.call("settle")
    subscriber.hear()
    assert sum(map(len, subscriber.indices.values()))
    assert engine.call("reset_local", connector=True)
    engine.generate([prompt(40, 1)], 1)  # events are published with a step
    engine.call("settle")
    time.sleep(0.1)
    subscriber.hear()
    assert sum(map(len, subscriber.indices.values())) == len(subscriber.indices)  # one block in each group

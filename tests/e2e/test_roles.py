"""A producer only stores, a consumer only loads, and an engine that only lends memory does neither."""

from dataclasses import dataclass

import pytest

from connector.testbed.pool import Pool
from tests.e2e.conftest import CONNECTOR, Engines
from tests.e2e.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]


@dataclass
class Roles:
    """Both on the pool of the engines that do everything."""

    engines: Engines
    producer: Engine
    consumer: Engine


def start(model, role, pool, folder, **extra):
    connector = {**CONNECTOR, "role": role, "extra": {**CONNECTOR["extra"], **extra}}
    return Engine({"model": model, "connector": connector}, folder / f"{role}.log", pool.environment())


@pytest.fixture(scope="module")
def roles(engines, pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    started = [start(engines.model, role, pool, folder) for role in ("kv_producer", "kv_consumer")]
    try:
        yield Roles(engines, *(engine.ready() for engine in started))
    finally:
        for engine in started:
            engine.kill()


def answered(engine, tokens):
    """Without what the engine has cached itself; when this returns, all stores have ended."""
    assert engine.call("reset_local")
    answer = engine.generate([tokens])
    engine.call("settle")
    return answer["tokens"], answer["cached"]


def done(engine, *operations):
    """Keys that were asked, loaded or stored so far, whatever became of them."""
    counted = engine.call("metrics").items()
    return sum(value for name, value in counted for operation in operations if f"keys_total{{{operation}," in name)


def test_what_a_producer_stores_a_consumer_loads(roles, prompt):
    tokens, free_blocks = prompt(700), roles.consumer.call("free_blocks")
    right = roles.engines.plain.generate([tokens])["tokens"]
    assert answered(roles.producer, tokens) == (right, [0])
    assert answered(roles.consumer, tokens) == (right, [672])
    assert roles.consumer.call("free_blocks") == free_blocks
    assert (done(roles.producer, "store") > 0, done(roles.consumer, "lookup", "load") > 0) == (True, True)


def test_a_producer_never_looks_up_and_a_consumer_never_stores(roles, prompt):
    """What they leave undone is there to be done: an engine with both roles does it."""
    tokens, stored = prompt(700), set(roles.engines.pool.master.stored_keys())
    right, _ = answered(roles.consumer, tokens)
    assert set(roles.engines.pool.master.stored_keys()) == stored
    assert roles.engines.store([tokens])["tokens"] == right
    assert set(roles.engines.pool.master.stored_keys()) > stored
    assert answered(roles.producer, tokens) == (right, [0])
    hit = roles.engines.read([tokens])
    assert (hit["tokens"], hit["cached"]) == (right, [672])
    assert (done(roles.producer, "lookup", "load"), done(roles.consumer, "store")) == (0, 0)
    assert roles.producer.call("metrics")["lookups_total{}"] == 0


class BarePool(Pool):
    """A master to which nobody has lent memory."""

    def lend(self):
        pass

    def kill(self):
        self.master.kill()


@pytest.mark.parametrize("engines", ["qwen3"], indirect=True)
def test_an_engine_that_lends_memory_is_the_pool_of_another_one(engines, prompt, tmp_path):
    """Before it is there, nothing can be stored; it neither loads nor stores itself."""
    tokens, pool, started = prompt(700), BarePool(tmp_path), []
    right = engines.plain.generate([tokens])["tokens"]
    try:
        started.append(start(engines.model, "kv_both", pool, tmp_path))
        for _ in range(2):
            assert answered(started[0], tokens) == (right, [0])
        assert pool.master.stored_keys() == []
        lender = {"mode": "embedded", "global_segment_size": "64MB", "loads": False, "stores": False}
        started.append(start(engines.model, "kv_consumer", pool, tmp_path, **lender).ready())
        answered(started[0], tokens)
        assert len(pool.master.stored_keys()) >= 21
        assert answered(started[0], tokens) == (right, [672])
        assert answered(started[1], tokens) == (right, [0])
        assert done(started[1], "lookup", "load", "store") == 0
    finally:
        for engine in started:
            engine.kill()
        pool.kill()

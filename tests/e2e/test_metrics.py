"""After a real store and a real hit, vLLM's Prometheus registry shows what happened, to the key and the byte."""

import time

import pytest

from tests.e2e.faulty_client import MISSING

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]


TIMES_AND_BOUNDS = ("_bucket", "_sum", "max_pinned_blocks")


class Watch:
    """What an engine's metrics rose by since this was made; what did not change is left out."""

    def __init__(self, engine):
        self.engine, self.before = engine, engine.call("metrics")

    def changes(self):
        after = self.engine.call("metrics")
        rose = {name: value - self.before[name] for name, value in after.items() if value != self.before[name]}
        return {name: value for name, value in rose.items() if not any(part in name for part in TIMES_AND_BOUNDS)}


def stored_bytes(pool, keys):
    with pool.client() as client:
        return sum(client.get_size(key) for key in keys)


def test_a_store_and_a_hit_in_numbers(engines, prompt, faults):
    tokens, before = prompt(700), set(engines.pool.master.stored_keys())
    watch = Watch(engines.writer)
    engines.store([tokens], max_tokens=1)
    new_keys = set(engines.pool.master.stored_keys()) - before
    assert len(new_keys) >= 21
    size_bytes = stored_bytes(engines.pool, new_keys)
    wrote = watch.changes()
    num_stores = wrote.pop("operation_seconds_count{store}")
    assert num_stores >= 1
    num_missing, num_rounds = wrote.pop("keys_total{lookup,missing}"), wrote.pop("lookup_rounds_total{}")
    assert num_missing >= 1
    assert num_rounds >= 1
    assert wrote == {
        "prompt_tokens_total{computed}": 700,
        "lookups_total{}": 1,
        "operation_seconds_count{lookup}": 1,
        "keys_total{store,ok}": len(new_keys),
        "bytes_total{store}": size_bytes,
    }

    watch = Watch(engines.reader)
    faults(engines.reader)  # calls are counted from here
    assert engines.read([tokens], max_tokens=1)["cached"] == [672]
    gets = [key for keys in engines.reader.call("calls", operation="get") for key in keys]
    read = watch.changes()
    asked = read.pop("keys_total{lookup,ok}")
    assert asked >= len(gets) >= 21
    assert read.pop("lookup_rounds_total{}") >= 1
    assert read == {
        "prompt_tokens_total{pool}": 672,
        "prompt_tokens_total{computed}": 28,
        "lookups_total{}": 1,
        "operation_seconds_count{lookup}": 1,
        "operation_seconds_count{load}": 1,
        "keys_total{load,ok}": len(gets),
        "bytes_total{load}": size_bytes // len(new_keys) * len(gets),  # here all groups have blocks of one size
    }


def test_a_local_hit_is_none_of_the_pool(engines, prompt):
    tokens = prompt(700)
    engines.store([tokens], max_tokens=1)
    watch = Watch(engines.writer)
    engines.store([tokens], max_tokens=1)
    assert watch.changes() == {"prompt_tokens_total{local}": 672, "prompt_tokens_total{computed}": 28}


def test_what_fails_is_counted_by_its_reason(engines, prompt, faults):
    tokens = prompt(700)
    engines.store([tokens], max_tokens=1)
    watch = Watch(engines.reader)
    faults(engines.reader, {"on": "get", "do": "fail", "code": MISSING, "keys": [0, 1]})
    engines.read([tokens], max_tokens=1)
    failed = watch.changes()
    assert failed["keys_total{load,missing}"] == 2
    assert failed["late_misses_total{}"] == 2
    assert failed["prompt_tokens_total{computed}"] == 700
    assert "prompt_tokens_total{pool}" not in failed


def test_a_pool_that_does_not_answer_is_seen(engines, prompt):
    """Frozen, the master answers nobody; what is asked then costs hits, and is counted, until nothing is asked."""
    watch = Watch(engines.reader)
    engines.pool.master.process.freeze()
    try:
        for number in range(4):  # the first three lookups find out
            engines.reader.generate([prompt(200, number)], max_tokens=64)
        changes = watch.changes()
    finally:
        engines.pool.master.process.thaw()
    assert changes["breaker_state{scheduler}"] >= 1
    assert changes["lookups_total{}"] == 3
    lost = [changes.get(f"keys_total{{lookup,{outcome}}}", 0) for outcome in ("timeout", "unavailable")]
    assert sum(lost) >= 12
    deadline = time.monotonic() + 30
    number = 4
    while engines.reader.call("metrics")["breaker_state{scheduler}"]:
        assert time.monotonic() < deadline, "the pool does not come back"
        engines.reader.generate([prompt(200, number)], max_tokens=2)
        engines.reader.call("settle")
        number += 1

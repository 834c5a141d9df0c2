"""A reset leaves nothing that this engine loads, and nothing of others is touched; whatever is on its way."""

import time

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]


def namespaces(pool):
    """{namespace: objects in it}"""
    found = [key.split("-")[0] for key in pool.master.stored_keys() if "-g0-" in key]
    return {name: found.count(name) for name in found}


def reset(proxied):
    return proxied.engine.call("reset_local", connector=True)


def test_stores_that_wait_at_a_reset_are_never_loaded(proxied, prompt, faults):
    tokens = prompt(700)
    proxied.pool.empty()
    faults(proxied.engine, {"on": "put", "do": "hold"})
    right = proxied.engine.generate([tokens])["tokens"]
    assert namespaces(proxied.pool) == {}
    reset(proxied)  # of the connector; the engine's own cannot be, as stores hold blocks
    faults(proxied.engine)
    proxied.engine.call("settle")
    (before,) = namespaces(proxied.pool)
    again = proxied.generate([tokens])
    assert (again["cached"], again["tokens"]) == ([0], right)
    (after,) = namespaces(proxied.pool).keys() - {before}
    hit = proxied.generate([tokens])
    assert (hit["cached"], hit["tokens"]) == ([672], right)
    assert namespaces(proxied.pool).keys() == {before, after}


def test_the_next_reset_empties_what_was_this_engine_s_alone(proxied, prompt):
    tokens = prompt(700)
    proxied.pool.empty()
    reset(proxied)
    proxied.generate([tokens])
    (own,) = namespaces(proxied.pool)
    with proxied.pool.client() as stranger:
        assert stranger.put("stranger", b"bytes") == 0
    time.sleep(1.5)  # leases end
    assert reset(proxied)
    deadline = time.monotonic() + 10
    while own in namespaces(proxied.pool):
        assert time.monotonic() < deadline, namespaces(proxied.pool)
        time.sleep(0.05)
    assert "stranger" in proxied.pool.master.stored_keys()
    assert proxied.generate([tokens])["cached"] == [0]
    assert proxied.generate([tokens])["cached"] == [672]


def test_a_reset_does_not_wait_for_a_pool_that_does_not_answer(proxied, prompt):
    tokens = prompt(700)
    reset(proxied)
    right = proxied.generate([tokens])["tokens"]
    proxied.pool.master.process.freeze()
    try:
        start = time.monotonic()
        assert reset(proxied)
        assert reset(proxied)
        assert time.monotonic() - start < 2.0
        answer = proxied.engine.generate([tokens])
        assert (answer["cached"], answer["tokens"]) == ([0], right)
    finally:
        proxied.pool.master.process.thaw()
    proxied.engine.call("settle")
    deadline = time.monotonic() + 60
    while proxied.generate([tokens])["cached"] != [672]:
        assert time.monotonic() < deadline, "no hits any more"

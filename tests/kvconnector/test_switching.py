"""In vLLM's real scheduler: what is switched off does not happen, on any rank, is seen, and is made up for later."""

from types import SimpleNamespace

import pytest
from kvconnector.metrics import BREAKER, CONTROL_REFUSED, LOOKUPS, PROMPT_TOKENS, SWITCHED_OFF

from kvcore.access import ALL_ACCESS, NO_ACCESS, Access, Switch
from kvcore.breaker import BreakerState

pytestmark = pytest.mark.engine

NO_READS, NO_WRITES = Access(reads=Switch.OFF), Access(writes=Switch.OFF)
TEXT = "abcdefghijklmnopqrstuvw"
NUM_RANKS = 2
BLOCKS = len(TEXT) // 4


@pytest.fixture
def engine(monkeypatch):
    """Blocks of 4 tokens; the control file is a value of the test's."""
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    engine = modelless_engine.Engine([modelless_engine.full(4)], 64, NUM_RANKS)
    engine.connector._heed(SimpleNamespace(access=ALL_ACCESS, refused=False))
    engine.told, take_stats = {}, engine.connector.get_kv_connector_stats

    def told():
        stats = take_stats()
        engine.told.update(stats.data if stats is not None else {})
        return stats

    engine.connector.get_kv_connector_stats = told
    return engine


def run(engine, name, access, text=TEXT):
    """What was told of a prompt that the engine's own cache does not have; what it generates is right anyway."""
    assert engine.scheduler.reset_prefix_cache()
    engine.connector._control.access = access
    engine.told.clear()
    engine.add(name, text, 1)
    engine.drain()
    engine.check_nothing_is_left()
    return engine.told


@pytest.mark.parametrize("access", [NO_READS, NO_ACCESS])
def test_with_reads_off_a_hit_is_computed(engine, access):
    run(engine, "stores", ALL_ACCESS)
    told = run(engine, "computes", access)
    assert told[PROMPT_TOKENS.of("computed")] == len(TEXT)
    assert LOOKUPS.of() not in told
    assert told[SWITCHED_OFF.of("reads")] == 1
    told = run(engine, "hits", ALL_ACCESS)
    assert told[PROMPT_TOKENS.of("pool")] == 4 * BLOCKS
    assert told[SWITCHED_OFF.of("reads")] == 0


def test_with_writes_off_no_rank_stores_until_it_is_touched_with_writes_on(engine):
    told = run(engine, "computes", NO_WRITES)
    assert (engine.pool, told[SWITCHED_OFF.of("writes")]) == ({}, 1)
    run(engine, "still off", NO_ACCESS)
    assert engine.pool == {}
    run(engine, "stores", ALL_ACCESS)
    assert len(engine.pool) == NUM_RANKS * BLOCKS


def test_what_was_not_stored_is_offered_from_the_engine_s_own_cache(engine):
    run(engine, "computes", NO_WRITES)
    engine.connector._control.access = ALL_ACCESS
    engine.add("finds it there", TEXT + "more of it", 1)
    engine.drain()
    assert len(engine.pool) == NUM_RANKS * (len(TEXT + "more of it") // 4)


def test_switched_while_requests_run(engine):
    """At every step of them; the tokens are asserted by the engine."""
    for number, access in enumerate((NO_READS, NO_WRITES, NO_ACCESS, ALL_ACCESS) * 6):
        engine.connector._control.access = access
        engine.add(str(number), TEXT[: 5 + number % 17] + "123456789"[: number % 8], 6)
        engine.step()
        engine.lookups.answer(engine.pool)
        for rank in range(NUM_RANKS):
            engine.move("load", rank)
            engine.move("store", rank)
    engine.drain()
    engine.check_nothing_is_left()


def test_a_pool_that_does_not_answer_is_as_if_all_were_switched_off(engine):
    run(engine, "stores", ALL_ACCESS)
    before = len(engine.pool)
    engine.connector._store.access, engine.connector._store.state = NO_ACCESS, BreakerState.OPEN
    told = run(engine, "computes", ALL_ACCESS, TEXT + "and more")
    assert LOOKUPS.of() not in told
    assert (told[BREAKER.of("scheduler")], len(engine.pool)) == (2, before)
    assert SWITCHED_OFF.of("reads") not in told, "that is somebody else's doing"
    engine.connector._store.access, engine.connector._store.state = ALL_ACCESS, BreakerState.CLOSED
    assert run(engine, "hits", NO_WRITES)[PROMPT_TOKENS.of("pool")] == 4 * BLOCKS


def test_a_file_that_is_not_understood_is_seen(engine):
    engine.connector._control.refused = True
    assert run(engine, "refused", ALL_ACCESS)[CONTROL_REFUSED.of()] == 1

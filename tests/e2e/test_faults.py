"""A pool that fails costs time, never a token: every request ends, with what an engine without connector says."""

import time

import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR, LOOKUP_DEADLINE_S
from tests.e2e.faulty_client import MISSING, RPC_FAILED, RPC_TIMEOUT
from tests.e2e.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

DEAD_MASTER_S = 4.0
"""What a call of Mooncake takes when no master answers: the connector does not make it."""


@pytest.fixture
def control(engines):
    """Give both engines' control file this content, or take it away; when this returns, they have read it."""

    def say(text):
        if text is None:
            engines.control_file.unlink(missing_ok=True)
        else:
            engines.control_file.write_text(text)
        time.sleep(2)  # they look once a second

    yield say
    say(None)


@pytest.fixture
def free_blocks(engines):
    """The reader's pool is whole again after the test: nothing stays pinned."""
    before = engines.reader.call("free_blocks")
    yield
    engines.reader.call("settle")
    assert engines.reader.call("free_blocks") == before


LOST_LOADS = {
    "removed": {"do": "remove"},
    "of another length": {"do": "truncate"},
    "not answered": {"do": "lie", "code": RPC_TIMEOUT},
    "refused": {"do": "fail", "code": RPC_FAILED},
    "raising": {"do": "raise"},
    "failing on the load thread": {"do": "fail", "code": MISSING, "thread": "kvtwin-load"},
}


@pytest.mark.parametrize("fault", LOST_LOADS.values(), ids=LOST_LOADS)
def test_a_load_that_delivers_nothing_is_not_tried_again_but_recomputed(engines, prompt, faults, free_blocks, fault):
    """Case S12, and what else can become of a promise between lookup and load."""
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    faults(engines.reader, {"on": "get", **fault})
    answer = engines.read([tokens])
    gets = [key for keys in engines.reader.call("calls", operation="get") for key in keys]
    assert len(gets) == len(set(gets)) > 0
    assert answer["computed"] == 700 + 15
    assert answer["tokens"] == right


def test_one_failed_block_costs_its_suffix_or_with_several_groups_the_load(engines, prompt, faults, free_blocks):
    """Case S07, policy recompute. vLLM can be told of a failed block only when the model has one group."""
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    for group in range(engines.num_groups):
        faults(engines.reader, {"on": "get", "do": "fail", "code": MISSING, "group": group, "keys": [1]})
        answer = engines.read([tokens])
        assert answer["computed"] - 15 == (700 - 1 * 32 if engines.num_groups == 1 else 700)
        assert answer["tokens"] == right


def test_requests_aborted_while_they_load_end_once_and_leave_no_block_behind(engines, prompt, faults, free_blocks):
    """Case S03: a second report would fail an assertion of vLLM's scheduler."""
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    faults(engines.reader, {"on": "get", "do": "delay", "seconds": 0.01})
    engines.reader.call("abort_while_loading", prompt=tokens, times=100)
    faults(engines.reader)
    answer = engines.read([tokens])
    assert (answer["cached"], answer["tokens"]) == ([672], right)


def test_reads_and_writes_are_switched_off_and_on_by_a_file(engines, prompt, control, free_blocks):
    first, second = prompt(700, 1), prompt(700, 2)
    right = engines.plain.generate([first, second])["tokens"]
    engines.store([first])
    control('reads = "off"')
    answer = engines.read([first])
    assert (answer["cached"], answer["tokens"]) == ([0], right[:1])
    control('writes = "off"')
    assert engines.read([first])["cached"] == [672]
    stored = set(engines.pool.master.stored_keys())
    assert engines.store([second])["tokens"] == right[1:]
    assert set(engines.pool.master.stored_keys()) == stored
    control("writes = maybe")
    assert engines.reader.generate([prompt(40)])["tokens"]
    assert engines.reader.call("metrics")["control_refused{}"] == 1
    control(None)
    engines.store([second])  # the writer finds it in its own cache
    answer = engines.read([second])
    assert (answer["cached"], answer["tokens"]) == ([672], right[1:])
    assert engines.reader.call("metrics")["control_refused{}"] == 0


def test_a_frozen_master_delays_the_first_requests_by_the_lookup_s_deadline_and_no_other(engines, prompt, free_blocks):
    prompts = [prompt(700, number) for number in range(1, 5)]
    right = engines.store(prompts)["tokens"]
    engines.pool.master.process.freeze()
    try:
        # The first question hangs, so the next two are turned away, and the fourth is not asked at all.
        patience_s = (LOOKUP_DEADLINE_S + 10.0, *[LOOKUP_DEADLINE_S] * 3)
        for tokens, expected, limit_s in zip(prompts, right, patience_s, strict=True):
            start = time.monotonic()
            answer = engines.reader.generate([tokens])
            assert time.monotonic() - start < limit_s
            assert (answer["cached"], answer["tokens"]) == ([0], [expected])
        assert engines.reader.call("metrics")["breaker_state{scheduler}"] > 0
    finally:
        engines.pool.master.process.thaw()
    engines.reader.call("settle")
    assert resumes_hitting(lambda: engines.read(prompts[:1]))["tokens"] == right[:1]


def test_the_death_of_who_holds_the_bytes_costs_a_failed_load(engines, prompt, faults, free_blocks):
    """For some seconds the master still says that the objects exist."""
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    faults(engines.reader)
    engines.pool.owner.kill()
    try:
        start = time.monotonic()
        answer = engines.read([tokens])
        assert time.monotonic() - start < 20.0  # about 1 s on an idle machine
        assert len(engines.reader.call("calls", operation="get")) == 1  # none begins after one that lost the pool
        assert (answer["computed"], answer["tokens"]) == (700 + 15, right)
    finally:
        engines.pool.lend()
    assert resumes_hitting(lambda: engines.store([prompt(700, 1)]) and engines.read([prompt(700, 1)]))


def test_an_engine_starts_without_a_pool_and_joins_it_later(tmp_path, prompt):
    pool = Pool(tmp_path)
    pool.kill()
    config = {"model": write_tiny_model("qwen3", tmp_path / "model"), "connector": CONNECTOR}
    engine = Engine(config, tmp_path / "engine.log", pool.environment())
    try:
        tokens = prompt(700)
        right = engine.generate([tokens])["tokens"]
        pool.start()
        assert resumes_hitting(lambda: read_from(engine, tokens))["tokens"] == right
    finally:
        engine.kill()
        pool.kill()


def test_without_a_master_requests_finish_and_hits_resume_when_it_is_back(engines, prompt, free_blocks):
    """Case S22, without load; with it in test_case_pool."""
    first, second, third = prompt(700, 1), prompt(700, 2), prompt(700, 3)
    right = engines.plain.generate([first, second, third])["tokens"]
    engines.store([first])
    engines.pool.master.kill()
    try:
        for tokens, expected in zip((first, second), right, strict=False):
            start = time.monotonic()
            answer = engines.read([tokens])
            assert time.monotonic() - start < DEAD_MASTER_S
            assert (answer["cached"], answer["tokens"]) == ([0], [expected])
    finally:
        engines.pool.master.start()
    # The segment's owner comes back to the new master in its own time; until then nothing can be stored.
    assert resumes_hitting(lambda: engines.store([third]) and engines.read([third]))["tokens"] == [right[2]]


def read_from(engine, tokens):
    """Compute the prompt without the engine's own prefix cache, and report its stores."""
    engine.call("settle")
    assert engine.call("reset_local")
    answer = engine.generate([tokens])
    engine.call("settle")
    return answer


def resumes_hitting(read):
    """The first answer that comes with a hit of 672 tokens."""
    deadline = time.monotonic() + 60
    while (answer := read())["cached"] != [672]:
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
    return answer

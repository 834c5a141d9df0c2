"""A pool that fails costs time, never a token: every request ends, with what an engine without connector says."""

import time

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]


@pytest.fixture
def broken_gets(engines):
    """Break the reader's gets until the test ends."""
    yield lambda **fault: engines.reader.call("break_gets", fault=fault)
    engines.reader.call("break_gets", fault=None)


@pytest.fixture
def free_blocks(engines):
    """The reader's pool is whole again after the test: nothing stays pinned."""
    before = engines.reader.call("free_blocks")
    yield
    engines.reader.call("settle")
    assert engines.reader.call("free_blocks") == before


def test_objects_removed_between_lookup_and_load_are_recomputed(engines, prompt, broken_gets, free_blocks):
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    broken_gets(remove=True)
    answer = engines.read([tokens])
    assert len(engines.reader.call("take_gets")) == 1  # the second lookup found nothing
    assert answer["computed"] == 700 + 15
    assert answer["tokens"] == right


def test_a_load_that_always_fails_is_tried_twice_and_recomputed(engines, prompt, broken_gets, free_blocks):
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    broken_gets(outcome="timeout")
    answer = engines.read([tokens])
    assert len(engines.reader.call("take_gets")) == 2
    assert answer["computed"] == 700 + 15
    assert answer["tokens"] == right


def test_one_failed_block_costs_its_suffix_or_with_several_groups_the_load(engines, prompt, broken_gets, free_blocks):
    """vLLM can be told of a failed block only when the model has one group."""
    tokens = prompt(700)
    right = engines.store([tokens])["tokens"]
    broken_gets(outcome="missing", entries=[10])
    answer = engines.read([tokens])
    groups = {group for get in engines.reader.call("take_gets") for group, _ in get}
    assert answer["computed"] - 15 == (700 - 10 * 32 if len(groups) == 1 else 700)
    assert answer["tokens"] == right


def test_without_a_master_requests_finish_and_hits_resume_when_it_is_back(engines, prompt, free_blocks):
    first, second, third = prompt(700, 1), prompt(700, 2), prompt(700, 3)
    right = engines.plain.generate([first, second, third])["tokens"]
    engines.store([first])
    engines.pool.master.kill()
    try:
        for tokens, expected in zip((first, second), right, strict=False):
            start = time.monotonic()
            answer = engines.read([tokens])
            assert time.monotonic() - start < 2.0
            assert (answer["cached"], answer["tokens"]) == ([0], [expected])
    finally:
        engines.pool.master.start()
    deadline = time.monotonic() + 30
    while engines.read([third])["cached"] == [0]:  # the segment's owner comes back to the new master in its own time
        assert time.monotonic() < deadline
        time.sleep(0.5)
        engines.store([third])
    assert engines.read([third])["tokens"] == [right[2]]

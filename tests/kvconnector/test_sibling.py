"""Beside another connector: what that one was granted to load, and has not loaded yet, is stored by nobody."""

from types import SimpleNamespace

import pytest

from kvcore.keys import Namespace
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.spec import FullAttention, ModelSpec
from tests.seam.mirror import Lookups, Pins

pytestmark = pytest.mark.engine

BLOCK = 16
NUM_GRANTED = 48
"""To the other connector, of a prompt of 64."""
TABLE = ([5, 6, 7, 8],)


@pytest.fixture
def half():
    from kvconnector.keys import KeySpace
    from kvconnector.scheduler import SchedulerHalf

    planner = Planner(ModelSpec((FullAttention(BLOCK),)))
    clock = SimpleNamespace(now_ns=lambda: 0)
    lookups = Lookups()
    lookups.num_waiting = 0
    half = SchedulerHalf(planner, PoolPolicy(max_load_attempts=0), KeySpace(Namespace("n"), BLOCK, 1), lookups, clock)
    half.bind_gpu_block_pool(Pins())
    return half


@pytest.fixture
def loading(half):
    """A request whose blocks the other connector is filling."""
    request = SimpleNamespace(
        request_id="one",
        num_prompt_tokens=64,
        num_tokens=64,
        num_computed_tokens=0,
        block_hashes=[bytes([block]) for block in range(4)],
    )
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: TABLE), 0)
    request.num_computed_tokens = NUM_GRANTED
    return request


def step(half, scheduled):
    state = SimpleNamespace(get_block_ids=lambda request_id: TABLE, boundary_state_offloads={})
    output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
    return [entry.block_id for job in half.build_connector_meta(output).stores for entry in job.entries]


def test_a_request_that_ends_while_another_connector_loads_stores_nothing(half, loading):
    half.request_finished(loading, TABLE)
    assert step(half, {}) == []


def test_once_a_step_has_built_on_them_they_are_stored(half, loading):
    assert step(half, {"one": 16}) == TABLE[0]


def test_what_the_other_connector_loaded_is_not_counted_as_the_pool_s(half, loading):
    from kvconnector.metrics import PROMPT_TOKENS

    step(half, {"one": 16})
    taken = half.tally.take()
    assert {name: taken[name] for name in taken if name.startswith(PROMPT_TOKENS.name)} == {
        PROMPT_TOKENS.of("sibling"): NUM_GRANTED,
        PROMPT_TOKENS.of("computed"): 64 - NUM_GRANTED,
    }

"""Beside another connector: what that one was granted to load, and has not loaded yet, is stored by nobody."""

from types import SimpleNamespace

import pytest

from kvcore.admission import AdmitSecondTouch
from kvcore.keys import Namespace
from kvcore.planner import Planner
from kvcore.plans import PoolPolicy
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
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


def make_half(model, unit, policy):
    from kvconnector.keys import KeySpace
    from kvconnector.scheduler import SchedulerHalf

    lookups = Lookups()
    lookups.num_waiting = 0
    keys, clock = KeySpace(Namespace("n"), unit, 1), SimpleNamespace(now_ns=lambda: 0)
    half = SchedulerHalf(Planner(model), policy, keys, lookups, clock)
    half.bind_gpu_block_pool(Pins())
    return half


def make_request(name, num_tokens, num_hashes):
    hashes = [bytes([block]) for block in range(num_hashes)]
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=num_tokens, num_tokens=num_tokens, num_computed_tokens=0, block_hashes=hashes
    )


def admit(half, request, local_hit_len, table, num_computed):
    assert half.get_num_new_matched_tokens(request, local_hit_len) == (0, False)
    half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: table), 0)
    request.num_computed_tokens = num_computed


def stores(half, scheduled, table):
    state = SimpleNamespace(get_block_ids=lambda request_id: table, boundary_state_offloads={})
    output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
    jobs = half.build_connector_meta(output).stores
    return [(entry.group, entry.position) for job in jobs for entry in job.entries]


def test_what_a_sibling_loads_after_a_preemption_is_not_taken_for_computed_here():
    """A window had left most blocks behind: nobody has them, so nobody is told that they could not be stored."""
    model = ModelSpec((FullAttention(BLOCK), SlidingWindow(BLOCK, window=33)))
    half, request = make_half(model, BLOCK, PoolPolicy(max_load_attempts=0)), make_request("one", 320, 20)
    admit(half, request, 0, ([1, 2], [21, 22]), 0)
    stores(half, {"one": 32}, ([1, 2], [21, 22]))
    request.num_computed_tokens = 0
    table = (list(range(1, 19)), [0] * 14 + [31, 32, 33, 34])
    admit(half, request, 0, table, 256)
    stored = stores(half, {"one": 32}, table)
    assert [position for group, position in stored if group == 0] == list(range(2, 18))
    assert all(not job.missing for job in half._jobs.values())


def test_less_than_a_block_beyond_the_local_hit_is_the_engine_s_own():
    from kvconnector.metrics import PROMPT_TOKENS

    model = ModelSpec((FullAttention(64), Recurrent(64)), hash_unit=BLOCK, hit_unit=BLOCK)
    half, request = make_half(model, BLOCK, PoolPolicy(max_load_attempts=0)), make_request("one", 256, 16)
    table = ([1, 2, 3, 4], [5, 6, 7, 8])
    admit(half, request, 64, table, 96)
    stores(half, {"one": 100}, table)
    told = half.tally.take()
    assert told[PROMPT_TOKENS.of("local")] == 96
    assert PROMPT_TOKENS.of("sibling") not in told


def test_what_the_engine_computes_again_after_all_is_not_stored_before_it_is_full():
    """Told of a local hit of two blocks, which it has given up since: the first step fills one of them."""
    model, policy = ModelSpec((FullAttention(BLOCK),)), PoolPolicy(max_load_attempts=0, admission=AdmitSecondTouch())
    half, first, second = make_half(model, BLOCK, policy), make_request("one", 64, 4), make_request("two", 64, 4)
    admit(half, first, 0, TABLE, 0)
    assert stores(half, {"one": 64}, TABLE) == []
    admit(half, second, 32, TABLE, 0)
    assert stores(half, {"two": 20}, TABLE) == [(0, 0)]
    second.num_computed_tokens = 20
    assert stores(half, {"two": 12}, TABLE) == [(0, 1)]

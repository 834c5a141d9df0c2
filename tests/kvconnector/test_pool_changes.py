"""What the pool does meanwhile: it answers late, refuses, breaks its promises, or starts anew, in every state."""

from dataclasses import replace

import pytest

from kvcore.keys import Namespace
from kvcore.runs import num_blocks

pytestmark = pytest.mark.engine

BLOCK = 4
TEXT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
"""10 blocks, of which a hit leaves the last one to compute."""
NUM_BLOCKS = len(TEXT) // BLOCK
LONGEST_HIT = len(TEXT) - BLOCK
DEADLINE_NS = 100 * 10**6
DENIED_NS = 10 * 10**9


@pytest.fixture
def engines(monkeypatch):
    """The module of engines without a model; it imports vLLM."""
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    return modelless_engine


def make_engine(engines, **options):
    return engines.Engine([engines.full(BLOCK)], 80, **options)


def run(engine, name, text=TEXT, num_output=1):
    """The decisions about the request, run to its end."""
    engine.add(name, text, num_output)
    engine.drain()
    return engine.decisions[-1]


def in_the_pool_only(engines, **options):
    """An engine whose pool holds the text, and that has forgotten it."""
    engine = make_engine(engines, **options)
    run(engine, "writer")
    assert engine.scheduler.reset_prefix_cache() and len(engine.pool) == NUM_BLOCKS
    return engine


def machine(engine, name):
    return engine.half._tracked[name].machine


def question(engine):
    """The blocks that the oldest dialogue asks next."""
    (runs,) = engine.lookups.asked[0][1].dialogue.question
    return runs


# --- late answers -----------------------------------------------------------------------------------------------------


def test_a_late_dialogue_touches_no_live_request(engines):
    engine = in_the_pool_only(engines, budget=8)
    engine.add("r", TEXT, 20)
    engine.step()
    engine.now_ns += DEADLINE_NS - 1
    engine.step()
    assert machine(engine, "r").state.name == "ASKING"
    engine.now_ns += 1
    engine.step()
    made = machine(engine, "r").decisions
    before = machine(engine, "r").state, made.granted_len, made.looked_up
    assert (before[0].name, made.late_lookups, made.late_answers) == ("COMPUTING", 1, 0)
    engine.lookups.answer(engine.pool)
    engine.add("other", "0123", 1)  # answers are taken when a request is considered
    for _ in range(8):
        engine.step()
    assert (machine(engine, "r").state, made.granted_len, made.looked_up) == before
    assert made.late_answers == 1
    engine.drain()
    engine.check_nothing_is_left()
    assert engine.outputs["r"] == engines.continuation(TEXT, len(TEXT) + 20)[len(TEXT) :]


class Everything:
    """A pool that has it."""

    def __contains__(self, key):
        return True


def test_an_answer_to_the_question_before_is_not_taken_for_one_to_this(engines):
    """The local hit shrinks while the pool is asked: what was asked does not tell about what is lacking now."""
    engine = make_engine(engines)
    run(engine, "writer", TEXT[:16])
    engine.pool.clear()
    engine.add("r", TEXT, 1)
    engine.step()
    assert question(engine) == ((4, 9),)
    assert engine.scheduler.reset_prefix_cache()
    engine.step()
    assert [asked[1].dialogue.question for asked in engine.lookups.asked] == [(((4, 9),),), (((0, 9),),)]
    engine.lookups.answer(Everything())
    engine.step()
    assert machine(engine, "r").state.name == "ASKING", "the first answer is not for it"
    engine.drain()
    assert engine.decisions[-1].granted_len == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def store_what_fits(engine, capacity):
    """From now on the pool takes objects while it has fewer than that."""
    move = type(engine).move

    def moved(kind, rank, fails=lambda index: False):
        room = capacity - len(engine.pool)
        move(engine, kind, rank, (lambda index: index >= room) if kind == "store" else fails)

    engine.move = moved


def test_what_a_full_pool_refused_is_stored_when_it_is_computed_again(engines):
    """The pool holds 60 % of the prompt; it loses all; the second run stores what fits, which the third one loads."""
    engine = make_engine(engines)
    store_what_fits(engine, capacity=6)
    first = run(engine, "first")
    assert (num_blocks(first.stored[0]), first.rejected) == (6, (((6, 10),),))
    engine.pool.clear()
    assert engine.scheduler.reset_prefix_cache()
    run(engine, "second")
    assert engine.scheduler.reset_prefix_cache()
    assert run(engine, "third").granted_len == 6 * BLOCK


def test_what_a_full_pool_refused_is_stored_when_it_is_hit_in_the_engine(engines):
    """No block of it is computed again but the last: a local hit is a touch, too."""
    engine = make_engine(engines)
    store_what_fits(engine, capacity=6)
    run(engine, "first")
    store_what_fits(engine, capacity=NUM_BLOCKS)
    second = run(engine, "second")
    assert (second.local_hit_len, second.stored, second.rejected) == (LONGEST_HIT, (((6, 10),),), ((),))
    assert engine.scheduler.reset_prefix_cache()
    assert run(engine, "third").granted_len == LONGEST_HIT


def test_control_a_connector_that_forgets_refusals_leaves_the_hole_for_ever(engines):
    engine = make_engine(engines)
    store_what_fits(engine, capacity=6)
    run(engine, "first")
    engine.half._experience.clear()
    store_what_fits(engine, capacity=NUM_BLOCKS)
    run(engine, "second")
    assert engine.scheduler.reset_prefix_cache()
    assert run(engine, "third").granted_len == 6 * BLOCK


# --- broken promises --------------------------------------------------------------------------------------------------


def load_without_block_3(engine, name):
    """A request whose load lacks block 3, just reported."""
    engine.add(name, TEXT, 1)
    engine.step()
    engine.lookups.answer(engine.pool)
    engine.step()
    engine.move("load", 0, lambda index: index == 3)
    engine.step()


def asked_now(engine, name):
    """What a new request asks first; it does not go on."""
    engine.add(name, TEXT, 1)
    engine.step()
    asked = question(engine) if engine.lookups.asked else ()
    engine.abort(name)
    engine.lookups.asked.clear()
    return asked


def test_what_was_promised_and_denied_is_not_asked_for_until_it_is_forgotten(engines):
    engine = in_the_pool_only(engines)
    load_without_block_3(engine, "r")
    denied_ns = engine.now_ns
    engine.abort("r")
    assert engine.scheduler.reset_prefix_cache()
    assert asked_now(engine, "soon") == ((0, 3),), "and nothing behind it, which no hit could use"
    engine.now_ns = denied_ns + DENIED_NS - 1
    assert asked_now(engine, "later") == ((0, 3),)
    engine.now_ns += 1
    assert asked_now(engine, "much later") == ((0, 9),)


def test_what_was_denied_and_stored_again_is_asked_for_at_once(engines):
    engine = in_the_pool_only(engines)
    load_without_block_3(engine, "r")
    engine.drain()
    assert engine.decisions[-1].late_misses == 1
    assert engine.scheduler.reset_prefix_cache()
    assert asked_now(engine, "soon") == ((0, 9),)


def test_a_reset_forgets_what_was_denied(engines):
    engine = in_the_pool_only(engines)
    load_without_block_3(engine, "r")
    engine.abort("r")
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert asked_now(engine, "soon") == ((0, 9),)


# --- another namespace ------------------------------------------------------------------------------------------------


class Era:
    """In place of the weights' version: when a token was computed, of no matter to who reads it."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Era)


def begin(engine, number):
    for rank in engine.ranks:
        rank.weights = Era(number)


def step_until(engine, state):
    for _ in range(10):
        if machine(engine, "r").state.name == state:
            return
        engine.step()
    raise AssertionError(machine(engine, "r").state)


def waiting(engine):
    engine.add("r", TEXT, 5)


def asking(engine):
    waiting(engine)
    engine.step()
    step_until(engine, "ASKING")


def offered(engine):
    """The engine has found no room for it."""
    asking(engine)
    engine.lookups.answer(engine.pool)
    assert engine.half.get_num_new_matched_tokens(engine.scheduler.requests["r"], 0) == (LONGEST_HIT, True)
    step_until(engine, "OFFERED")


def loading(engine):
    asking(engine)
    engine.lookups.answer(engine.pool)
    engine.step()
    step_until(engine, "LOADING")


def loaded(engine):
    """The load has ended, and the engine does not know yet."""
    loading(engine)
    engine.move("load", 0)


def computing(engine):
    """A part of the prompt; of the pool it knows nothing."""
    waiting(engine)
    engine.step()
    engine.now_ns += DEADLINE_NS
    engine.step()
    step_until(engine, "COMPUTING")
    assert 0 < engine.scheduler.requests["r"].num_computed_tokens < len(TEXT)


def storing(engine):
    computing(engine)
    engine.step()
    assert len(engine.ranks[0].half._stores.waiting) > 1


def generating(engine):
    computing(engine)
    while engine.scheduler.requests["r"].num_computed_tokens < len(TEXT) + 2:
        engine.step()


def finished(engine):
    """Its stores are under way."""
    computing(engine)
    while engine.live():
        engine.step()
    engine.step()
    assert engine.half._jobs


STATES = [waiting, asking, offered, loading, loaded, computing, storing, generating, finished]


def reset_in(engines, state, reset):
    """The objects under names of after the reset, as (block hash, the eras it was computed in), when all is over."""
    engine = make_engine(engines, budget=7)  # a step ends inside a block
    begin(engine, 0)
    run(engine, "writer")
    assert engine.scheduler.reset_prefix_cache()
    state(engine)
    before = engine.half.namespace
    reset(engine)
    assert engine.half.namespace != before
    begin(engine, 1)
    engine.drain()
    assert engine.outputs["r"] == engines.continuation(TEXT, len(TEXT) + 5)[len(TEXT) :]
    run(engine, "next", TEXT + "0123456789")
    engine.scheduler.reset_prefix_cache()
    run(engine, "fresh", TEXT[:20] + "0123456789")
    engine.check_nothing_is_left()
    objects = [(key, value) for key, value in engine.pool.items() if key.namespace == engine.half.namespace]
    return [(key.block_hash, {era.number for era, _ in value}) for key, value in objects]


def reset_connector(engine):
    """As vLLM does it, whether or not it could forget its own blocks."""
    engine.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("state", STATES)
def test_nothing_computed_before_a_reset_gets_a_name_of_after_it(engines, state):
    found = reset_in(engines, state, reset_connector)
    assert found, "it stores again"
    assert [block_hash for block_hash, eras in found if eras != {1}] == []


def only_rename(engine):
    """The requests are not told."""
    engine.half._keys = replace(engine.half._keys, namespace=Namespace("after"))
    engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("state", [computing, storing, generating])
def test_control_a_request_that_is_not_told_stores_what_is_old(engines, state):
    assert any(0 in eras for _, eras in reset_in(engines, state, only_rename))

"""One promise, two drivers: real engines on a real pool decide what the simulator decides for the same requests."""

import random
from dataclasses import replace

import pytest

from connector.testbed.pool import Pool
from connector.testbed.tiny_model import write_tiny_model
from tests.e2e.conftest import CONNECTOR
from tests.e2e.processes import Engine
from tests.seam.fleet import Served, serve

pytestmark = [pytest.mark.engine, pytest.mark.store, pytest.mark.slow]

BLOCK_SIZE = 32
NUM_GPU_BLOCKS = 64
"""2,016 tokens: three prompts do not fit beside each other, so the engines' own caches evict."""


@pytest.fixture(scope="module")
def real_fleet(tmp_path_factory):
    """Two engines with a small cache on one pool that, as the simulated one, is faster than their steps."""
    folder = tmp_path_factory.mktemp("seam")
    pool, started = Pool(folder), []
    model = write_tiny_model("qwen3", folder / "model")
    config = {
        "model": model,
        "connector": CONNECTOR,
        "options": {"num_gpu_blocks_override": NUM_GPU_BLOCKS, "max_model_len": 1920},
    }
    try:
        for name in ("even", "odd"):
            started.append(Engine(config, folder / f"{name}.log", pool.environment()).ready())
            started[-1].call("keep_pace")
        yield started
    finally:
        for engine in started:
            engine.kill()
        pool.kill()


@pytest.fixture(scope="module")
def served(real_fleet):
    """(prompts, answers, decisions) of the real engines, which take turns, one request at a time."""
    prompts, answers, decided = [], [], []
    for number, make_prompt in enumerate(conversation()):
        prompt = make_prompt(prompts, answers)
        engine = real_fleet[number % len(real_fleet)]
        answer = engine.generate([prompt], max_tokens=1 + number % 40)["tokens"][0]
        engine.call("settle")
        (made,) = engine.call("decisions")
        prompts.append(prompt)
        answers.append(answer)
        decided.append(made)
    return prompts, answers, [real_decisions(made) for made in decided]


def conversation():
    """Requests as functions of what was said before: repeats, next turns, forks, strangers; lengths of every kind."""
    rng = random.Random(7)

    def new_tokens(length):
        return [rng.randrange(3, 1024) for _ in range(length)]

    def stranger(length):
        return lambda prompts, answers: new_tokens(length)

    def repeat(of):
        return lambda prompts, answers: list(prompts[of])

    def next_turn(of, length):
        return lambda prompts, answers: prompts[of] + answers[of] + new_tokens(length)

    def fork(of, kept, length):
        return lambda prompts, answers: prompts[of][:kept] + new_tokens(length)

    yield stranger(700)
    yield repeat(0)
    yield next_turn(0, 61)
    yield next_turn(2, 100)
    yield fork(0, 320, 200)
    yield repeat(4)
    yield stranger(704)  # whole blocks: the last one is recomputed
    yield repeat(6)
    yield stranger(31)  # shorter than a block
    yield repeat(8)
    yield next_turn(3, 33)
    yield repeat(0)
    for _ in range(24):
        kind, of = rng.randrange(4), rng.randrange(12)
        if kind == 0:
            yield stranger(rng.randrange(1, 900))
        elif kind == 1:
            yield repeat(of)
        elif kind == 2:
            yield next_turn(of, rng.randrange(1, 120))
        else:
            yield fork(of, rng.randrange(0, 800), rng.randrange(1, 300))


def real_decisions(made):
    loaded, stored = ([tuple(key) for key in made.pop(name)] for name in ("loaded", "stored"))
    return Served(**made, loaded=frozenset(loaded), stored=frozenset(stored))


def test_both_drivers_decide_alike(served):
    prompts, answers, real = served
    simulated = serve(prompts, answers, 2, BLOCK_SIZE, NUM_GPU_BLOCKS)
    assert simulated == real


def test_the_requests_are_worth_comparing(served):
    """Hits of both kinds, together in one request too, evictions in the engines, and stores of answers."""
    prompts, _, real = served
    assert any(made.local_hit_len and not made.granted_len for made in real)
    assert any(made.granted_len and not made.local_hit_len for made in real)
    assert any(made.granted_len and made.local_hit_len for made in real)
    assert sum(len(prompt) for prompt in prompts) > 4 * NUM_GPU_BLOCKS * BLOCK_SIZE
    assert any(
        len(made.stored) * BLOCK_SIZE + made.local_hit_len + made.granted_len > len(prompt)
        for prompt, made in zip(prompts, real, strict=True)
    )


def test_control_another_cache_size_or_order_is_noticed(served):
    prompts, answers, real = served
    assert serve(prompts, answers, 2, BLOCK_SIZE, 2 * NUM_GPU_BLOCKS) != real
    assert serve(prompts, answers, 1, BLOCK_SIZE, NUM_GPU_BLOCKS) != real
    dropped = [replace(made, stored=frozenset(list(made.stored)[1:])) for made in real]
    assert serve(prompts, answers, 2, BLOCK_SIZE, NUM_GPU_BLOCKS) != dropped

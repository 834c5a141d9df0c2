"""Mode `engine`: the hit length that vLLM's own coordinators find, on both sides, over random models and presence."""

import pytest

from kvcore.engine import hit
from kvcore.engine.hit import hit_len
from kvcore.engine.model import Side
from tests.differential.vllm_models import (
    engine_of,
    gpu_coordinator,
    gpu_hit_len,
    pool_coordinator,
    pool_hit_len,
    random_presence,
    subjects,
)

pytestmark = pytest.mark.engine

NUM_MODELS, PATTERNS = 2_500, 8  # 20,000 cases on each side


def limit_of(rng, side, model, num_tokens):
    """The engine asks for all but the last token, the connector for the aligned length; now and then for less."""
    if side is Side.GPU:
        limit = max(0, num_tokens - 1)
    else:
        limit = num_tokens // model.hit_step * model.hit_step
    return limit if rng.random() < 0.8 else rng.randint(0, limit)


def answers(side, num_models, patterns=PATTERNS, seed=3):
    """(case, ours, vLLM's) of random models and presence patterns."""
    for rng, subject in subjects(side, num_models, seed):
        engine, model = engine_of(subject, side), subject.model
        coordinator = gpu_coordinator(subject) if side is Side.GPU else pool_coordinator(subject)
        for _ in range(patterns):
            presence = random_presence(rng, model)
            limit = limit_of(rng, side, model, presence.num_tokens)
            hashed_len = presence.num_tokens // model.hashed_step * model.hashed_step
            ours = hit_len(engine, presence.blocks, limit, hashed_len, presence.tails)
            if side is Side.GPU:
                theirs = gpu_hit_len(coordinator, model, presence, limit)
            else:
                theirs = pool_hit_len(coordinator, subject, presence, limit)
            yield (model, presence, limit), ours, theirs


@pytest.mark.parametrize("side", Side, ids=lambda side: side.name)
def test_hit_equals_vllm_s(side):
    hits = set()
    for case, ours, theirs in answers(side, NUM_MODELS):
        assert ours == theirs, case
        hits.add(min(ours, 200))
    assert len(hits) > 80, "few different answers: the patterns are dull"

"""Mode `engine`: the hit length that vLLM's own coordinators find, on both sides, over random models and presence."""

from dataclasses import replace

import pytest

from kvcore import hit as exact
from kvcore.engine import hit
from kvcore.engine.hit import hit_len, pool_hit_len
from kvcore.engine.model import EngineModel, MergedGroup, Side, window_blocks
from tests.differential.random_models import random_presence, subjects
from tests.differential.test_no_other_difference import agreed_proven_again, window_hit_len_dropped_once
from tests.differential.vllm_models import (
    connector_lookup,
    engine_of,
    gpu_coordinator,
    gpu_hit_len,
    pool_coordinator,
    store_hit_len,
)

pytestmark = pytest.mark.engine

NUM_MODELS, PATTERNS = 2_500, 8  # 20,000 cases on each side


def limit_of(rng, side, model, num_tokens):
    """The engine asks for all but the last token, the connector for the aligned length; now and then for less."""
    limit = max(0, num_tokens - 1) if side is Side.GPU else num_tokens // model.hit_step * model.hit_step
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
                theirs = store_hit_len(coordinator, subject, presence, limit)
            yield (model, presence, limit), ours, theirs


@pytest.mark.parametrize("side", Side, ids=lambda side: side.name)
def test_hit_equals_vllm_s(side):
    hits = set()
    for case, ours, theirs in answers(side, NUM_MODELS):
        assert ours == theirs, case
        hits.add(min(ours, 200))
    assert len(hits) > 80, "few different answers: the patterns are dull"


def lookups(num_models, seed=4):
    """(case, ours, vLLM's) of whole lookups of the connector, from what it asks for to its answer."""
    for rng, subject in subjects(Side.POOL, num_models, seed):
        engine, model = engine_of(subject, Side.POOL), subject.model
        coordinator = pool_coordinator(subject)
        for _ in range(PATTERNS):
            presence = random_presence(rng, model)
            hashed_len = presence.num_tokens // model.hashed_step * model.hashed_step
            ours = pool_hit_len(engine, presence.blocks, presence.num_tokens, hashed_len, presence.tails)
            theirs, _ = connector_lookup(coordinator, subject, presence)
            yield (model, presence), ours, theirs


def test_a_lookup_of_the_pool_equals_the_connector_s():
    hits = set()
    for case, ours, theirs in lookups(NUM_MODELS):
        assert ours == theirs, case
        hits.add(min(ours, 200))
    assert len(hits) > 80, "few different answers: the patterns are dull"


def test_control_a_lookup_that_knows_what_it_did_not_ask_for_differs(monkeypatch):
    monkeypatch.setattr(hit, "_asked", lambda engine, present, aligned_len: list(present))
    assert any(ours != theirs for _, ours, theirs in lookups(400))


def agrees(side, num_models=400):
    return all(ours == theirs for _, ours, theirs in answers(side, num_models, seed=5))


KEYS = hit._keys


def unaligned_keys(engine, group, present, tails):
    return replace(KEYS(engine, group, present, tails), step=group.spec.block_size)


WRONG = {
    "no margin for draft heads": (hit._Keys, "margin", 0),
    "a window of one block more": (hit, "window_blocks", lambda spec: window_blocks(spec) + 1),
    "a window of one block less": (hit, "window_blocks", lambda spec: window_blocks(spec) - 1),
    "hits that end on the group's own blocks": (hit, "_keys", unaligned_keys),
    "no partial tails": (hit, "_last_tail", lambda keys, top: 0),
    "one pass for all": (EngineModel, "one_pass", True),
    "a peek past the limit for a single group too": (EngineModel, "alone", False),
    "a proof for every candidate": (hit, "_agreed", agreed_proven_again),
    "a short chain dropped once": (hit, "_window_hit_len", window_hit_len_dropped_once),
    "recurrent groups peek": (MergedGroup, "peeks", property(lambda group: group.drafts)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_a_wrong_lookup_differs_from_vllm_s(wrong, monkeypatch):
    owner, name, value = WRONG[wrong]
    monkeypatch.setattr(owner, name, value)
    assert not (agrees(Side.GPU) and agrees(Side.POOL))


def test_control_the_definition_differs_from_vllm(monkeypatch):
    def defined(engine, present, limit, hashed_len, tails):
        return exact.hit_len(engine.model, present, min(limit, engine.model.limit(limit + 1)))

    monkeypatch.setitem(globals(), "hit_len", defined)
    assert not agrees(Side.POOL)

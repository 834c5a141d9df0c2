"""The named rules that are new in vLLM 0.33, whichever vLLM is installed.

All tests of this folder compare with the installed vLLM under its own rules, so with 0.33 installed they prove these.
With 0.32 the changes are made to it here: the connector's specs get a window that covers what is retained, and draft
groups keep what a hit one block below a junction needs. The table below holds answers of 0.33.
"""

from dataclasses import replace

import pytest

from kvcore.engine.masks import load_mask, lookup_mask, store_mask, store_runs
from kvcore.engine.model import VLLM_0_32, VLLM_0_33, EngineModel, Side
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from tests.differential import random_models, test_cached_vllm, test_hit_vllm, test_masks_vllm, vllm_models

RETAINING = ModelSpec((FullAttention(16), SlidingWindow(4, window=5, extra_retained_tokens=4)))


def test_the_pool_s_windows_cover_retained_tokens():
    engine = EngineModel(RETAINING, Side.POOL, VLLM_0_33)
    assert lookup_mask(engine, 16) == (None, [False, False, True, True])
    assert store_mask(engine, 16) == (None, [False, False, True, True])
    assert load_mask(engine, 16) == ([True], [False, False, True, True])


@pytest.mark.parametrize(
    "engine", [EngineModel(RETAINING, Side.POOL, VLLM_0_32), EngineModel(RETAINING, Side.GPU, VLLM_0_33)]
)
def test_neither_did_0_32_s_nor_does_the_gpu_s_cache(engine):
    assert lookup_mask(engine, 16) == (None, [False, False, False, True])


@pytest.fixture
def connector_of_0_33(monkeypatch):
    """The installed connector, with the change of 0.33 unless it has it; ours under the rules of 0.33."""
    store, spec_class = vllm_models.vllm().store, vllm_models.vllm().interface.SlidingWindowSpec
    unwrap = store._unwrap_spec

    def covering(spec):
        spec = unwrap(spec)
        if not isinstance(spec, spec_class) or not spec.extra_retained_tokens:
            return spec
        return replace(spec, sliding_window=spec.sliding_window + spec.extra_retained_tokens, extra_retained_tokens=0)

    monkeypatch.setattr(store, "_unwrap_spec", covering)
    monkeypatch.setattr(vllm_models, "installed_rules", lambda: VLLM_0_33)


@pytest.mark.engine
def test_hits_and_masks_equal_the_connector_s(connector_of_0_33):
    for case, ours, theirs in test_hit_vllm.answers(Side.POOL, 2_500, seed=33):
        assert ours == theirs, case
    for relation in ("load", "lookup", "store"):
        for case, ours, theirs in test_masks_vllm.RELATIONS[relation](2_500):
            assert ours == theirs, case


@pytest.mark.engine
def test_control_the_rules_of_0_32_do_not(connector_of_0_33, monkeypatch):
    monkeypatch.setattr(vllm_models, "installed_rules", lambda: VLLM_0_32)
    assert any(ours != theirs for _, ours, theirs in test_hit_vllm.answers(Side.POOL, 400, seed=33))
    assert any(ours != theirs for _, ours, theirs in test_masks_vllm.RELATIONS["store"](400))


# Blocks of 4, a window of 5 in a draft group, 48 tokens computed, nothing kept but for what others need of a prompt of
# 9 tokens (its boundary is 4) and of a junction at 24 tokens.
JUNCTION = ModelSpec((SlidingWindow(4, window=5),), frozenset({0}))
KEPT = {VLLM_0_32: ((0, 2), (5, 7)), VLLM_0_33: ((0, 2), (4, 7))}


@pytest.mark.parametrize("rules", KEPT, ids=["0.32", "0.33"])
def test_a_junction_keeps_what_a_hit_one_block_below_needs(rules):
    engine = EngineModel(JUNCTION, Side.GPU, rules)
    assert store_runs(engine, ((0, 12),), 0, 9, junction=24) == (KEPT[rules],)


@pytest.mark.engine
def test_the_installed_vllm_keeps_what_its_rules_say():
    coordinator = vllm_models.gpu_coordinator(random_models.as_told(JUNCTION))
    pool = test_masks_vllm.RecordingPool(JUNCTION)
    (kept,) = test_masks_vllm.vllm_keeps(coordinator, pool, [0], 48, 0, 9, 24).values()
    runs = KEPT[vllm_models.installed_rules()]
    assert kept == ((0, 12), test_masks_vllm.as_mask(runs, (0, 12)))


@pytest.fixture
def cache_of_0_33(monkeypatch):
    """The installed managers, with the change of 0.33 unless they have it; ours under the rules of 0.33."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    cache_blocks = SingleTypeKVCacheManager.cache_blocks

    def covering(manager, request, num_tokens, retention_interval=None, *, replay_boundaries):
        if manager.use_eagle and request.shared_prefix_boundary:
            replay_boundaries = (*replay_boundaries, request.shared_prefix_boundary - manager.block_size)
        cache_blocks(manager, request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    monkeypatch.setattr(SingleTypeKVCacheManager, "cache_blocks", covering)
    monkeypatch.setattr(vllm_models, "installed_rules", lambda: VLLM_0_33)


@pytest.mark.engine
def test_what_enters_the_gpu_s_cache_equals_the_managers(cache_of_0_33):
    for case, ours, theirs in test_cached_vllm.answers(500, seed=33):
        assert ours == theirs, case


@pytest.mark.engine
def test_control_junctions_of_0_32_do_not(cache_of_0_33, monkeypatch):
    monkeypatch.setattr(vllm_models, "installed_rules", lambda: VLLM_0_32)
    assert any(ours != theirs for _, ours, theirs in test_cached_vllm.answers(500, seed=33))

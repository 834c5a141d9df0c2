"""Mode `engine`: the masks of vLLM's connector and of its managers, over random models, lengths and retention."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcore.engine import masks
from kvcore.engine.masks import cached_len, load_mask, lookup_mask, store_mask, store_runs
from kvcore.engine.model import EngineModel, Side, hits_end_inside_blocks, window_blocks
from tests.differential.random_models import cacheable, subjects
from tests.differential.vllm_models import block_hashes, engine_of, gpu_coordinator, pool_coordinator, vllm_groups

pytestmark = pytest.mark.engine

NUM_MODELS, LENGTHS = 2_500, 8  # 20,000 cases of each relation


def pool_cases(num_models=NUM_MODELS, seed=11):
    """(rng, engine, subject, vLLM's connector, an aligned length), 8 lengths of each model."""
    for rng, subject in subjects(Side.POOL, num_models, seed):
        engine, coordinator = engine_of(subject, Side.POOL), pool_coordinator(subject)
        for _ in range(LENGTHS):
            yield rng, engine, subject, coordinator, random_length(rng, subject.model)


def random_length(rng, model):
    return rng.randint(0, rng.choice((1, 4, 12))) * model.alignment + (
        rng.randint(0, 8) * model.hit_step if model.splits_blocks else 0
    )


def random_retention(rng, model):
    return rng.choice((None, None, 0, 0, model.alignment, rng.randint(1, 6) * model.alignment))


def of_cacheable(subject, masks):
    """Ours of the groups that vLLM's connector is given; the others are all False."""
    assert not any(any(mask or ()) for group, mask in enumerate(masks) if group not in cacheable(subject))
    return tuple(masks[group] for group in cacheable(subject))


def load_answers(num_models):
    for _, engine, subject, coordinator, length in pool_cases(num_models):
        theirs = coordinator.load_mask(block_hashes(subject.model, length), length)
        yield (subject.model, length), of_cacheable(subject, load_mask(engine, length)), theirs


def lookup_answers(num_models):
    for _, engine, subject, coordinator, length in pool_cases(num_models):
        theirs = coordinator.lookup_mask(length)
        yield (subject.model, length), of_cacheable(subject, lookup_mask(engine, length)), theirs


def store_answers(num_models):
    for rng, engine, subject, coordinator, length in pool_cases(num_models):
        start, retention = rng.randint(0, length), random_retention(rng, subject.model)
        num_prompt = rng.choice((None, rng.randint(0, length + subject.model.alignment), length, length + 1))
        coordinator.retention_interval = retention
        theirs = coordinator.store_mask(length, start, num_prompt)
        ours = store_mask(engine, length, start, retention, num_prompt)
        yield (subject.model, length, start, retention, num_prompt), of_cacheable(subject, ours), theirs


class RecordingPool:
    """As much of vLLM's BlockPool as its managers need to enter blocks: it notes what it is told to keep."""

    def __init__(self, model):
        self.hash_block_size = model.hashed_step
        self.num_hash_lookahead_tokens = 0
        self.null_block = SimpleNamespace(is_null=True, block_hash_num_tokens=None)
        self.kept = {}

    def cache_full_blocks(self, *, kv_cache_group_id, num_cached_blocks, num_full_blocks, block_mask, **_):
        self.kept[kv_cache_group_id] = (num_cached_blocks, num_full_blocks), block_mask

    def cache_partial_block(self, **_):
        return None


def gpu_answers(num_models):
    """What a running request's newly computed blocks become in the GPU's prefix cache, all groups at once."""
    for rng, subject in subjects(Side.GPU, num_models, 12):
        engine, coordinator = engine_of(subject, Side.GPU), gpu_coordinator(subject)
        for _ in range(LENGTHS):
            yield gpu_answer(rng, engine, coordinator)


def gpu_answer(rng, engine, coordinator):
    model = engine.model
    computed = rng.randint(0, 12 * model.alignment)
    retention = random_retention(rng, model)
    num_prompt = rng.choice((rng.randint(1, computed + model.alignment), max(1, computed)))
    junction = rng.choice((None, None, rng.randint(1, 12) * model.alignment))
    ends = [cached_len(engine, group, computed) // spec.block_size for group, spec in enumerate(model.groups)]
    starts = [rng.choice((0, rng.randint(0, end))) for end in ends]
    pool = RecordingPool(model)
    theirs = vllm_keeps(coordinator, pool, starts, computed, retention, num_prompt, junction)
    runs = tuple(zip(starts, ends, strict=True))
    kept = store_runs(engine, runs, retention, num_prompt, junction)
    ours = {
        group: (run, as_mask(kept[group], run))
        for group, run in enumerate(runs)
        if run[0] < run[1] and model.groups[group].cacheable
    }
    return (model, computed, starts, retention, num_prompt, junction), ours, theirs


def as_mask(runs, run):
    return runs if runs is None else [any(start <= block < end for start, end in runs) for block in range(*run)]


def vllm_keeps(coordinator, pool, starts, computed, retention, num_prompt, junction):
    coordinator.retention_interval = retention
    hashes = [b""] * (computed // pool.hash_block_size)
    request = SimpleNamespace(
        request_id="r",
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        shared_prefix_boundary=junction or 0,
        block_hashes=hashes,
    )
    for manager, start in zip(coordinator.single_type_managers, starts, strict=True):
        manager.block_pool = pool
        manager.req_to_blocks["r"] = [pool.null_block] * (computed // manager.block_size + 2)
        manager.num_cached_block["r"] = start
    coordinator.cache_blocks(request, computed)
    return pool.kept


RELATIONS = {"load": load_answers, "lookup": lookup_answers, "store": store_answers, "GPU": gpu_answers}


def boundary_answers(num_models):
    """Whether hits end inside blocks, of the groups of random models under random hash units."""
    from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    for rng, subject in subjects(Side.GPU, num_models * LENGTHS, 13):
        ranks, unit = subject.context_parallel_size, rng.choice((subject.model.hashed_step, rng.randint(1, 8)))
        groups = vllm_groups(subject, scaled=False)
        classes = [KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec) for group in groups]
        theirs = partial_hash_hits_enabled(groups, unit, ranks, classes)
        yield (subject.model, unit, ranks), hits_end_inside_blocks(subject.model.groups, unit, ranks), theirs


def test_hits_end_where_vllm_s_do():
    """Units that divide no block as well: the engine's rule does not look at that."""
    inside = 0
    for case, ours, theirs in boundary_answers(NUM_MODELS):
        assert ours == theirs, case
        inside += theirs
    assert inside > 1_000


def test_control_another_rule_for_hits_inside_blocks_differs(monkeypatch):
    monkeypatch.setitem(globals(), "hits_end_inside_blocks", lambda groups, unit, ranks: ranks == 1)
    assert any(ours != theirs for _, ours, theirs in boundary_answers(50))


@pytest.mark.parametrize("relation", RELATIONS)
def test_masks_equal_vllm_s(relation):
    seen = set()
    for case, ours, theirs in RELATIONS[relation](NUM_MODELS):
        assert ours == theirs, case
        seen.add(repr(theirs))
    assert len(seen) > 1_000, "few different masks: the cases are dull"


WRONG = {
    "a window of one block more": (masks, "window_blocks", lambda spec: window_blocks(spec) + 1),
    "a window of one block less": (masks, "window_blocks", lambda spec: window_blocks(spec) - 1),
    "the prompt's end as without a draft head": (EngineModel, "has_drafts", False),
    "no replay boundaries": (masks, "_replay_boundaries", lambda engine, num_prompt_tokens: ()),
    "no segments": (masks, "_segment_ends", lambda run, segment, needed, shift: ()),
    "no junctions": (masks, "_junctions", lambda engine, group, junction: ()),
    "chunks of the last token": (masks, "_first_loaded", lambda spec, hit_len: 0),
    "recurrent states by position": (masks, "_kept", masks.reachable_runs),
    "no waiting for a whole unit": (
        masks,
        "cached_len",
        lambda engine, group, num_computed_tokens: num_computed_tokens,
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_control_wrong_masks_differ_from_vllm_s(wrong, monkeypatch):
    owner, name, value = WRONG[wrong]
    monkeypatch.setattr(owner, name, value)
    if name == "cached_len":
        monkeypatch.setitem(globals(), name, value)
    assert differs()


def test_control_masks_without_draft_groups_differ_from_vllm_s(monkeypatch):
    def without_drafts(subject, side):
        return EngineModel(replace(subject.model, eagle_groups=frozenset()), side)

    monkeypatch.setitem(globals(), "engine_of", without_drafts)
    assert differs()


def differs():
    return any(ours != theirs for answers in RELATIONS.values() for _, ours, theirs in answers(300))

"""That docs/DIFFERENCES.md is complete: without what it lists, both modes answer alike on random models."""

from itertools import chain

import pytest

from kvcore import masks as exact_masks
from kvcore.engine import hit as engine_hits
from kvcore.engine import masks as engine_masks
from kvcore.engine.model import VLLM_0_33, EngineModel, Side
from kvcore.spec import ChunkedLocal, SlidingWindow
from kvcore.units import align_down
from tests.differential.random_models import random_presence, subjects
from tests.differential.test_differences import MASKS, engine_hit_len, exact_hit_len


def differs_by_its_groups(engine):
    """A group about which the modes never agree: a window of one token, retained tokens, chunks inside blocks."""
    for group in engine.merged:
        match group.spec:
            case SlidingWindow(window=window, extra_retained_tokens=extra) if window == 1 or extra:
                return True
            case ChunkedLocal(chunk=chunk, block_size=block_size) if chunk % block_size:
                return True
    return engine.alone and engine.merged[0].peeks


def window_hit_len_dropped_once(spec, keys, top, margin):
    """A chain that reaches block 0 is dropped once, as any other."""
    shift, per_step = margin // spec.block_size, keys.step // spec.block_size
    needed = max(1, engine_hits.window_blocks(spec) + shift)
    for start, end in reversed(keys.blocks):
        last = align_down(min(end, top // spec.block_size) - shift, per_step) + shift
        if last > start and (start == 0 or last - needed >= start):
            return (last - shift) * spec.block_size
    return 0


def agreed_proven_again(engine, found, limit, hashed_len):
    """Every draft group proves every candidate."""
    length, before = limit, None
    while length != before:
        before = length
        for keys in found:
            top = min(length + keys.margin, hashed_len) if keys.margin else length
            length = engine_hits._group_hit_len(keys, top, keys.margin)
    return engine_hits.Found(length, None)


REPAIRS = {"_window_hit_len": window_hit_len_dropped_once, "_agreed": agreed_proven_again}


def both_hits(side, num_models):
    """(mode exact's, mode engine's) hits of models without the groups above that split no blocks."""
    for rng, subject in subjects(side, num_models, 21):
        engine = EngineModel(subject.model, side)
        if subject.model.splits_blocks or differs_by_its_groups(engine):
            continue
        for _ in range(8):
            presence = random_presence(rng, subject.model)
            yield exact_hit_len(subject.model, presence), engine_hit_len(engine, presence)


@pytest.mark.slow
@pytest.mark.parametrize("side", Side, ids=lambda side: side.name)
def test_no_other_difference_of_hits(side, monkeypatch):
    for name, repair in REPAIRS.items():
        monkeypatch.setattr(engine_hits, name, repair)
    count = 0
    for exact, engine in both_hits(side, 9_000):
        assert exact == engine
        count += 1
    assert count >= 20_000


@pytest.mark.slow
@pytest.mark.parametrize("kept", REPAIRS)
def test_each_repair_is_needed(kept, monkeypatch):
    """Control: with one mistake left, the modes differ."""
    for name, repair in REPAIRS.items():
        if name != kept:
            monkeypatch.setattr(engine_hits, name, repair)
    assert any(exact != engine for exact, engine in both_hits(Side.GPU, 6_000))


@pytest.mark.slow
def test_split_blocks_only_shorten_the_engine_s_hit():
    shorter = 0
    for rng, subject in subjects(Side.GPU, 20_000, 22):
        model = subject.model
        if not model.splits_blocks or model.eagle_groups or differs_by_its_groups(EngineModel(model)):
            continue
        for _ in range(8):
            presence = random_presence(rng, model)
            exact, engine = exact_hit_len(model, presence), engine_hit_len(EngineModel(model), presence)
            assert engine <= exact
            shorter += engine < exact
    assert shorter > 100


@pytest.mark.slow
def test_no_other_difference_of_loads():
    count = 0
    for rng, subject in subjects(Side.POOL, 5_000, 24):
        engine, model = EngineModel(subject.model, Side.POOL, VLLM_0_33), subject.model
        for length in (rng.randint(0, 12) * model.hit_step for _ in range(5)):
            for spec, mask in zip(model.groups, engine_masks.load_mask(engine, length), strict=True):
                if not isinstance(spec, SlidingWindow) or spec.window + spec.extra_retained_tokens > 1:
                    start, end = spec.needed_blocks(length)
                    assert mask == [False] * start + [True] * (end - start), (model, length)
                    count += 1
    assert count >= 20_000


def mask_pairs(rules, num_models):
    """(case, exact's, engine's) per group: asked, and kept under a random retention."""
    for rng, subject in subjects(Side.POOL, num_models, 23):
        engine, model = EngineModel(subject.model, Side.POOL, rules), subject.model
        if model.splits_blocks or (model.eagle_groups and not any(model.margins)):
            continue
        for _ in range(5):
            length = rng.randint(0, 10) * model.alignment
            start, num_prompt = rng.randint(0, length), rng.randint(1, length + model.alignment)
            retention = rng.choice((None, 0, model.alignment, rng.randint(1, 5) * model.alignment))
            asked = (exact_masks.lookup_mask(model, length), engine_masks.lookup_mask(engine, length))
            arguments = (length, start, retention, num_prompt)
            kept = (exact_masks.store_mask(model, *arguments), engine_masks.store_mask(engine, *arguments))
            for spec, exact, modelled in chain(
                zip(model.groups, *asked, strict=True), zip(model.groups, *kept, strict=True)
            ):
                yield (model, spec, arguments), exact, modelled


def is_part_of(exact, engine):
    return engine is None or (
        exact is not None and all(kept or not wanted for wanted, kept in zip(exact, engine, strict=True))
    )


@pytest.mark.slow
def test_what_exact_asks_and_keeps_the_engine_does_too():
    """Of retained tokens only since vLLM 0.33."""
    count = 0
    for case, exact, engine in mask_pairs(VLLM_0_33, 3_000):
        exact = [True] * len(engine) if exact is None and engine is not None else exact
        assert is_part_of(exact, engine), case
        count += 1
    assert count >= 40_000


def test_control_retained_tokens_of_vllm_0_32_are_not_part_of_it():
    example = MASKS["extra retained tokens are not stored"]
    masks = (
        exact_masks.store_mask(example.model, 16, 0, None, 17),
        engine_masks.store_mask(EngineModel(example.model, Side.POOL), 16, 0, None, 17),
    )
    assert not is_part_of(masks[0][1], masks[1][1])

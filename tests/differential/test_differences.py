"""Where the two modes differ: the examples of docs/DIFFERENCES.md.

Each example is given to mode `exact`, to mode `engine` and, where it is installed, to vLLM.
"""

from dataclasses import dataclass

import pytest

from kvcore import hit as exact_hits
from kvcore import masks as exact_masks
from kvcore.engine import hit as engine_hits
from kvcore.engine import masks as engine_masks
from kvcore.engine.model import EngineModel, Side
from kvcore.errors import InvalidArgument
from kvcore.runs import from_blocks
from kvcore.spec import ChunkedLocal, FullAttention, ModelSpec, Recurrent, SlidingWindow
from kvcore.tails import cover
from kvcore.units import align_down
from tests.differential.random_models import as_told, presence_of
from tests.differential.vllm_models import (
    block_hashes,
    connector_lookup,
    connector_worker,
    gpu_coordinator,
    gpu_hit_len,
    installed_rules,
    pool_coordinator,
)

# -- hits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hit:
    """A prompt of `num_tokens`, the lengths up to which each group has keys, the hit of each mode; all in tokens."""

    model: ModelSpec
    num_tokens: int
    lengths: tuple[tuple[int, ...], ...]
    exact: int
    engine: int


def model(*groups, drafts=(), **options):
    return ModelSpec(groups, frozenset(drafts), **options)


Full, Window, Chunk, State = FullAttention, SlidingWindow, ChunkedLocal, Recurrent

HITS = {
    "a window of one token asks for a block": Hit(model(Window(4, 1)), 9, ((),), 8, 0),
    "a chunk that begins inside a block skips it": Hit(model(Chunk(4, 6)), 9, ((),), 0, 4),
    "extra retained tokens are not asked for": Hit(model(Window(4, 5, 4)), 9, ((8,),), 0, 8),
    "a single draft group does not look past the last token": Hit(model(Full(4), drafts=[0]), 8, ((4, 8),), 4, 0),
    "a short chain of a draft window is dropped twice": Hit(
        model(Full(8), Window(4, 40), drafts=[1]), 13, ((8,), (4, 8, 12)), 8, 0
    ),
    "a draft window's proof is not asked again": Hit(
        model(Window(1, 2), Window(4, 9), drafts=[0, 1]), 17, ((1, 12, 16, 17), (4, 8, 12, 16)), 0, 12
    ),
    "a block that reaches past the limit does not serve": Hit(
        model(Full(8), State(4), hash_unit=4, hit_unit=4), 8, ((8,), (4, 8)), 4, 0
    ),
    "a tail and a whole block of groups of one spec are no common key": Hit(
        model(Full(8), Full(8), State(4), hash_unit=4, hit_unit=4), 9, ((4,), (8,), (4, 8)), 4, 0
    ),
}


def presence_at(example):
    unit = example.model.hashed_step
    return presence_of(
        example.model, example.num_tokens, [{length // unit - 1 for length in group} for group in example.lengths]
    )


def exact_hit_len(subject, presence):
    """Mode `exact` of presence in keys: where hits split blocks, a state is a unit's, a tail one of its own list."""
    limit = subject.limit(presence.num_tokens)
    if not subject.splits_blocks:
        return exact_hits.hit_len(subject, presence.blocks, limit)
    objects = [
        presence.blocks[group] if spec.prefix_closed else from_blocks(presence.units[group])
        for group, spec in enumerate(subject.groups)
    ]
    tails = [from_blocks(end // subject.hit_step - 1 for end in presence.tails[group]) for group in subject.tail_groups]
    return exact_hits.hit_len(subject.in_units(), cover(subject, [*objects, *tails]), limit)


def engine_hit_len(engine, presence):
    hashed_len = align_down(presence.num_tokens, engine.model.hashed_step)
    limit = max(0, presence.num_tokens - 1)
    return engine_hits.hit_len(engine, presence.blocks, limit, hashed_len, presence.tails)


@pytest.mark.parametrize("name", HITS)
def test_hit_differs(name):
    example = HITS[name]
    presence = presence_at(example)
    assert exact_hit_len(example.model, presence) == example.exact
    assert engine_hit_len(EngineModel(example.model), presence) == example.engine


@pytest.mark.engine
@pytest.mark.parametrize("name", HITS)
def test_vllm_finds_the_hit_of_mode_engine(name):
    example = HITS[name]
    coordinator, limit = gpu_coordinator(as_told(example.model)), example.num_tokens - 1
    assert gpu_hit_len(coordinator, example.model, presence_at(example), limit) == example.engine


LOOKUPS = {
    "the connector does not ask for what proves its last boundary": Hit(
        model(Full(8), Window(4, 5), drafts=[1]), 12, ((8,), (4, 8, 12)), 8, 0
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_differs(name):
    example = LOOKUPS[name]
    presence = presence_at(example)
    engine = EngineModel(example.model, Side.POOL)
    assert exact_hit_len(example.model, presence) == example.exact
    assert engine_hits.pool_hit_len(engine, presence.blocks, example.num_tokens, example.num_tokens) == example.engine


@pytest.mark.engine
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_connector_finds_the_hit_of_mode_engine(name):
    example = LOOKUPS[name]
    subject = as_told(example.model)
    hit, _ = connector_lookup(pool_coordinator(subject), subject, presence_at(example))
    assert hit == example.engine


# -- masks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Masks:
    """What is asked (no retention given) or kept of `length` tokens, per group, as text: x one block, None all."""

    model: ModelSpec
    length: int
    exact: tuple[str | None, ...]
    engine: tuple[str | None, ...]
    stored: tuple[int | None, int] | None = None
    """Retention and prompt length of a store; None: a lookup."""
    side: Side = Side.POOL


MASKS = {
    "chunked local attention has no mask": Masks(model(Chunk(4, 8)), 16, ("x.x.",), (None,)),
    "states are asked for at every block": Masks(model(Full(8), State(4)), 16, (None, ".x.x"), (None, None)),
    "a window of one token is never asked for": Masks(model(Full(8), Window(4, 1)), 16, (None, "...."), (None, "....")),
    "the mask of a draft window is given up early": Masks(
        model(Full(8), Window(4, 2), drafts=[1]), 16, (None, ".xxx"), (None, None)
    ),
    "extra retained tokens are not stored": Masks(
        model(Full(16), Window(4, 5, 4)), 16, (None, "..xx"), (None, "...x"), (None, 17)
    ),
    "states enter the GPU's cache by position": Masks(
        model(Full(8), State(4)), 16, (None, "...."), (None, None), (None, 17), Side.GPU
    ),
    "sparse states enter the GPU's cache by position": Masks(
        model(Full(8), State(4)), 16, (None, "...."), (None, ".x.x"), (8, 17), Side.GPU
    ),
    "a draft window keeps the peeked block of no hit": Masks(
        model(Window(4, 5), drafts=[0]), 12, ("...",), ("x..",), (0, 7)
    ),
    "a draft head of states alone moves the prompt's boundary": Masks(
        model(Window(4, 5), State(4), drafts=[1]), 12, (".x.", "..."), ("x..", "..."), (0, 11)
    ),
    "where hits end inside blocks, the connector keeps tails of windows at whole units": Masks(
        model(State(8), Window(4, 5), hash_unit=4, hit_unit=4), 16, ("..", None), ("..", ".x.x"), (None, 17)
    ),
    "where hits end inside blocks, a draft head's prompt ends a whole unit lower": Masks(
        model(State(8), Window(4, 5), drafts=[1], hash_unit=4, hit_unit=4),
        24,
        ("...", "....xx"),
        ("...", "...xx."),
        (0, 25),
    ),
    "an all-True list where every block is kept": Masks(model(Window(4, 9)), 8, (None,), ("xx",), (0, 9)),
}


def picture(masks):
    return tuple(mask if mask is None else "".join(".x"[kept] for kept in mask) for mask in masks)


def exact_picture(example):
    if example.stored is None:
        return picture(exact_masks.lookup_mask(example.model, example.length))
    retention, num_prompt = example.stored
    return picture(exact_masks.store_mask(example.model, example.length, 0, retention, num_prompt))


def engine_picture(example, rules):
    engine = EngineModel(example.model, example.side, rules)
    if example.stored is None:
        return picture(engine_masks.lookup_mask(engine, example.length))
    retention, num_prompt = example.stored
    return picture(engine_masks.store_mask(engine, example.length, 0, retention, num_prompt))


def vllm_picture(example):
    subject = as_told(example.model)
    if example.side is Side.GPU:
        return gpu_picture(gpu_coordinator(subject), example)
    coordinator = pool_coordinator(subject)
    if example.stored is None:
        return picture(coordinator.lookup_mask(example.length))
    coordinator.retention_interval, num_prompt = example.stored
    return picture(coordinator.store_mask(example.length, 0, num_prompt))


def gpu_picture(coordinator, example):
    retention, num_prompt = example.stored
    return picture(
        manager.reachable_block_mask(
            start_block=0,
            end_block=example.length // manager.block_size,
            alignment_tokens=manager.cache_hit_alignment_tokens,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=manager.use_eagle,
            retention_interval=retention,
            reachable_boundaries=(num_prompt - 1,),
        )
        for manager in coordinator.single_type_managers
    )


@pytest.mark.parametrize("name", MASKS)
def test_masks_differ(name):
    example = MASKS[name]
    assert exact_picture(example) == example.exact
    assert engine_picture(example, EngineModel(example.model).rules) == example.engine


@pytest.mark.engine
@pytest.mark.parametrize("name", MASKS)
def test_vllm_masks_as_mode_engine(name):
    example = MASKS[name]
    assert vllm_picture(example) == engine_picture(example, installed_rules())


# -- loads and refusals -----------------------------------------------------------------------------------------------

LOADS = {
    "a window of one token loads a block": (model(Full(4), Window(4, 1)), 8, ("xx", ".."), ("xx", ".x")),
    "extra retained tokens are not loaded": (model(Full(4), Window(4, 5, 4)), 12, ("xxx", ".xx"), ("xxx", "..x")),
}


def needed_picture(subject, length):
    """What mode `exact` needs of a hit."""
    return tuple(
        "".join(".x"[start <= block < end] for block in range(length // spec.block_size))
        for spec in subject.groups
        for start, end in [spec.needed_blocks(length)]
    )


@pytest.mark.parametrize("name", LOADS)
def test_loads_differ(name):
    subject, length, exact, engine = LOADS[name]
    assert needed_picture(subject, length) == exact
    assert picture(engine_masks.load_mask(EngineModel(subject, Side.POOL), length)) == engine


REFUSED = {
    "chunked local attention with a draft head": model(Full(4), Chunk(4, 8), drafts=[1]),
    "chunked local attention with blocks of several sizes": model(Full(8), Chunk(4, 8)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_refuses(name):
    everything = presence_of(REFUSED[name], 17, [set(range(4)) for _ in range(2)])
    assert exact_hit_len(REFUSED[name], everything) > 0
    with pytest.raises(InvalidArgument, match="vLLM refuses"):
        EngineModel(REFUSED[name])


@pytest.mark.engine
@pytest.mark.parametrize("name", REFUSED)
def test_vllm_fails_where_mode_engine_refuses(name):
    subject = REFUSED[name]
    everything = presence_of(subject, 17, [set(range(4)) for _ in range(2)])
    with pytest.raises(AssertionError, match="chunked local attention"):
        gpu_hit_len(gpu_coordinator(as_told(subject)), subject, everything, 16)


@pytest.mark.engine
def test_the_connector_s_lookup_fails_where_a_hit_needs_nothing_of_a_group():
    """A hit at a chunk's end needs no block of it; the worker asserts that every group has the one that ends there."""
    subject, nothing = as_told(model(Chunk(4, 8))), presence_of(model(Chunk(4, 8)), 9, [set()])
    engine = EngineModel(subject.model, Side.POOL)
    assert exact_hit_len(subject.model, nothing) == engine_hits.pool_hit_len(engine, nothing.blocks, 9, 8) == 8
    worker = connector_worker(pool_coordinator(subject), subject, nothing)
    with pytest.raises(AssertionError):
        worker.lookup(9, block_hashes(subject.model, 9))

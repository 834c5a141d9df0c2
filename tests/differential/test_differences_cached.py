"""Where the engine's own cache differs: examples of docs/DIFFERENCES.md for what enters it, and for its failures."""

import re
from dataclasses import dataclass

import pytest

from kvcore import masks as exact_masks
from kvcore.engine.cached import CachedSequence
from kvcore.engine.hit import hit_len
from kvcore.engine.model import EngineModel, Side
from kvcore.engine.writer import Beginning, Entries, Step, Writer
from kvcore.errors import InvalidArgument
from kvcore.spec import FullAttention, ModelSpec, Recurrent, SlidingWindow
from tests.differential.random_models import as_told, random_presence, subjects
from tests.differential.test_differences import HITS, LOADS, LOOKUPS, MASKS, REFUSED, engine_hit_len
from tests.differential.vllm_cache import Prompt, VllmCache
from tests.differential.vllm_models import gpu_coordinator, gpu_hit_len
from tests.support import PROJECT

Full, Window, State = FullAttention, SlidingWindow, Recurrent

# -- what enters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entered:
    """A prompt of `num_prompt_tokens` whose steps end at `ends`; the lengths of the first group's keys in each mode."""

    model: ModelSpec
    num_prompt_tokens: int
    ends: tuple[int, ...]
    exact: tuple[int, ...]
    engine: tuple[int, ...]

    @property
    def steps(self):
        runs = zip((0, *self.ends), self.ends, strict=False)
        return [Step(start, end, max(self.num_prompt_tokens, end)) for start, end in runs]

    @property
    def block_size(self):
        return self.model.groups[0].block_size


ENTERED = {
    "a tail where no hit ends enters the GPU's cache": Entered(
        ModelSpec((Full(8), Window(4, 5))), 14, (14, 15, 16), (8, 16), (8, 12, 16)
    ),
}


@pytest.mark.parametrize("name", ENTERED)
def test_entries_differ(name):
    example = ENTERED[name]
    sequence = CachedSequence(Writer(EngineModel(example.model)), Beginning(example.num_prompt_tokens))
    for step in example.steps:
        sequence.compute(step)
    (kept, *_) = exact_masks.store_mask(example.model, example.ends[-1], 0, None, example.num_prompt_tokens)
    assert kept is None
    assert lengths(Entries(((0, example.ends[-1] // example.block_size),)), example.block_size) == example.exact
    assert lengths(sequence.entries[0], example.block_size) == example.engine


def lengths(entries, size):
    full = [(block + 1) * size for run in entries.blocks for block in range(*run)]
    return tuple(sorted([*full, *entries.tails]))


@pytest.mark.engine
@pytest.mark.parametrize("name", ENTERED)
def test_vllm_enters_what_mode_engine_does(name):
    example = ENTERED[name]
    cache = VllmCache(as_told(example.model), Writer(EngineModel(example.model)), num_blocks=100)
    request = cache.request(Prompt(0, example.num_prompt_tokens), "r")
    for step in example.steps:
        cache.compute(request, step)
    assert ends_of(cache, 0) == list(example.engine)


def ends_of(cache, group):
    return sorted((unit + 1) * cache.unit for owner, _, unit in cache.entries() if owner == group)


# -- what vLLM fails at -----------------------------------------------------------------------------------------------

SINK = "sink attention"
MODULES = "a draft head of several modules in a group of states"
FAILS = {SINK, MODULES}

SINKS = ModelSpec((Full(4, layout="sink"), Window(4, 5), Full(4)), frozenset({2}))


def without_sinks(model):
    """Plain full attention of another layout: sinks are tokens that every token reads, as it reads all others."""
    return ModelSpec(
        tuple(Full(spec.block_size, layout="wide") if spec.layout == "sink" else spec for spec in model.groups),
        model.eagle_groups,
    )


def test_sink_attention_is_full_attention():
    rng = next(subjects(Side.GPU, 1, 51))[0]
    for _ in range(200):
        presence = random_presence(rng, SINKS)
        plain = engine_hit_len(EngineModel(without_sinks(SINKS)), presence)
        assert engine_hit_len(EngineModel(SINKS), presence) == plain


@pytest.mark.engine
def test_vllm_cannot_build_its_manager_of_sink_attention():
    """When this fails, vLLM can: then `random_models` may have such groups on the GPU's side as well."""
    with pytest.raises(TypeError, match=r"SinkFullAttentionManager.*unexpected keyword argument"):
        gpu_coordinator(as_told(SINKS))


@pytest.fixture
def repaired_manager(monkeypatch):
    """Its manager takes what the coordinator gives to every manager."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SinkFullAttentionManager

    monkeypatch.setattr(SinkFullAttentionManager, "__init__", FullAttentionManager.__init__)


@pytest.mark.engine
def test_with_its_manager_repaired_vllm_finds_what_mode_engine_does(repaired_manager):
    rng, coordinator = next(subjects(Side.GPU, 1, 52))[0], gpu_coordinator(as_told(SINKS))
    hits = set()
    for _ in range(500):
        presence = random_presence(rng, SINKS)
        limit = max(0, presence.num_tokens - 1)
        hashed_len = presence.num_tokens // 4 * 4
        ours = hit_len(EngineModel(SINKS), presence.blocks, limit, hashed_len, presence.tails)
        assert ours == gpu_hit_len(coordinator, SINKS, presence, limit)
        hits.add(ours)
    assert len(hits) > 5


DRAFTING = ModelSpec((Full(8), State(8)), frozenset({0, 1}), hash_unit=2, hit_unit=2)


def test_several_modules_with_states_are_refused():
    with pytest.raises(InvalidArgument, match="another one's length"):
        Writer(EngineModel(DRAFTING), num_reprefilled=2)


@pytest.mark.engine
def test_vllm_enters_a_state_under_another_one_s_length():
    """The chunk makes the state after 12 tokens; less two that are computed again, it gets the key of 10."""
    settings = Writer(
        EngineModel(ModelSpec(DRAFTING.groups, frozenset({0}), hash_unit=2, hit_unit=2)), num_reprefilled=2
    )
    cache = VllmCache(as_told(DRAFTING), settings, num_blocks=100)
    request = cache.request(Prompt(0, 12), "r")
    cache.compute(request, Step(0, 8, 12))
    cache.compute(request, Step(8, 12, 12))
    assert ends_of(cache, 1) == [8, 10]
    (_, running) = cache.manager.coordinator.single_type_managers[1].req_to_blocks["r"]
    assert running.block_hash_num_tokens == 10


# -- the document -----------------------------------------------------------------------------------------------------


def test_the_document_lists_every_example():
    text = (PROJECT / "docs" / "DIFFERENCES.md").read_text(encoding="utf-8")
    listed = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted([*HITS, *LOOKUPS, *MASKS, *LOADS, *REFUSED, *ENTERED, *FAILS])

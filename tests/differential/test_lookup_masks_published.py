"""The published behaviours of vLLM PR 45444 (skip useless lookups), of both modes."""

from dataclasses import dataclass

import pytest

from kvcore import hit as exact_hits
from kvcore import masks as exact_masks
from kvcore.engine import hit as engine_hits
from kvcore.engine import masks as engine_masks
from kvcore.engine.hit import pool_hit_len
from kvcore.engine.model import EngineModel, Side
from kvcore.runs import from_blocks, intersect
from kvcore.spec import FullAttention, ModelSpec, SlidingWindow
from tests.differential.random_models import as_told, presence_of
from tests.differential.vllm_models import connector_lookup, pool_coordinator

FULL = ModelSpec((FullAttention(16),))
WINDOW = ModelSpec((FullAttention(32), SlidingWindow(8, window=8)))
"""A window of one block before each boundary: 96 tokens are 3 chunks of the one group and 12 of the other."""

PROMPT = 96
ASKED = 3 * [False, False, False, True]


class Exact:
    """Mode `exact` behind the connector's three questions."""

    def __init__(self, model):
        self.model = model

    def lookup_mask(self, length):
        return exact_masks.lookup_mask(self.model, length)

    def store_mask(self, length, num_prompt_tokens, retention):
        return exact_masks.store_mask(self.model, length, 0, retention, num_prompt_tokens)

    def hit_len(self, present, limit):
        return exact_hits.hit_len(self.model, present, limit)


@dataclass
class Engine:
    """Mode `engine` behind the same."""

    model: ModelSpec

    def __post_init__(self):
        self.engine = EngineModel(self.model, Side.POOL)

    def lookup_mask(self, length):
        return engine_masks.lookup_mask(self.engine, length)

    def store_mask(self, length, num_prompt_tokens, retention):
        return engine_masks.store_mask(self.engine, length, 0, retention, num_prompt_tokens)

    def hit_len(self, present, limit):
        return engine_hits.hit_len(self.engine, present, limit, limit)


class Vllm:
    """The installed vLLM's connector behind the same."""

    def __init__(self, model):
        self.coordinator = pool_coordinator(as_told(model))

    def lookup_mask(self, length):
        return self.coordinator.lookup_mask(length)

    def store_mask(self, length, num_prompt_tokens, retention):
        self.coordinator.retention_interval = retention
        return self.coordinator.store_mask(length, 0, num_prompt_tokens)


MODES = pytest.mark.parametrize("mode", [Exact, Engine, pytest.param(Vllm, marks=pytest.mark.engine)])
OURS = pytest.mark.parametrize("mode", [Exact, Engine])


@MODES
def test_a_full_attention_store_mask_is_the_sentinel_for_all(mode):
    assert mode(FULL).store_mask(PROMPT, PROMPT + 1, None) == (None,)
    assert mode(FULL).lookup_mask(PROMPT) == (None,)


@MODES
def test_a_window_group_asks_for_three_of_twelve_chunks_six_keys_in_all(mode):
    full, window = mode(WINDOW).lookup_mask(PROMPT)
    assert full is None
    assert window == ASKED
    assert PROMPT // 32 + sum(window) == 6


@OURS
def test_the_six_keys_give_a_hit_of_32_when_a_sparse_writer_kept_one_tail(mode):
    """The pool has all of the full group, and of the window only what a prompt of 33 to 64 tokens left."""
    subject = mode(WINDOW)
    _, kept = subject.store_mask(32, 40, 0)
    stored = (from_blocks(range(3)), from_blocks(i for i, keep in enumerate(kept) if keep))
    asked = (from_blocks(range(3)), from_blocks(i for i, ask in enumerate(ASKED) if ask))
    present = tuple(intersect(had, wanted) for had, wanted in zip(stored, asked, strict=True))
    assert kept == [False, False, False, True]
    assert subject.hit_len(present, PROMPT) == 32


@pytest.mark.engine
def test_so_does_the_installed_connector():
    """Its own lookup code, down to the keys."""
    presence = presence_of(WINDOW, PROMPT, [{3, 7, 11}, {3}])
    subject = as_told(WINDOW)
    hit, asked = connector_lookup(pool_coordinator(subject), subject, presence)
    assert (hit, len(asked)) == (32, 6)
    assert pool_hit_len(EngineModel(WINDOW, Side.POOL), presence.blocks, PROMPT, PROMPT) == 32


@MODES
def test_a_lookup_asks_for_every_earlier_boundary_though_a_writer_keeps_only_the_last(mode):
    """A lookup knows neither the writer's retention nor its prompt."""
    subject = mode(WINDOW)
    _, kept = subject.store_mask(PROMPT, PROMPT + 1, 0)
    _, asked = subject.lookup_mask(PROMPT)
    assert kept == [*8 * [False], False, False, False, True]
    assert asked == ASKED


@OURS
def test_control_a_lookup_of_the_last_boundary_alone_misses_the_hit(mode):
    present = (from_blocks(range(3)), ())
    assert mode(WINDOW).hit_len(present, PROMPT) == 0

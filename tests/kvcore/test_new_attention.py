"""A new attention type is one small class: hits, masks, planner and request machine work with it untouched."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvcore.group_runs import common
from kvcore.hit import hit_len
from kvcore.masks import lookup_mask, lookup_runs, store_mask, store_runs
from kvcore.planner import Planner
from kvcore.plans import Offer, PoolPolicy
from kvcore.request import KVRequest
from kvcore.spec import FullAttention, GroupSpec, ModelSpec
from tests.kvcore.attention_oracle import Group, Oracle, Window, as_runs, as_sets, presences


@dataclass(frozen=True, slots=True)
class PagedWindow(GroupSpec):
    """A window that opens at a page: a token reads from the start of the page its window begins in."""

    window: int
    page: int

    def needed_blocks(self, prefix_len):
        first = max(0, prefix_len - (self.window - 1)) // self.page * self.page
        return (first // self.block_size, -(-prefix_len // self.block_size))


# What follows is the proof, not part of the type: its mask, and every answer against it.


@dataclass(frozen=True)
class PagedMask:
    window: int
    page: int

    def reads(self, token):
        pages = {earlier // self.page for earlier in Window(self.window).reads(token)}
        return [earlier for earlier in range(token) if pages and earlier // self.page >= min(pages)]


GROUPS = st.tuples(st.sampled_from((1, 2, 4)), st.integers(2, 12), st.integers(1, 9))


@st.composite
def cases(draw):
    full_size, (block_size, window, page) = draw(st.sampled_from((2, 4, 8))), draw(GROUPS)
    model = ModelSpec((FullAttention(full_size), PagedWindow(block_size, window, page)))
    oracle = Oracle((Group(Window(10_000), full_size), Group(PagedMask(window, page), block_size)))
    num_tokens = draw(st.integers(1, 64))
    return model, oracle, num_tokens, draw(presences(oracle, num_tokens))


@given(cases())
def test_needed_blocks(case):
    model, oracle, num_tokens, _ = case
    assert set(range(*model.groups[1].needed_blocks(num_tokens))) == oracle.groups[1].needed(num_tokens)


@given(cases())
def test_hit_lookup_and_store(case):
    model, oracle, num_tokens, present = case
    assert hit_len(model, as_runs(present), num_tokens) == oracle.hit_len(present, num_tokens)
    assert as_sets(lookup_runs(model, 0, num_tokens)) == oracle.lookup(0, num_tokens)
    ranges = tuple((0, num_tokens // group.block_size) for group in model.groups)
    kept = as_sets(store_runs(model, ranges, None, num_tokens))
    assert kept == (set(range(*ranges[0])), oracle.store(ranges, None, num_tokens, 200)[1])


@given(cases())
def test_request(case):
    model, oracle, num_tokens, present = case
    planner = Planner(model)
    request = KVRequest(planner, PoolPolicy(lookup_deadline_ns=1_000, offer_ttl_ns=1_000), num_tokens)
    question = request.consider(0, num_tokens, now_ns=0)
    if isinstance(question, Offer):
        assert planner.limit(num_tokens) == 0
        return
    while question.dialogue.open:
        question.dialogue.answered(common(as_runs(present), question.dialogue.question))
    request.lookup_answered(question.ticket, now_ns=1)
    offer = request.consider(0, num_tokens, now_ns=1)
    assert offer.num_tokens == oracle.hit_len(present, oracle.last_boundary(num_tokens - 1))
    load = request.granted(offer.num_tokens, now_ns=1)
    assert as_sets(load.blocks if load else ((), ())) == oracle.held(offer.num_tokens)


def test_masks():
    """Pages of 16 tokens, a window of 9, blocks of 4: the tail of a boundary reaches back to its page's start."""
    model = ModelSpec((FullAttention(32), PagedWindow(4, window=9, page=16)))
    tail = [False] * 4 + [True] * 4
    assert lookup_mask(model, 64) == (None, tail * 2)
    assert store_mask(model, 64) == (None, tail * 2)

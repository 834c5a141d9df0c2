"""Events say where a block belongs, whatever was stored before it: case S16, and what an index makes of them."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.hashing import NO_EXTRAS, Extras, Lora, MultiModal, PromptEmbeds, extra_keys, hash_blocks
from kvcore.kv_events import (
    AllBlocksCleared,
    BlocksRemoved,
    EventIndex,
    Medium,
    Place,
    Prompt,
    removed_events,
    stored_events,
    untagged,
)
from kvcore.runs import from_blocks
from kvcore.types import GroupId

B = 4
POOL = Place(Medium.CPU, GroupId(0))

EXTRAS = st.sampled_from([NO_EXTRAS, Extras(Lora("x", "/x")), Extras(salt="x"), Extras(items=(MultiModal("x", 2, 5),))])


def prompt_of(token_ids, extras=NO_EXTRAS):
    token_ids = tuple(token_ids)
    hashes, lora = tuple(hash_blocks(token_ids, B, extras=extras)), extras.lora and extras.lora.name
    return Prompt(token_ids, B, hashes, partial(extra_keys, extras, B), lora)


# Few tokens and shared beginnings, so that prompts branch off one another.
PROMPTS = st.builds(
    lambda blocks, rest, extras: prompt_of([t for block in blocks for t in (block,) * B] + [7] * rest, extras),
    st.lists(st.integers(0, 1), max_size=7),
    st.integers(0, B - 1),
    EXTRAS,
)


def blocks_of(prompt):
    return (
        st.frozensets(st.sampled_from(range(len(prompt.block_hashes)))) if prompt.block_hashes else st.just(frozenset())
    )


@st.composite
def stories(draw):
    """Prompts, and for each in turn the blocks that were there already: another's, or put there before."""
    prompts = draw(st.lists(PROMPTS, min_size=1, max_size=4))
    return [(prompt, draw(blocks_of(prompt))) for prompt in prompts]


def leading(prompt, present):
    count = 0
    while count < len(prompt.block_hashes) and prompt.block_hashes[count] in present:
        count += 1
    return count


def index_is_right(story, make_events):
    """Somebody stores some blocks of each prompt, then the rest is stored; the index always knows the true prefixes."""
    index, present = EventIndex(POOL), set()
    for prompt, before in story:
        everything = frozenset(range(len(prompt.block_hashes)))
        for blocks in (before, everything - before):
            new = {block for block in blocks if prompt.block_hashes[block] not in present}
            for event in make_events(prompt, from_blocks(new)):
                index.apply(event)
            present |= {prompt.block_hashes[block] for block in blocks}
            for asked, _ in story:
                assert index.prefix_blocks(asked.token_ids, B, asked.keys_of) == leading(asked, present)
        assert len(index) == len(present)


def ours(prompt, runs):
    return stored_events(prompt, runs, POOL)


@given(stories())
def test_an_index_knows_the_true_prefix_whatever_was_there_before(story):
    index_is_right(story, ours)


@given(stories())
def test_the_parent_is_the_block_before_it_in_the_prompt(story):
    for prompt, stored in story:
        for event in ours(prompt, from_blocks(stored)):
            first = prompt.block_hashes.index(event.block_hashes[0])
            assert event.parent_block_hash == (prompt.block_hashes[first - 1] if first else None)
            assert event.token_ids == prompt.token_ids[first * B : (first + len(event.block_hashes)) * B]
            assert len(event.extra_keys) == len(event.block_hashes)


def chained_to_what_was_written_before(prompt, runs):
    """The bug of S16: the parent is the block that was written last."""
    parent, events = None, []
    for event in ours(prompt, runs):
        events.append(replace(event, parent_block_hash=parent))
        parent = event.block_hashes[-1]
    return events


def as_if_nothing_was_there(prompt, runs):
    return [replace(event, parent_block_hash=None) for event in ours(prompt, runs)]


def all_in_one_event(prompt, runs):
    events = ours(prompt, runs)
    if not events:
        return []
    hashes = tuple(h for event in events for h in event.block_hashes)
    token_ids = tuple(t for event in events for t in event.token_ids)
    keys = tuple(k for event in events for k in event.extra_keys)
    return [replace(events[0], block_hashes=hashes, token_ids=token_ids, extra_keys=keys)]


@pytest.mark.parametrize("wrong", [chained_to_what_was_written_before, as_if_nothing_was_there, all_in_one_event])
def test_the_check_rejects_a_broken_chain(wrong):
    story = [(prompt_of(range(5 * B)), frozenset({0, 2}))]
    index_is_right(story, ours)
    with pytest.raises(AssertionError):
        index_is_right(story, wrong)


@given(PROMPTS, st.data())
def test_a_removed_block_ends_the_prefix_until_it_is_back(prompt, data):
    index, num_blocks = EventIndex(POOL), len(prompt.block_hashes)
    for event in ours(prompt, ((0, num_blocks),) if num_blocks else ()):
        index.apply(event)
    gone = data.draw(blocks_of(prompt))
    for event in removed_events(prompt, from_blocks(gone), POOL):
        index.apply(event)
        index.apply(event)  # told twice
    assert index.prefix_blocks(prompt.token_ids, B, prompt.keys_of) == min(gone, default=num_blocks)
    for event in ours(prompt, from_blocks(gone)):
        index.apply(event)
    assert index.prefix_blocks(prompt.token_ids, B, prompt.keys_of) == num_blocks
    index.apply(AllBlocksCleared())
    assert len(index) == index.prefix_blocks(prompt.token_ids, B, prompt.keys_of) == 0


def test_other_places_say_nothing():
    prompt, index = prompt_of(range(2 * B)), EventIndex(Place(Medium.GPU, GroupId(1)))
    for place in (Place(Medium.CPU, GroupId(1)), Place(Medium.GPU, GroupId(0))):
        for event in stored_events(prompt, ((0, 2),), place):
            index.apply(event)
    assert len(index) == 0
    (event,) = stored_events(prompt, ((0, 2),), index.place)
    index.apply(event)
    index.apply(BlocksRemoved(POOL, prompt.block_hashes))
    assert len(index) == 2


def test_what_an_event_carries():
    extras = Extras(Lora("ad", "/p"), (MultiModal("img", 5, 2),), "salt", PromptEmbeds(bytes(12), 1))
    first, second = stored_events(prompt_of(range(3 * B), extras), ((0, 1), (1, 3)), POOL)
    assert (first.lora_name, first.block_size, first.place.medium.value) == ("ad", B, "CPU")
    assert [key[0] for key in first.extra_keys[0]] == ["lora", "cache_salt", "prompt_embeds"]
    assert [[key[0] for key in block] for block in second.extra_keys] == [
        ["lora", "mm", "prompt_embeds"], ["lora", "prompt_embeds"],
    ]  # fmt: skip
    assert untagged(second.extra_keys)[0][:2] == ("ad", ("img", 1))


@pytest.mark.engine
def test_published_keys_are_vllms():
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys

    extras = Extras(Lora("ad", "/p"), (MultiModal("img", 5, 2),), "salt", PromptEmbeds(bytes(12), 1))
    for given_extras in (NO_EXTRAS, extras, Extras(salt="s")):
        (event,) = stored_events(prompt_of(range(3 * B), given_extras), ((0, 3),), POOL)
        assert untagged(event.extra_keys) == to_event_extra_keys(list(event.extra_keys))


def test_blocks_that_are_not_full_have_no_event():
    prompt = prompt_of(range(2 * B + 1))
    with pytest.raises(InvalidArgument, match=r"run = \(1, 3\): expected full blocks, of 2"):
        stored_events(prompt, ((1, 3),), POOL)
    with pytest.raises(InvalidArgument, match=r"block_hashes = .*: expected 3, one for each full block"):
        Prompt(tuple(range(3 * B)), B, prompt.block_hashes)

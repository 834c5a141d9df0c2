"""What a listener to the engine's KV events knows of the pool: what is there, where it belongs, and nothing else."""

from functools import partial
from types import SimpleNamespace

import pytest

from kvcore.hashing import Extras, Lora, MultiModal, extra_keys, hash_blocks
from kvcore.kv_events import BlocksRemoved, BlocksStored, EventIndex, Medium, Place
from kvcore.spec import FullAttention, ModelSpec, Recurrent
from kvcore.types import GroupId

pytestmark = pytest.mark.engine

BLOCK = 4
TEXT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
"""10 blocks."""
POOL = "CPU"


@pytest.fixture
def engines(monkeypatch):
    """Engines without a model that publish events, hashes as bytes."""
    from vllm.config.kv_events import KVEventsConfig

    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    quiet = modelless_engine.make_config

    def publishing(*arguments):
        config = quiet(*arguments)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return config

    monkeypatch.setattr(modelless_engine, "make_config", publishing)
    return modelless_engine


def listen(engine):
    """The events that are published from now on."""
    heard = []
    engine.scheduler.kv_event_publisher = SimpleNamespace(publish=lambda batch: heard.extend(batch.events))
    return heard


def make_engine(engines, *specs, **options):
    engine = engines.Engine(specs or [engines.full(BLOCK)], 80, **options)
    return engine, listen(engine)


def about(heard, medium, kind):
    return [event for event in heard if type(event).__name__ == kind and event.medium == medium]


def blocks_of(heard, medium):
    """(group, hash) -> what was last said of the block."""
    told = {}
    for event in about(heard, medium, "BlockStored"):
        parent, size = event.parent_block_hash, event.block_size
        for index, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[index * size : (index + 1) * size]
            keys = event.extra_keys and event.extra_keys[index]
            kind = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            told[event.group_idx, block_hash] = parent, tuple(tokens), size, keys, event.lora_name, kind
            parent = block_hash
    return told


def known(heard, group=0):
    """The hashes that a listener believes to be in the pool."""
    hashes = set()
    for event in heard:
        if getattr(event, "medium", POOL) == POOL and getattr(event, "group_idx", group) == group:
            match type(event).__name__:
                case "BlockStored":
                    hashes |= set(event.block_hashes)
                case "BlockRemoved":
                    hashes -= set(event.block_hashes)
                case _:
                    hashes.clear()
    return hashes


def run(engine, name, text=TEXT, num_output=1):
    engine.add(name, text, num_output)
    engine.drain()


def pool_hashes(engine, group=0):
    return {key.block_hash for key in engine.pool if key.group == group}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_told_of_a_block_is_what_the_engine_tells_of_its_own(engines, depth):
    """The same tokens, parent, keys and kind, under the names of the pool's keys."""
    engine, heard = make_engine(engines, engines.full(BLOCK), engines.window(BLOCK, 2 * BLOCK), depth=depth)
    run(engine, "a", num_output=9)
    run(engine, "b", TEXT[:16] + "another end", num_output=5)
    own, pool = blocks_of(heard, "GPU"), blocks_of(heard, POOL)
    assert len(pool) >= 20
    assert {(key.group, key.block_hash) for key in engine.pool} == pool.keys()
    assert {block: own[block] for block in pool} == pool
    assert {event.locality for event in heard if event.medium == POOL} == {"REMOTE"}


@pytest.mark.parametrize("added", ["lora", "salt"])
def test_adapter_and_salt_are_told_as_the_engine_tells_them(engines, added):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    engine, heard = make_engine(engines)
    extra = {"lora": {"lora_request": LoRARequest("ad", 3, "/p")}, "salt": {"cache_salt": "s"}}[added]
    engine.outputs["a"] = ""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    tokens, hasher = engines.tokens_of(TEXT), engine._new_hashes
    engine.scheduler.add_request(Request("a", tokens, sampling, None, block_hasher=hasher, **extra))
    engine.drain()
    own, pool = blocks_of(heard, "GPU"), blocks_of(heard, POOL)
    assert {block: own[block] for block in pool} == pool
    names = [(keys, lora) for _, _, _, keys, lora, _ in pool.values()]
    assert names == ([(("ad",), "ad")] * 10 if added == "lora" else [(("s",), None), *[(None, None)] * 9])


def test_a_block_is_told_when_its_last_rank_has_stored_it_and_not_if_one_could_not(engines):
    engine, heard = make_engine(engines, num_ranks=2)
    engine.add("a", TEXT, 1)
    while not all(rank.half._stores.waiting for rank in engine.ranks):
        engine.lookups.answer(engine.pool)
        engine.step()
    engine.move("store", 0)
    engine.step()
    assert not known(heard)
    engine.move("store", 1, fails=lambda index: index == 0)
    engine.drain()
    both = {h for h in pool_hashes(engine) if sum(key.block_hash == h for key in engine.pool) == 2}
    assert known(heard) == both
    assert both < pool_hashes(engine)


def test_what_a_load_finds_to_be_gone_is_taken_back_and_told_again_once_stored(engines):
    engine, heard = make_engine(engines)
    run(engine, "writer")
    assert len(known(heard)) == 10
    assert engine.scheduler.reset_prefix_cache()
    lost = sorted(pool_hashes(engine), key=len)[3]
    engine.add("reader", TEXT, 1)
    while not engine.ranks[0].half._loads.waiting:
        engine.lookups.answer(engine.pool)
        engine.step()
    del engine.pool[next(key for key in engine.pool if key.block_hash == lost)]
    half = engine.ranks[0].half._loads
    job = half.waiting.popleft()
    gone = [index for index, entry in enumerate(job.entries) if entry.block_hash == lost]
    for index, entry in enumerate(job.entries):
        if index not in gone:
            engine._load(engine.ranks[0], next(key for key in engine.pool if key.block_hash == entry.block_hash), entry)
    half.ended.append((job, engines.Ended(job.job_id, 1, tuple(gone), tuple(gone))))
    engine.drain()
    assert [event.block_hashes for event in about(heard, POOL, "BlockRemoved")] == [[lost]]
    kept = [event for event in heard if hasattr(event, "medium")]  # vLLM says of its own reset that all is cleared
    assert known(kept) == pool_hashes(engine)


def test_a_failure_that_says_nothing_of_the_pool_takes_nothing_back(engines):
    engine, heard = make_engine(engines)
    run(engine, "writer")
    assert engine.scheduler.reset_prefix_cache()
    engine.add("reader", TEXT, 1)
    while not engine.ranks[0].half._loads.waiting:
        engine.lookups.answer(engine.pool)
        engine.step()
    engine.move("load", 0, fails=lambda index: True)
    engine.drain()
    assert about(heard, POOL, "BlockRemoved") == []


def test_a_reset_takes_back_all_that_was_told_and_a_store_under_way_is_not_told(engines):
    engine, heard = make_engine(engines)
    run(engine, "before")
    engine.add("under way", TEXT[::-1], 1)
    while not engine.ranks[0].half._stores.waiting:
        engine.lookups.answer(engine.pool)
        engine.step()
    assert len(known(heard)) == 10
    engine.connector.reset_cache()
    engine.drain()
    assert known(heard) == set()
    assert len(blocks_of(heard, "GPU")) == 20, "what the engine itself has is not taken back"
    assert not any(type(event).__name__ == "AllBlocksCleared" for event in heard)
    run(engine, "after", TEXT[::2] + TEXT[1::2])
    assert len(known(heard)) == 10


def test_without_the_engine_s_setting_nothing_is_collected(monkeypatch):
    from tests.kvconnector import modelless_engine

    modelless_engine.without_threads(monkeypatch)
    engine, heard = make_engine(modelless_engine)
    run(engine, "a")
    assert (heard, list(engine.connector.take_events()), engine.half.events) == ([], [], None)


# --- without an engine ------------------------------------------------------------------------------------------------


def cache_config(model):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for _ in model.groups])


def pool_events(model, unit=BLOCK, **options):
    from kvconnector.events import PoolEvents

    return PoolEvents(model, unit, cache_config(model), **options)


def request(length, unit=BLOCK, extras=None):
    """As vLLM's, of that many tokens, hashed in the unit."""
    extras = extras or Extras()
    lora = extras.lora and SimpleNamespace(lora_name=extras.lora.name, lora_path=extras.lora.path)
    items = [
        SimpleNamespace(identifier=item.identifier, mm_position=SimpleNamespace(offset=item.offset, length=item.length))
        for item in extras.items
    ]
    return SimpleNamespace(
        all_token_ids=list(range(length)),
        block_hashes=hash_blocks(list(range(length)), unit, extras=extras),
        lora_request=lora,
        mm_features=items,
        cache_salt=extras.salt or None,
        prompt_embeds=None,
    )


def values(events):
    """The events before they take vLLM's form."""
    taken, events._events = events._events, []
    return taken


FULL = ModelSpec((FullAttention(BLOCK),))


def test_a_listener_finds_prompts_by_content():
    """Images that begin before a run of blocks, and end in it or after it."""
    extras = Extras(Lora("ad", "/p"), (MultiModal("x", 2, 9), MultiModal("y", 11, 2), MultiModal("z", 18, 9)), "salt")
    events, index, asked = (
        pool_events(FULL),
        EventIndex(Place(Medium.CPU, GroupId(0))),
        request(8 * BLOCK, extras=extras),
    )
    keys_of = partial(extra_keys, extras, BLOCK)
    for runs, expected in ((((1, 3), (5, 8)), 0), (((0, 1),), 3), (((3, 5),), 8)):
        events.stored(asked, (runs,))
        for event in values(events):
            index.apply(event)
        assert index.prefix_blocks(asked.all_token_ids, BLOCK, keys_of) == expected
    assert index.prefix_blocks(asked.all_token_ids, BLOCK) == 0, "without adapter, salt and images it is another prompt"


def test_states_and_tails_are_told_at_their_own_size_under_the_hash_where_they_end():
    """Blocks of 8 tokens, hits on every 4: a tail of 4 tokens ends inside a block."""
    model = ModelSpec((FullAttention(8), Recurrent(8)), hash_unit=4, hit_unit=4)
    events, asked = pool_events(model, unit=4), request(24, unit=4)
    assert {kind.num_tokens for kind in model.kinds} == {4, 8}
    for index, kind in enumerate(model.kinds):
        runs = [()] * len(model.kinds)
        runs[index] = ((1, 2),)
        events.stored(asked, tuple(runs))
        (event,) = values(events)
        start, end = kind.num_tokens, 2 * kind.num_tokens
        assert event.place.group == kind.group
        assert (event.block_size, event.token_ids) == (kind.num_tokens, tuple(range(start, end)))
        assert event.block_hashes == (asked.block_hashes[end // 4 - 1],)
        assert event.parent_block_hash == asked.block_hashes[start // 4 - 1]


def test_of_more_blocks_than_listeners_are_to_know_the_oldest_are_taken_back():
    events, asked = pool_events(FULL, max_told=4), request(8 * BLOCK)
    hashes = asked.block_hashes
    events.stored(asked, (((0, 3),),))
    events.stored(asked, (((0, 1),),))  # told again: not the oldest any more
    assert [type(event) for event in values(events)] == [BlocksStored] * 2
    events.stored(asked, (((3, 6),),))
    stored, removed = values(events)
    assert stored.block_hashes == tuple(hashes[3:6])
    assert removed == BlocksRemoved(stored.place, (hashes[1], hashes[2]))
    events.gone(asked, (((4, 5),),))
    events.reset()
    _, rest = values(events)
    assert set(rest.block_hashes) == {hashes[0], hashes[3], hashes[5]}
    events.reset()
    assert values(events) == []


def test_by_default_hashes_are_published_as_the_engine_publishes_its_own():
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    events, asked = pool_events(FULL), request(3 * BLOCK)
    events.stored(asked, (((1, 3),),))
    events.gone(asked, (((2, 3),),))
    stored, removed = events.take()
    first, second, third = map(maybe_convert_block_hash, asked.block_hashes)
    assert (stored.parent_block_hash, stored.block_hashes, removed.block_hashes) == (first, [second, third], [third])
    assert events.take() == []


def test_the_check_of_the_chain_rejects_a_parent_that_was_only_stored_before():
    """The control of the first test: what a connector that chains its own stores says of blocks that were there."""
    events, asked = pool_events(FULL), request(6 * BLOCK)
    events.stored(asked, (((0, 1), (3, 4)),))
    first, second = values(events)
    assert second.parent_block_hash == asked.block_hashes[2] != first.block_hashes[-1]

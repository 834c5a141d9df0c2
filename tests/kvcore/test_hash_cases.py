"""Names that must differ and names that must not: cases S17, S18 and S19, at every layer that makes a key."""

import json
import os
import subprocess
import sys
from functools import partial
from itertools import combinations
from random import SystemRandom
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.hashing import NO_EXTRAS, Extras, HashAlgorithm, Lora, MultiModal, extra_keys, hash_blocks
from kvcore.keys import BlockKey, format_key, namespace_digest
from kvcore.kv_events import Medium, Place, Prompt, stored_events, untagged
from kvcore.memory_store import MemoryStore
from kvcore.ports import StoreOutcome
from kvcore.types import GroupId
from tests.support import PROJECT

B = 4
TOKENS = tuple(range(3 * B))


# -- S17: an adapter's name equals somebody's salt ---------------------------------------------------------------------

NAMED_ALIKE = {
    "nothing": NO_EXTRAS,
    "adapter X": Extras(lora=Lora("X", "X")),
    "adapter X elsewhere": Extras(lora=Lora("X", "Y")),
    "salt X": Extras(salt="X"),
    "adapter X, salt X": Extras(lora=Lora("X", "X"), salt="X"),
    "adapter Y, salt X": Extras(lora=Lora("Y", "Y"), salt="X"),
    "image X": Extras(items=(MultiModal("X", 0, 1),)),
    "image X, salt X": Extras(items=(MultiModal("X", 0, 1),), salt="X"),
    "adapter X, image X": Extras(lora=Lora("X", "X"), items=(MultiModal("X", 0, 1),)),
}


def local_names(extras):
    """The engine's own block hashes, under each algorithm that needs no package."""
    algorithms = (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR)
    return tuple(tuple(hash_blocks(TOKENS, B, algorithm=algorithm, extras=extras)) for algorithm in algorithms)


def pool_names(extras):
    namespace = namespace_digest({"model": "m"})
    return tuple(format_key(BlockKey(namespace, GroupId(0), 0, h)) for h in hash_blocks(TOKENS, B, extras=extras))


def event_of(extras):
    hashes, lora = tuple(hash_blocks(TOKENS, B, extras=extras)), extras.lora and extras.lora.name
    prompt = Prompt(TOKENS, B, hashes, partial(extra_keys, extras, B), lora)
    return stored_events(prompt, ((0, 3),), Place(Medium.CPU, GroupId(0)))


def event_keys(extras):
    """What a listener has that does not know the hash: the tagged keys of the event."""
    (event,) = event_of(extras)
    return event.extra_keys


LAYERS = {"local": local_names, "pool": pool_names, "event": event_of, "event's extra keys": event_keys}


@pytest.mark.parametrize("layer", LAYERS)
def test_alike_names_of_different_things_name_different_blocks(layer):
    names = {title: LAYERS[layer](extras) for title, extras in NAMED_ALIKE.items()}
    assert [pair for pair in combinations(names, 2) if names[pair[0]] == names[pair[1]]] == []


@pytest.mark.parametrize("block", range(3))
def test_they_differ_in_every_block_that_follows(block):
    hashes = [hash_blocks(TOKENS, B, extras=extras)[block] for extras in NAMED_ALIKE.values()]
    assert len(set(hashes)) == len(hashes)


def test_without_tags_they_are_taken_for_one_another():
    """What vLLM hashed before it tagged (issue 44701), and what it still publishes in its events."""
    bare = {title: untagged(extra_keys(extras, B, (0, 3))) for title, extras in NAMED_ALIKE.items()}
    assert bare["adapter X"][0] == bare["salt X"][0] == ("X",)


# -- S18: the same model folder, another format ------------------------------------------------------------------------

CONFIG = {
    "model": "m",
    "revision": None,
    "quantization": None,
    "dtype": "torch.bfloat16",
    "kv_dtype": "auto",
    "groups": [["FullAttentionSpec", "torch.bfloat16", 16, 8, 128]],
    "hash_block_size": 16,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
}
OTHER = {
    "model": ["M", "m "],
    "revision": ["main", "", "None"],
    "quantization": ["fp8", "awq"],
    "dtype": ["torch.float16", "torch.float32"],
    "kv_dtype": ["fp8", "fp8_e5m2"],
    "groups": [
        [["FullAttentionSpec", "torch.float8_e4m3fn", 16, 8, 128]],
        [["FullAttentionSpec", "torch.bfloat16", 32, 8, 128]],
        [["SlidingWindowSpec", "torch.bfloat16", 16, 8, 128]],
        [["FullAttentionSpec", "torch.bfloat16", 16, 8, 128]] * 2,
        [["FullAttentionSpec", "torch.bfloat16", 16, 81, 28]],
        ["FullAttentionSpec", "torch.bfloat16", 16, 8, 128],
    ],
    "hash_block_size": [8, 32, "16", True],
    "tensor_parallel_size": [2, "1"],
    "pipeline_parallel_size": [2],
    "decode_context_parallel_size": [2],
}
CONFIGS = [CONFIG, *({**CONFIG, name: value} for name, values in OTHER.items() for value in values)]


def cross_hits(namespace_of):
    """Every config writes the same blocks; how many of a config's keys hold what another config wrote."""
    hashes = hash_blocks(TOKENS, B)
    foreign = 0
    for config in CONFIGS:
        store = MemoryStore(SimpleNamespace(now_ns=lambda: 0))
        for other in CONFIGS:
            if other is not config:
                keys = [BlockKey(namespace_of(other), GroupId(0), 0, block_hash) for block_hash in hashes]
                store.put(keys, [bytearray(b"kv")] * len(keys), 10**12)
        own = [BlockKey(namespace_of(config), GroupId(0), 0, block_hash) for block_hash in hashes]
        foreign += store.exists(own, 10**12).count(StoreOutcome.OK)
    return foreign


def test_no_config_finds_what_another_one_wrote():
    assert cross_hits(namespace_digest) == 0


@pytest.mark.parametrize("forgotten", OTHER)
def test_the_check_rejects_a_namespace_that_forgets_a_field(forgotten):
    assert cross_hits(lambda config: namespace_digest({**config, forgotten: None, "x": 0})) > 0


def test_the_check_rejects_a_namespace_that_takes_everything_for_text():
    assert cross_hits(lambda config: namespace_digest({name: str(value) for name, value in config.items()})) > 0


FIELDS = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.booleans() | st.integers(0, 2) | st.text("ab", max_size=2), min_size=1
)


@given(FIELDS, FIELDS)
def test_namespaces_are_equal_exactly_when_the_fields_are(left, right):
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    assert (namespace_digest(left) == namespace_digest(right)) == same


# -- S19: hashes differ between processes ------------------------------------------------------------------------------

SCRIPT = """
from tests.kvcore import test_hash_cases as cases
names = {title: (cases.local_names(extras), cases.pool_names(extras)) for title, extras in cases.NAMED_ALIKE.items()}
print(names, cases.namespace_digest(cases.CONFIG), hash("a"))
"""


def in_a_fresh_interpreter(hash_seed):
    """(all names, namespace, Python's own hash of a text) as another process makes them."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=60)
    names, _, own_hash = done.stdout.strip().rpartition(" ")
    return names, own_hash


def test_names_are_the_same_in_every_process():
    seeds = [str(SystemRandom().randrange(2**32)) for _ in range(3)]
    found = [in_a_fresh_interpreter(seed) for seed in [*seeds, "random"]]
    assert len({names for names, _ in found}) == 1, seeds
    assert len({own_hash for _, own_hash in found}) > 1, "Python's own hash would not do"

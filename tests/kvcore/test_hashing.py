"""Block hashes: chained, incremental, a function of values alone, and vLLM's."""

import hashlib
import json
import os
import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import hashing
from kvcore.errors import InvalidArgument
from kvcore.hashing import (
    DEFAULT_SEED,
    NO_EXTRAS,
    Extras,
    HashAlgorithm,
    Lora,
    MultiModal,
    PromptEmbeds,
    extra_keys,
    hash_blocks,
    none_hash,
)
from tests.support import PROJECT

ALGORITHMS = pytest.mark.parametrize("algorithm", HashAlgorithm, ids=lambda algorithm: algorithm.value)
TOKENS = st.lists(st.integers(0, 200_000), max_size=40)
SIZES = st.integers(1, 6)
X = "adapter-or-salt"
EVERYTHING = Extras(Lora(X, "/a"), (MultiModal("img", 1, 3), MultiModal("img", 5, 6)), X, PromptEmbeds(bytes(96), 8))


def assert_chained(hasher, left, right, block_size):
    """Hashes of one sequence differ, and two sequences share a hash exactly where they share the whole prefix."""
    left_hashes, right_hashes = hasher(left, block_size), hasher(right, block_size)
    assert len(left_hashes) == len(left) // block_size
    assert len(set(left_hashes)) == len(left_hashes)
    for block, (left_hash, right_hash) in enumerate(zip(left_hashes, right_hashes, strict=False)):
        end = (block + 1) * block_size
        assert (left_hash == right_hash) == (left[:end] == right[:end])


@given(TOKENS, TOKENS, TOKENS, SIZES)
def test_a_hash_names_the_block_and_everything_before_it(prefix, left_tail, right_tail, block_size):
    assert_chained(hash_blocks, prefix + left_tail, prefix + right_tail, block_size)


def test_control_hashes_of_single_blocks_are_not_chained():
    def unchained(tokens, block_size):
        return [hash_blocks(tokens[at:], block_size)[0] for at in range(0, len(tokens), block_size)]

    with pytest.raises(AssertionError):
        assert_chained(unchained, [1, 2, 3, 4], [9, 2, 3, 4], 2)


@given(
    TOKENS,
    SIZES,
    st.lists(st.integers(0, 40)),
    st.sampled_from(HashAlgorithm),
    st.sampled_from([NO_EXTRAS, EVERYTHING]),
)
def test_hashing_as_tokens_arrive_is_hashing_at_once(tokens, block_size, cuts, algorithm, extras):
    hashed = []
    for cut in [*sorted(cuts), len(tokens)]:
        hashed += hash_blocks(tokens[:cut], block_size, algorithm=algorithm, extras=extras, hashed=hashed)
    assert hashed == hash_blocks(tokens, block_size, algorithm=algorithm, extras=extras)


@ALGORITHMS
def test_seed_and_algorithm_change_every_hash(algorithm):
    tokens = list(range(8))
    variants = [hash_blocks(tokens, 2, algorithm=a, seed=seed) for a in HashAlgorithm for seed in ("", "0", "1")]
    assert len({block_hash for hashes in variants for block_hash in hashes}) == len(HashAlgorithm) * 3 * 4
    assert hash_blocks(tokens, 2, algorithm=algorithm)[0] != none_hash(algorithm)


@ALGORITHMS
def test_adapter_salt_and_image_of_one_name_stay_apart(algorithm):
    """S17: all pairs differ, from the first block to the last."""
    same_name = [
        Extras(),
        Extras(lora=Lora(X, "/a")),
        Extras(lora=Lora(X, "/b")),
        Extras(lora=Lora("/a", X)),
        Extras(lora=Lora("other", "/a"), salt=X),
        Extras(salt=X),
        Extras(lora=Lora(X, "/a"), salt=X),
        Extras(items=(MultiModal(X, 0, 1),)),
        Extras(items=(MultiModal(X, 1, 1),)),
        Extras(items=(MultiModal(X, 0, 1),), salt=X),
        Extras(lora=Lora(X, "/a"), items=(MultiModal(X, 0, 1),)),
        Extras(embeds=PromptEmbeds(X.encode(), 1)),
    ]
    chains = [hash_blocks([0] * 12, 4, algorithm=algorithm, extras=extras) for extras in same_name]
    for left, right in combinations(chains, 2):
        assert not set(left) & set(right)


def test_extra_keys_have_vllm_s_tags_and_order():
    assert extra_keys(EVERYTHING, 4, (0, 4)) == [
        (("lora", X, "/a"), ("mm", "img", 1), ("cache_salt", X), ("prompt_embeds", sha256(bytes(32)))),
        (("lora", X, "/a"), ("mm", "img", 1), ("prompt_embeds", sha256(bytes(32)))),
        (("lora", X, "/a"), ("mm", "img", -3), ("prompt_embeds", sha256(bytes(32)))),
        (("lora", X, "/a"), ("prompt_embeds", sha256(b""))),
    ]
    assert extra_keys(EVERYTHING, 4, (1, 3)) == extra_keys(EVERYTHING, 4, (0, 4))[1:3]
    assert extra_keys(Extras(items=(MultiModal("img", 5, 2),)), 4, (0, 3)) == [None, (("mm", "img", 1),), None]


def sha256(data):
    return hashlib.sha256(data).digest()


ADAPTED = Extras(Lora("adapter", "/a"), (MultiModal("img", 1, 5),), "salt")


@pytest.mark.parametrize(
    ("algorithm", "seed", "extras", "last_hash"),
    [
        ("sha256", DEFAULT_SEED, NO_EXTRAS, "bee96bce54f5fcaba04c4a3fc2491b30b48e29dbbd38a327d41bc1f76b956dde"),
        ("sha256", "42", ADAPTED, "b39b65d826ee1a547aa98a47a5952c08ba2eedbfbff7795e8959b994cc641ec3"),
        ("sha256_cbor", DEFAULT_SEED, NO_EXTRAS, "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1"),
        ("sha256_cbor", "42", ADAPTED, "e7edd3c33afcad1bebe6ef7c1b6db670cc2660aed45ace10d1ba6ca66e59f10c"),
    ],
)
def test_second_block_hash_of_tokens_1_to_8_is_vllm_s(algorithm, seed, extras, last_hash):
    """Values from vLLM 0.32's get_request_block_hasher, for machines without it (tests/differential has the rest)."""
    hashes = hash_blocks(range(1, 9), 4, algorithm=HashAlgorithm(algorithm), seed=seed, extras=extras)
    assert [block_hash.hex() for block_hash in hashes[1:]] == [last_hash]


@ALGORITHMS
def test_one_object_in_two_places_hashes_like_two_equal_ones(algorithm):
    """Pickle writes a repeated object as a reference; a hash must not tell who made the strings."""
    one, other = (bytes([n]).join([b"same", b"text"]).decode() for n in (45, 45))
    assert one == other
    assert one is not other
    shared = Extras(Lora(one, one), (MultiModal(one, 0, 2), MultiModal(one, 2, 2)), one)
    apart = Extras(Lora(one, other), (MultiModal(one, 0, 2), MultiModal(other, 2, 2)), other)
    assert hash_blocks([1] * 8, 4, algorithm=algorithm, extras=shared) == hash_blocks(
        [1] * 8, 4, algorithm=algorithm, extras=apart
    )


SCRIPT = """
import json
from kvcore.hashing import *
from kvcore.keys import namespace_digest
extras = Extras(Lora("a", "/a"), (MultiModal("img", 1, 3), MultiModal("img", 5, 6)), "salt", PromptEmbeds(bytes(96), 8))
print(json.dumps([
    [h.hex() for h in hash_blocks(range(40), 4, algorithm=algorithm, seed="42", extras=e)]
    for algorithm in HashAlgorithm for e in (NO_EXTRAS, extras)
] + [namespace_digest({"b": 1, "a": ["x", None]})]))
"""


def answers_of_fresh_interpreters(script):
    """What four interpreters with four hash seeds of their own print."""
    environments = [
        os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(PROJECT)}
        for hash_seed in ("0", "1", "4294967295", "random")
    ]
    return [
        subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
        for env in environments
    ]


def test_fresh_interpreters_agree():
    """S19: the interpreter's own hash seed is not ours."""
    (answer,) = set(answers_of_fresh_interpreters(SCRIPT))
    assert [len(hashes) for hashes in json.loads(answer)] == [10] * 2 * len(HashAlgorithm) + [16]


def test_control_the_interpreters_do_differ():
    assert len(set(answers_of_fresh_interpreters("print(hash('a'))"))) > 1


@given(TOKENS, SIZES, st.integers(1, 5), st.sampled_from([NO_EXTRAS, EVERYTHING]))
def test_a_hash_that_looks_ahead_waits_for_those_tokens_and_depends_on_them(tokens, block_size, ahead, extras):
    hashes = hash_blocks(tokens, block_size, lookahead_tokens=ahead, extras=extras)
    assert len(hashes) == max(0, len(tokens) - ahead) // block_size
    if hashes:
        last = len(hashes) * block_size + ahead - 1
        changed = [*tokens[:last], tokens[last] + 1, *tokens[last + 1 :]]
        assert hash_blocks(changed, block_size, lookahead_tokens=ahead, extras=extras)[-1] != hashes[-1]


def test_xxhash_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    monkeypatch.setattr(hashing, "_digest", hashing._digest.__wrapped__)
    assert hash_blocks([1], 1)
    with pytest.raises(InvalidArgument, match=r"kvtwin\[xxhash\]"):
        hash_blocks([1], 1, algorithm=HashAlgorithm.XXHASH)


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_holds_a_token(block_size):
    with pytest.raises(InvalidArgument, match="block_size"):
        hash_blocks([1, 2], block_size)


@pytest.mark.parametrize("items", [((0, 3), (2, 2)), ((4, 2), (0, 2))], ids=["overlap", "out of order"])
def test_items_are_sorted_and_apart(items):
    with pytest.raises(InvalidArgument, match="items"):
        Extras(items=tuple(MultiModal("img", offset, length) for offset, length in items))

"""Keys: the text form loses nothing, and a namespace changes with everything it was made from."""

import re
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.errors import InvalidArgument
from kvcore.keys import BlockHash, BlockKey, Namespace, format_key, namespace_digest, parse_key
from kvcore.types import GroupId

# Small alphabets, so that two drawn keys are often equal in most parts.
KEYS = st.builds(
    BlockKey,
    namespace=st.text("0123gr", min_size=1, max_size=3).map(Namespace),
    group=st.integers(0, 12).map(GroupId),
    rank=st.integers(0, 12),
    block_hash=st.binary(min_size=1, max_size=3).map(BlockHash),
)
BIG_KEY = BlockKey(namespace_digest({"model": "m"}), GroupId(31), 127, BlockHash(bytes(range(32))))


@given(KEYS)
@example(BIG_KEY)
def test_a_key_survives_its_text_form(key):
    assert parse_key(format_key(key)) == key


def test_text_form_suits_a_pool_and_a_file_system():
    text = format_key(BIG_KEY)
    assert re.fullmatch(r"[0-9a-z-]+", text)
    assert len(text) <= 100


def collisions(text_of, keys):
    """Pairs of different keys with one text."""
    return [(a, b) for a, b in combinations(set(keys), 2) if text_of(a) == text_of(b)]


@given(st.lists(KEYS, min_size=2, max_size=20))
def test_different_keys_have_different_texts(keys):
    assert not collisions(format_key, keys)


@pytest.mark.parametrize(
    "text_of",
    [
        lambda key: f"{key.namespace}-g{key.group}-{key.block_hash.hex()}",
        lambda key: f"{key.namespace}{key.group}{key.rank}{key.block_hash.hex()}",
    ],
    ids=["forgets the rank", "no separators"],
)
def test_control_a_text_form_that_mixes_keys_up_is_caught(text_of):
    h = BlockHash(b"\1")
    keys = [BlockKey(Namespace(n), GroupId(g), r, h) for n in ("1", "11") for g in (1, 11) for r in (1, 11)]
    assert collisions(text_of, keys)
    assert not collisions(format_key, keys)


@given(KEYS.map(format_key), st.data())
def test_only_what_format_key_writes_can_be_parsed(text, data):
    """One character replaced, added or dropped: either an error, or another key's own text."""
    at = data.draw(st.integers(0, len(text)))
    edited = text[:at] + data.draw(st.sampled_from(["", "0", "A", "-", "g", "\n", "٣", " "])) + text[at + 1 :]
    try:
        key = parse_key(edited)
    except InvalidArgument:
        return
    assert format_key(key) == edited


@pytest.mark.parametrize(
    "text", ["", "a-g0-r0-", "a-g00-r0-ab", "a-g0-r-1-ab", "a-g0-r0-AB", "a-g0-r0-abc", "-g0-r0-ab"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(InvalidArgument, match="format_key"):
        parse_key(text)


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "my model"},
        {"namespace": ""},
        {"namespace": "é"},
        {"group": -1},
        {"rank": -1},
        {"block_hash": b""},
    ],
    ids=str,
)
def test_a_key_without_a_text_form_is_refused(change):
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        format_key(BIG_KEY._replace(**change))


# S18: everything that changes the meaning of a block's bytes.
FIELDS = {
    "model": "Qwen/Qwen3-8B",
    "revision": "b968826d9c46dd6066d109eabc6255188de91218",
    "model_dtype": "bfloat16",
    "kv_dtype": "auto",
    "quantization": None,
    "block_size": 16,
    "groups": [["full", 8, 128], ["window", 8, 128, 1024]],
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "hash_seed": "0",
    "epoch": 0,
}
CHANGED = {
    "model": "Qwen/Qwen3-8B-FP8",
    "revision": None,
    "model_dtype": "float32",
    "kv_dtype": "fp8",
    "quantization": "None",
    "block_size": "16",
    "groups": [["full", 8, 128, "window", 8, 128, 1024]],
    "tensor_parallel": 2,
    "pipeline_parallel": True,
    "hash_seed": 0,
    "epoch": 1,
}


@pytest.mark.parametrize("name", FIELDS)
def test_one_changed_field_is_another_namespace(name):
    assert namespace_digest(FIELDS | {name: CHANGED[name]}) != namespace_digest(FIELDS)
    assert namespace_digest({k: v for k, v in FIELDS.items() if k != name}) != namespace_digest(FIELDS)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.text('01,"]', max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
FIELD_SETS = st.dictionaries(st.text('ab":', max_size=2), PLAIN, min_size=1, max_size=3)


def tagged(value):
    """`value` with its types, because 1 == True in Python."""
    return [tagged(item) for item in value] if isinstance(value, list) else (type(value).__name__, value)


@given(FIELD_SETS, FIELD_SETS)
def test_digests_are_equal_exactly_when_the_fields_are(left, right):
    same = {k: tagged(v) for k, v in left.items()} == {k: tagged(v) for k, v in right.items()}
    assert (namespace_digest(left) == namespace_digest(right)) == same


@given(FIELD_SETS, st.randoms(use_true_random=False))
def test_order_and_kind_of_sequence_do_not_matter(fields, rng):
    names = list(fields)
    rng.shuffle(names)
    shuffled = {name: tuple(fields[name]) if isinstance(fields[name], list) else fields[name] for name in names}
    assert namespace_digest(shuffled) == namespace_digest(fields)


def test_a_digest_is_a_namespace_that_can_be_written():
    assert re.fullmatch("[0-9a-f]{16}", namespace_digest(FIELDS))
    assert parse_key(format_key(BIG_KEY)).namespace == BIG_KEY.namespace


@pytest.mark.parametrize("fields", [{}, {"a": 1.0}, {"a": {"b": 1}}, {"a": [b"x"]}, {1: "a"}, {"a": {1}}], ids=str)
def test_fields_without_one_plain_meaning_are_refused(fields):
    with pytest.raises(InvalidArgument):
        namespace_digest(fields)

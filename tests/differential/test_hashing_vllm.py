"""Our block hashes against the installed vLLM's own: equal on random requests, unequal for hashers with one flaw."""

import inspect
import os
import random
from dataclasses import dataclass, replace

import pytest

from kvcore import hashing
from kvcore.hashing import DEFAULT_SEED, Extras, HashAlgorithm, Lora, MultiModal, PromptEmbeds, hash_blocks

pytestmark = pytest.mark.engine

CASES_PER_ALGORITHM = 5_000  # 20,000 in all
XXHASH = {HashAlgorithm.XXHASH, HashAlgorithm.XXHASH_CBOR}
ALGORITHMS = pytest.mark.parametrize("algorithm", HashAlgorithm, ids=lambda algorithm: algorithm.value)
NAMES = ["X", "adapter", "mm", "lora", "/adapters/é", "x" * 300]  # short and shared on purpose: see S17


@dataclass(frozen=True)
class Case:
    """One request: its prompt, then `later` tokens that arrive in pieces. No seed: PYTHONHASHSEED is not set."""

    prompt: list[int]
    later: list[list[int]]
    block_size: int
    seed: str | None
    extras: Extras


def random_items(rng, num_tokens):
    """Up to six items, often adjacent, often longer than a block, sometimes beyond the last full block."""
    items, offset = [], rng.randint(0, 8)
    for _ in range(rng.randint(0, 6)):
        length = rng.randint(1, 25)
        items.append(MultiModal(rng.choice(NAMES), offset, length))
        offset += length + rng.choice([0, 0, 1, 7])
    return tuple(item for item in items if item.offset < num_tokens)


def random_extras(rng, num_tokens):
    return Extras(
        lora=rng.choice([None, Lora(rng.choice(NAMES), rng.choice(NAMES))]),
        items=random_items(rng, num_tokens) if rng.random() < 0.6 else (),
        salt=rng.choice(["", *NAMES]),
    )


def random_case(rng):
    prompt = [rng.randrange(rng.choice([3, 300, 200_000])) for _ in range(rng.randint(1, 90))]
    later = [[rng.randrange(200_000) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(0, 4))]
    extras = random_extras(rng, len(prompt))
    if rng.random() < 0.15:
        row_size_bytes = 4 * rng.randint(1, 3)
        extras = replace(extras, embeds=PromptEmbeds(rng.randbytes(row_size_bytes * len(prompt)), row_size_bytes))
        prompt = [0] * len(prompt)
    return Case(prompt, later, rng.choice([1, 2, 3, 4, 8, 16, 32]), rng.choice([None, "0", "1", "random", ""]), extras)


def cases(count):
    rng = random.Random(20_260_506)
    return [random_case(rng) for _ in range(count)]


def fresh(text):
    """An equal string that is another object, as every string of a request that came as a message."""
    return (text + " ")[:-1]


def vllm_request(case, block_hasher):
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    extras, embeds = case.extras, case.extras.embeds
    rows = embeds and torch.frombuffer(bytearray(embeds.rows), dtype=torch.float32).reshape(len(case.prompt), -1)
    return Request(
        request_id="0",
        prompt_token_ids=None if embeds else case.prompt,
        prompt_embeds=rows,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=extras.lora and LoRARequest(fresh(extras.lora.name), 1, fresh(extras.lora.path)),
        mm_features=[
            MultiModalFeatureSpec(None, "image", fresh(item.identifier), PlaceholderRange(item.offset, item.length))
            for item in extras.items
        ],
        cache_salt=fresh(extras.salt) or None,
        block_hasher=block_hasher,
    )


@pytest.fixture
def vllm_hashes(monkeypatch):
    """(case, algorithm) -> vLLM's hashes of it, hashed as the tokens arrive."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", os.environ["PYTHONHASHSEED"])  # so that it is put back

    def hashes(case, algorithm, **options):
        hash_fn = get_hash_fn_by_name(algorithm.value)
        os.environ.pop("PYTHONHASHSEED", None)
        if case.seed is not None:
            os.environ["PYTHONHASHSEED"] = case.seed
        kv_cache_utils.init_none_hash(hash_fn)
        request = vllm_request(case, kv_cache_utils.get_request_block_hasher(case.block_size, hash_fn, **options))
        for tokens in case.later:
            request.append_output_token_ids(tokens)
        return request.block_hashes

    return hashes


def seeded(case, algorithm):
    """With xxHash vLLM draws a seed of its own when it is given none."""
    return replace(case, seed="0") if algorithm in XXHASH and case.seed is None else case


def our_hashes(case, algorithm, lookahead_tokens=0):
    """Ours of the same case, also as the tokens arrive."""
    tokens, hashed = list(case.prompt), []
    for more in [[], *case.later]:
        tokens += more
        hashed += hash_blocks(
            tokens,
            case.block_size,
            algorithm=algorithm,
            seed=DEFAULT_SEED if case.seed is None else case.seed,
            extras=case.extras,
            hashed=hashed,
            lookahead_tokens=lookahead_tokens,
        )
    return hashed


@ALGORITHMS
def test_hashes_equal_vllm_s(algorithm, vllm_hashes):
    num_blocks = 0
    for case in cases(CASES_PER_ALGORITHM):
        case = seeded(case, algorithm)
        expected = vllm_hashes(case, algorithm)
        assert our_hashes(case, algorithm) == expected, case
        num_blocks += len(expected)
    assert num_blocks > 10 * CASES_PER_ALGORITHM


def seeded_cases(count, algorithm):
    return [seeded(case, algorithm) for case in cases(count)]


def test_hashes_that_look_ahead_equal_those_of_vllm_0_33(vllm_hashes):
    from vllm.v1.core import kv_cache_utils

    if "num_hash_lookahead_tokens" not in inspect.signature(kv_cache_utils.get_request_block_hasher).parameters:
        assert LOOKED_AHEAD == {ahead: last_hash(ahead) for ahead in LOOKED_AHEAD}
        return
    assert LOOKED_AHEAD == {
        ahead: vllm_hashes(AHEAD, HashAlgorithm.SHA256, num_hash_lookahead_tokens=ahead)[-1].hex()
        for ahead in LOOKED_AHEAD
    }
    rng = random.Random(33)
    for case in cases(CASES_PER_ALGORITHM):
        ahead = rng.randint(1, 5)
        expected = vllm_hashes(case, HashAlgorithm.SHA256, num_hash_lookahead_tokens=ahead)
        assert our_hashes(case, HashAlgorithm.SHA256, ahead) == expected, (case, ahead)


def last_hash(lookahead_tokens):
    return our_hashes(AHEAD, HashAlgorithm.SHA256, lookahead_tokens)[-1].hex()


AHEAD = Case(list(range(1, 13)), [], 4, "42", Extras(Lora("adapter", "/a"), (MultiModal("img", 9, 2),), "salt"))
LOOKED_AHEAD = {
    1: "5e77b89a1702d8cd5b9f0a1d3bf58928c125dc26183690f0142698b0b174d8c5",
    2: "5be5c2bbf9777d4812965b48abc40f112d212bf33b0fc20156c9d5c5b6d9a3f0",
    3: "eb8dfb6d5c4e2c99bd9f0387003828691e06d4c5c2809a031399acf99dc0965c",
}
"""By lookahead, the last hash of `AHEAD`, as vLLM 0.33's get_request_block_hasher gives it."""

FLAWS = {
    "forgets the offset": lambda keys: [key[:2] if key[0] == "mm" else key for key in keys],
    "forgets the tag": lambda keys: [key[1:] for key in keys],
    "forgets the adapter's path": lambda keys: [key[:2] if key[0] == "lora" else key for key in keys],
    "forgets the salt": lambda keys: [key for key in keys if key[0] != "cache_salt"],
    "puts the salt first": lambda keys: sorted(keys, key=lambda key: key[0]),
    "keeps one item of a block": lambda keys: [
        key for i, key in enumerate(keys) if key[0] not in {k[0] for k in keys[:i]}
    ],
    "writes () for none": lambda keys: keys,
}


@ALGORITHMS
@pytest.mark.parametrize("flaw", FLAWS)
def test_control_a_flawed_hasher_differs_from_vllm(flaw, algorithm, vllm_hashes, monkeypatch):
    right = hashing.extra_keys

    def flawed(*arguments):
        changed = [tuple(FLAWS[flaw](keys or ())) for keys in right(*arguments)]
        return changed if flaw == "writes () for none" else [keys or None for keys in changed]

    monkeypatch.setattr(hashing, "extra_keys", flawed)
    assert any(our_hashes(case, algorithm) != vllm_hashes(case, algorithm) for case in seeded_cases(100, algorithm))


@ALGORITHMS
def test_control_another_seed_differs_from_vllm(algorithm, vllm_hashes):
    case = Case([1, 2, 3, 4], [], 2, "7", Extras())
    assert our_hashes(case, algorithm) == vllm_hashes(case, algorithm)
    assert not set(our_hashes(replace(case, seed="8"), algorithm)) & set(vllm_hashes(case, algorithm))


def test_equal_to_an_engine_that_got_the_request_as_a_message(vllm_hashes):
    """Strings that were one object at the caller arrive as several, and vLLM's sha256 pickles them so."""
    from vllm.utils.hashing import sha256
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    name = "adapter-or-salt"
    sent = ("lora", name, name), ("cache_salt", name)
    received = MsgpackDecoder(tuple[tuple[str, str, str], tuple[str, str]]).decode(MsgpackEncoder().encode(sent))
    assert sent == received
    assert sha256(sent) != sha256(received), "vLLM hashes by value now: hashing._copy can go"
    case = Case([1, 2], [], 2, None, Extras(lora=Lora(name, name), salt=name))
    assert our_hashes(case, HashAlgorithm.SHA256) == vllm_hashes(case, HashAlgorithm.SHA256)
    assert our_hashes(case, HashAlgorithm.SHA256) == [
        sha256((hashing.none_hash(HashAlgorithm.SHA256), (1, 2), received))
    ]

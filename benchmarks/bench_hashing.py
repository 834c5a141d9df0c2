"""Time per token: block hashes of kvcore against the hasher of the installed vLLM, on the same requests, in one run.

    python benchmarks/bench_hashing.py [--tokens 131072] [--block-size 16] [--rounds 9]

A prompt is hashed at once; a growing sequence, block by block as a running request's is. Rounds alternate; the median
of the pairs' ratios counts. Both must give the same hashes.
"""

import argparse
import os
import random
import statistics
from time import perf_counter_ns
from types import SimpleNamespace

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["PYTHONHASHSEED"] = SEED = "0"

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvcore.hashing import NO_EXTRAS, Extras, HashAlgorithm, Lora, hash_blocks

GROWING_BLOCKS = 200


def request(tokens, extras):
    """As much of vLLM's Request as its hasher reads."""
    lora = extras.lora and SimpleNamespace(lora_name=extras.lora.name, lora_path=extras.lora.path)
    return SimpleNamespace(
        block_hashes=[],
        num_tokens=len(tokens),
        all_token_ids=tokens,
        mm_features=[],
        lora_request=lora,
        cache_salt=extras.salt or None,
        prompt_embeds=None,
    )


class Vllm:
    def __init__(self, algorithm, block_size):
        hash_fn = get_hash_fn_by_name(algorithm.value)
        kv_cache_utils.init_none_hash(hash_fn)
        self.hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_fn)

    def prompt(self, tokens, extras):
        return self.hasher(request(tokens, extras))

    def growing(self, prefixes, extras):
        subject = request(prefixes[-1], extras)
        for prefix in prefixes:
            subject.num_tokens = len(prefix)
            subject.block_hashes += self.hasher(subject)
        return subject.block_hashes


class Kvcore:
    def __init__(self, algorithm, block_size):
        self.algorithm, self.block_size = algorithm, block_size

    def prompt(self, tokens, extras):
        return hash_blocks(tokens, self.block_size, algorithm=self.algorithm, seed=SEED, extras=extras)

    def growing(self, prefixes, extras):
        algorithm, size, hashed = self.algorithm, self.block_size, []
        for prefix in prefixes:
            hashed += hash_blocks(prefix, size, algorithm=algorithm, seed=SEED, extras=extras, hashed=hashed)
        return hashed


def timed(function, *arguments):
    start = perf_counter_ns()
    result = function(*arguments)
    return perf_counter_ns() - start, result


def compare(label, ours, theirs, rounds, num_tokens):
    pairs = []
    for _ in range(rounds):
        our_ns, our_hashes = timed(*ours)
        their_ns, their_hashes = timed(*theirs)
        assert our_hashes == their_hashes
        pairs.append((our_ns, their_ns))
    our_ns, their_ns = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(their_ns / our_ns for our_ns, their_ns in pairs)
    print(f"{label:<30}{our_ns / num_tokens:>9.1f}{their_ns / num_tokens:>9.1f}{ratio:>9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()

    rng, size = random.Random(0), arguments.block_size
    tokens = [rng.randrange(150_000) for _ in range(arguments.tokens)]
    prefixes = [tokens[: blocks * size] for blocks in range(1, GROWING_BLOCKS + 1)]
    print(
        f"{arguments.tokens} tokens, blocks of {size}; ns per token of kvcore, of vLLM, and how much longer vLLM takes"
    )
    for algorithm in HashAlgorithm:
        ours, theirs = Kvcore(algorithm, size), Vllm(algorithm, size)
        for name, extras in (("", NO_EXTRAS), (", adapter and salt", Extras(Lora("adapter", "/a"), salt="salt"))):
            prompt = (ours.prompt, tokens, extras), (theirs.prompt, tokens, extras)
            compare(f"{algorithm.value}{name}", *prompt, arguments.rounds, len(tokens))
        growing = (ours.growing, prefixes, NO_EXTRAS), (theirs.growing, prefixes, NO_EXTRAS)
        compare(f"{algorithm.value}, growing", *growing, arguments.rounds, GROWING_BLOCKS * size)


if __name__ == "__main__":
    main()

"""The simulator's side of the seam: a fleet of engines like the real ones, serving the same token sequences."""

from dataclasses import dataclass
from itertools import count

import numpy as np

from kvcore.hashing import HashAlgorithm, hash_blocks
from kvsim.clock import PS_PER_S
from kvsim.run import simulation
from kvsim.scenario import load
from kvsim.workload.prefix_tree import PrefixTree
from kvsim.workload.trace import Trace

HASH_SEED = "0"
"""PYTHONHASHSEED of the real engines."""


@dataclass(frozen=True)
class Served:
    """What was decided for one request; keys are (group, block hash in hex)."""

    local_hit_len: int
    external_hit_len: int
    granted_len: int
    loaded: frozenset
    stored: frozenset


def serve(prompts, outputs, num_engines, block_size, num_gpu_blocks, gap_s=10):
    """Simulate the requests one after the other, `gap_s` apart, round robin over the engines."""
    overrides = [
        f"cluster.instances={num_engines}",
        f"engine.block_size={block_size}",
        f"engine.num_gpu_blocks={num_gpu_blocks}",
    ]
    run = simulation(load("pool-16", overrides), trace_of(prompts, outputs, block_size, gap_s))
    run.run()
    return [
        _served(sequence, chain(prompt + output, block_size))
        for sequence, prompt, output in zip(run.cluster.sequences, prompts, outputs, strict=True)
    ]


def chain(tokens, block_size):
    """The hash of every full block of a sequence, as the engines compute it."""
    return hash_blocks(tokens, block_size, algorithm=HashAlgorithm.SHA256, seed=HASH_SEED)


def trace_of(prompts, outputs, block_size, gap_s):
    """A trace whose streams say exactly which blocks of prompts and answers are equal."""
    tree, streams = PrefixTree(count()), []
    for prompt, output in zip(prompts, outputs, strict=True):
        hashes = chain(prompt + output, block_size)
        streams.append(tree.follow(np.array([int.from_bytes(h[:8], "big") for h in hashes], dtype=np.uint64)))
    fresh = count(1 << 40)
    n = len(prompts)
    offsets, names, ends, output_streams = [0], [], [], []
    for prompt, runs in zip(prompts, streams, strict=True):
        start = 0
        for stream, end_block in runs:
            end = min(end_block * block_size, len(prompt))
            if end > start:
                names.append(stream)
                ends.append(end)
                start = end
        if start < len(prompt):
            names.append(next(fresh))
            ends.append(len(prompt))
        offsets.append(len(names))
        output_streams.append(runs[-1][0] if runs else next(fresh))
    columns = {
        "arrival_ps": [i * gap_s * PS_PER_S for i in range(n)],
        "after": range(n),
        "delay_ps": [0] * n,
        "session": range(n),
        "input_len": map(len, prompts),
        "output_len": map(len, outputs),
        "output_stream": output_streams,
        "num_granules": [len(prompt) // block_size for prompt in prompts],
        "segment_offset": offsets,
        "segment_stream": names,
        "segment_end": ends,
    }
    arrays = {name: np.array(list(values), dtype=np.int64) for name, values in columns.items()}
    return Trace(name="seam", format="tokens", granule_len=block_size, **arrays)


def _served(sequence, hashes):
    made = sequence.kv.decisions
    return Served(
        made.local_hit_len,
        made.external_hit_len,
        made.granted_len,
        _keys(made.loaded, hashes),
        _keys(made.stored, hashes),
    )


def _keys(blocks, hashes):
    return frozenset(
        (group, hashes[block].hex()) for group, runs in enumerate(blocks) for a, b in runs for block in range(a, b)
    )

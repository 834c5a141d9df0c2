"""Retrieval-augmented generation: questions over chunks that a retriever picks, some far more often than others.

Sources
- Chunks: 800 tokens, 20 to a prompt: what OpenAI's file search takes by default (API reference of vector stores,
  `max_chunk_size_tokens`, and of `max_num_results` for gpt-4 models; read 2026-11). Others: 1,024 tokens in Vertex
  AI's RAG Engine (documentation of 2025-11-07), 1,024 and 2 to a prompt in LlamaIndex (`constants.py`).
- Popularity: 3 % of the documents are in 60 % of the retrievals (RAGCache, Jin et al., arXiv 2404.12457, 2024-04).
  The law is Zipf's with the exponent that gives this for the number of chunks there are.
- Question: 100 tokens, RAGCache's request before documents are added to it.
- Answers: as in `kvsim.workload.chat` (WildChat).

Chosen: 10,000 chunks, and the system prompt of the chat. The chunks of a prompt are different ones. In order of
relevance any of them may be first, so a prefix is seldom shared: a study of RAG workloads finds 43 % of chunks seen
before and 11 % of them at the same place of the same prefix (Chunk-Level KV Cache Reuse for Efficient RAG Serving,
2026). In order of popularity more is shared, which is what that study's design does. What is drawn is stratified
over all retrievals.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from kvcore.errors import require
from kvsim.workload.agentic import COMMON_STREAM, GRANULE_LEN, random_stream
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.chat import ANSWER
from kvsim.workload.fields import MAX_TOKENS
from kvsim.workload.quantiles import Floats, falling_root, ranks, stratified
from kvsim.workload.trace import Trace

FORMAT = "rag"
MAX_RETRIEVALS = 20_000_000
POPULAR_CHUNKS, POPULAR_RETRIEVALS = 0.03, 0.60
MAX_EXPONENT = 4.0

Order: TypeAlias = Literal["relevance", "popularity"]
Chosen: TypeAlias = npt.NDArray[np.int64]
"""Chunks by rank of popularity, one row a request."""


@dataclass(frozen=True, slots=True)
class Rag:
    """Shape of the workload; lengths in tokens."""

    requests: int = 1_000
    chunks: int = 10_000
    """Of the whole corpus."""
    chunk_len: int = 800
    top_k: int = 20
    """Chunks of a prompt."""
    order: Order = "relevance"
    system_len: int = 500
    """First tokens of every prompt, the same for all."""
    question_len: int = 100

    def __post_init__(self) -> None:
        for name in ("requests", "chunks", "chunk_len", "top_k", "question_len"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.system_len >= 0, "system_len", self.system_len, "at least 0")
        require(
            self.top_k <= max(1, self.chunks // 10), "top_k", self.top_k, f"at most a tenth of {self.chunks} chunks"
        )
        bound = MAX_RETRIEVALS // self.top_k
        require(self.requests <= bound, "requests", self.requests, f"at most {bound}: {MAX_RETRIEVALS} retrievals")
        longest = self.system_len + self.top_k * self.chunk_len + self.question_len
        require(longest < MAX_TOKENS // 2, "prompt", longest, "less than 2**31 tokens")
        require(self.order in get_args(Order), "order", self.order, " or ".join(get_args(Order)))


def generate(shape: Rag, seed: int = 0) -> Trace:
    """The same trace for the same shape and seed; every request is a session by itself, and all start at once."""
    builder, streams = TraceBuilder(), _Streams(shape.system_len)
    answers = np.maximum(np.rint(ANSWER.at(stratified(shape.requests, random_stream(seed, "answers")))), 1).astype(int)
    for request, (chunks, answer_len) in enumerate(zip(retrieved(shape, seed).tolist(), answers.tolist(), strict=True)):
        builder.start(0, None, 0, request)
        segments = streams.of(chunks, shape.chunk_len)
        own_stream = streams.fresh()
        input_len = shape.system_len + shape.top_k * shape.chunk_len + shape.question_len
        builder.hold(input_len, answer_len, [*segments, (own_stream, input_len)], own_stream, input_len // GRANULE_LEN)
    return builder.build(f"rag-{shape.requests}", FORMAT, GRANULE_LEN)


def retrieved(shape: Rag, seed: int) -> Chosen:
    """The chunks of each request, in the order of its prompt."""
    random = random_stream(seed, "retrievals")
    held = np.cumsum(popularity(shape.chunks))
    places = ranks(shape.requests * shape.top_k, random).reshape(shape.requests, shape.top_k)
    chosen: Chosen = np.minimum(np.searchsorted(held, places), shape.chunks - 1)
    while len(twice := np.flatnonzero((np.diff(np.sort(chosen, axis=1), axis=1) == 0).any(axis=1))):
        chosen[twice] = _other(chosen[twice], held, random)
    return np.sort(chosen, axis=1) if shape.order == "popularity" else chosen


def _other(chosen: Chosen, held: Floats, random: np.random.Generator) -> Chosen:
    """Each chunk that stands in its row already is drawn again."""
    for row in chosen:
        _, first = np.unique(row, return_index=True)
        again = np.setdiff1d(np.arange(len(row)), first)
        row[again] = np.minimum(np.searchsorted(held, random.random(len(again))), len(held) - 1)
    return chosen


def popularity(chunks: int) -> Floats:
    """The share of retrievals of each chunk, the most popular first: Zipf's law that gives the published share."""
    log_rank = np.log(np.arange(1, chunks + 1))
    popular = max(1, round(POPULAR_CHUNKS * chunks))

    def shares(exponent: float) -> Floats:
        weights: Floats = np.exp(-exponent * log_rank)
        weights /= weights.sum()
        return weights

    exponent = falling_root(lambda s: POPULAR_RETRIEVALS - float(shares(s)[:popular].sum()), 0.0, MAX_EXPONENT)
    return shares(exponent)


class _Streams:
    """Names of chunks by all that stands before them: two prompts share what they begin with alike."""

    def __init__(self, system_len: int) -> None:
        self._system_len = system_len
        self._of: dict[tuple[int, int], int] = {}
        self._last = COMMON_STREAM

    def fresh(self) -> int:
        """A stream that nothing else is in."""
        self._last += 1
        return self._last

    def of(self, chunks: list[int], chunk_len: int) -> list[tuple[int, int]]:
        """(stream, end) of system prompt and chunks."""
        segments = [(COMMON_STREAM, self._system_len)] if self._system_len else []
        stream, end = COMMON_STREAM, self._system_len
        for chunk in chunks:
            key = (stream, chunk)
            stream = self._of.get(key) or self._of.setdefault(key, self.fresh())
            end += chunk_len
            segments.append((stream, end))
        return segments

"""Long documents: readers who ask one question after the other about the same text.

Sources
- Documents and questions: the Wikipedia part of LooGLE (Li et al., arXiv 2311.04939, 2023-11) as Strata (OSDI 2026,
  table 1) serves it: 105 documents, 2,410 questions (23 a document), prompts of 21,613 tokens and answers of 15.6
  on average. LooGLE as a whole: 776 documents of 19,367 words. Others to set: NarrativeQA in the same table, 50
  documents, 1,461 questions (29), 54,797 and 13.0; vLLM's benchmark_long_document_qa_throughput.py, 8 documents of
  20,000, asked twice, answers of 10.
- Pause between questions: exponential with a mean of 60 s, as Pensieve (Yu et al., EuroSys 2025) and Strata think.

Chosen: a question has 50 tokens; document lengths are lognormal around their mean with deviation 0.5 of the
logarithm (0: all alike), as only the mean is published; an answer's are alike. Prompts hold document and question,
as LooGLE asks them, or what was said before as well. Lengths and pauses are stratified.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from kvcore.errors import require
from kvsim.workload.agentic import COMMON_STREAM, GRANULE_LEN, random_stream
from kvsim.workload.builder import TraceBuilder
from kvsim.workload.fields import MAX_SPAN_S, MAX_TOKENS, seconds_to_ps
from kvsim.workload.quantiles import LogNormal, ranks, stratified
from kvsim.workload.trace import Trace

FORMAT = "long-document"
MAX_REQUESTS = 1_000_000
MAX_SPREAD = 2.0

Keeps: TypeAlias = Literal["document", "conversation"]


@dataclass(frozen=True, slots=True)
class LongDocument:
    """Shape of the workload; lengths in tokens."""

    documents: int = 105
    document_len: int = 21_563
    """Mean: of the published prompt, what is not question."""
    length_spread: float = 0.5
    """Standard deviation of the logarithm of a document's length."""
    questions: int = 23
    """A reader's, about one document."""
    readers: int = 1
    """Of each document, each a session."""
    question_len: int = 50
    output_len: int = 16
    keeps: Keeps = "document"
    """What a reader's next prompt holds before its question: the document, or all that was said as well."""
    pause_s: float = 60.0
    """Mean time from an answer to the next question."""
    system_len: int = 0
    """First tokens of every prompt, the same for all."""

    def __post_init__(self) -> None:
        for name in ("documents", "document_len", "questions", "readers", "question_len"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("output_len", "system_len"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        requests = self.documents * self.readers * self.questions
        require(requests <= MAX_REQUESTS, "documents x readers x questions", requests, f"at most {MAX_REQUESTS}")
        require(0 <= self.length_spread <= MAX_SPREAD, "length_spread", self.length_spread, f"0 to {MAX_SPREAD}")
        longest_s = self.pause_s * self.questions * math.log(2 * requests)
        require(0 <= longest_s < MAX_SPAN_S, "pause_s", self.pause_s, f"questions that span less than {MAX_SPAN_S} s")
        require(self.keeps in get_args(Keeps), "keeps", self.keeps, " or ".join(get_args(Keeps)))
        said_len = self.system_len + self.questions * (self.question_len + self.output_len)
        require(said_len < MAX_TOKENS // 2, "questions", said_len, "less than 2**31 tokens in all")
        require(self.document_len < 2**20, "document_len", self.document_len, f"less than {2**20}")


def generate(shape: LongDocument, seed: int = 0) -> Trace:
    """The same trace for the same shape and seed; readers start at once, a question waits for the answer before it."""
    law = LogNormal(math.log(shape.document_len) - shape.length_spread**2 / 2, shape.length_spread)
    lens = np.maximum(np.rint(law.at(stratified(shape.documents, random_stream(seed, "documents")))), 1)
    sessions = shape.documents * shape.readers
    pauses_s = -shape.pause_s * np.log(1 - ranks(sessions * shape.questions, random_stream(seed, "pauses")))
    pauses_ps = [seconds_to_ps(pause_s) for pause_s in pauses_s.tolist()]
    builder = TraceBuilder()
    for session in range(sessions):
        document = session % shape.documents
        own_pauses_ps = pauses_ps[session * shape.questions : (session + 1) * shape.questions]
        _read(builder, shape, session, int(lens[document]), own_pauses_ps)
    return builder.build(f"long-document-{shape.documents}x{shape.questions}", FORMAT, GRANULE_LEN)


def _read(builder: TraceBuilder, shape: LongDocument, session: int, document_len: int, pauses_ps: list[int]) -> None:
    """The questions of one reader."""
    text_len, start_ps, said_len = shape.system_len + document_len, 0, 0
    document_stream = COMMON_STREAM + 1 + session % shape.documents
    shared = [(COMMON_STREAM, shape.system_len)] * (shape.system_len > 0) + [(document_stream, text_len)]
    for question, pause_ps in enumerate(pauses_ps):
        start_ps += pause_ps if question else 0
        builder.start(start_ps, len(builder) - 1 if question else None, pause_ps if question else 0, session)
        told = session if shape.keeps == "conversation" else session * shape.questions + question
        own_stream = COMMON_STREAM + 1 + shape.documents + told
        input_len = text_len + said_len + shape.question_len
        builder.hold(
            input_len, shape.output_len, [*shared, (own_stream, input_len)], own_stream, input_len // GRANULE_LEN
        )
        said_len += shape.question_len + shape.output_len if shape.keeps == "conversation" else 0

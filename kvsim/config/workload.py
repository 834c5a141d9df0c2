"""What a scenario's fleet serves: the table `[workload]`."""

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from kvsim import toml
from kvsim.config.mode import Mode
from kvsim.toml import Count, PositiveCount
from kvsim.workload.names import FormatName, TimeUnit

GENERATORS = ("agentic", "scaling", "codex", "chat", "rag", "long-document")


Scale = Annotated[float, Field(ge=0, le=100)]


class AgenticWorkload(Mode):
    """Sessions that never shrink: turn t's prompt is all before it plus `turn_len` new tokens."""

    generator: Annotated[str, toml.one_of(GENERATORS)]
    sessions: PositiveCount
    turns: PositiveCount
    common_len: Count
    """Tokens all sessions share (system prompt and tools)."""
    first_len: Count
    """Tokens of a session's own first input, after the common ones."""
    turn_len: PositiveCount
    """New input tokens of each later turn, after the last answer."""
    output_len: PositiveCount
    delay_s: Annotated[float, Field(ge=0)] = 0.0
    """Pause between an answer and the session's next turn."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Sessions start uniformly at random in [0, start_spread_s); 0 starts all at once."""


class CodexWorkload(Mode):
    """Codex on SWE-bench Pro, as `kvsim.workload.codex` generates it; what is not set has that module's default."""

    generator: Literal["codex"]
    sessions: Annotated[PositiveCount, Field(le=100_000)]
    shared_len: Annotated[Count, Field(le=11_520)] | None = None
    """Tokens all sessions share: 11,520 as at the provider, 902 as the published texts replay."""
    missed_len: Annotated[float, Field(ge=0)] | None = None
    """Tokens a call that the provider is to have missed; changes reports only."""
    answers: Literal["recorded", "generated"] | None = None
    """What the next prompt holds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Sessions start uniformly at random in [0, start_spread_s); 0 starts all at once."""


class ScalingWorkload(Mode):
    """The blog's scaling run, of the length that so many GPUs have: `kvsim.workload.agentic.scaling`."""

    generator: Literal["scaling"]
    gpus: PositiveCount


class ChatWorkload(Mode):
    """Conversations, as `kvsim.workload.chat` generates them; what is not set has that module's default."""

    generator: Literal["chat"]
    sessions: PositiveCount
    system_len: Count | None = None
    prompt_scale: Scale | None = None
    answer_scale: Scale | None = None
    pause_scale: Scale | None = None


class RagWorkload(Mode):
    """Questions over retrieved chunks, as `kvsim.workload.rag` generates them, likewise."""

    generator: Literal["rag"]
    requests: PositiveCount
    chunks: PositiveCount | None = None
    chunk_len: PositiveCount | None = None
    top_k: PositiveCount | None = None
    order: Literal["relevance", "popularity"] | None = None
    system_len: Count | None = None
    question_len: PositiveCount | None = None


class LongDocumentWorkload(Mode):
    """Readers of long documents, as `kvsim.workload.long_document` generates them, likewise."""

    generator: Literal["long-document"]
    documents: PositiveCount
    document_len: PositiveCount | None = None
    length_spread: Annotated[float, Field(ge=0, le=2)] | None = None
    questions: PositiveCount | None = None
    readers: PositiveCount | None = None
    question_len: PositiveCount | None = None
    output_len: Count | None = None
    keeps: Literal["document", "conversation"] | None = None
    pause_s: Annotated[float, Field(ge=0)] | None = None
    system_len: Count | None = None


class TraceWorkload(Mode):
    """A recorded trace; the format is sniffed by content when not given."""

    trace: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), AfterValidator(os.path.expanduser)]
    format: FormatName | None = None
    time_unit: TimeUnit | None = None
    """What the trace's times count, instead of its format's unit."""


def _workload_kind(data: object) -> str:
    """The tag of a table's kind: a trace, one of the generators, else the first of them, which says what is known."""
    if isinstance(data, TraceWorkload) or (isinstance(data, Mapping) and "trace" in data):
        return "<trace>"
    name = data.get("generator") if isinstance(data, Mapping) else getattr(data, "generator", None)
    return f"<{name}>" if name in GENERATORS else f"<{GENERATORS[0]}>"


Workload = Annotated[
    Annotated[AgenticWorkload, Tag("<agentic>")]
    | Annotated[ScalingWorkload, Tag("<scaling>")]
    | Annotated[CodexWorkload, Tag("<codex>")]
    | Annotated[ChatWorkload, Tag("<chat>")]
    | Annotated[RagWorkload, Tag("<rag>")]
    | Annotated[LongDocumentWorkload, Tag("<long-document>")]
    | Annotated[TraceWorkload, Tag("<trace>")],
    Discriminator(_workload_kind),
]

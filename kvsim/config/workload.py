"""What a scenario's fleet serves: the table `[workload]`."""

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from kvsim import toml
from kvsim.config.mode import Mode
from kvsim.toml import Count, PositiveCount
from kvsim.workload.names import FormatName, TimeUnit

GENERATORS = ("agentic", "codex")


class AgenticWorkload(Mode):
    """Sessions that never shrink: turn t's prompt is all before it plus `turn_len` new tokens."""

    generator: str
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

    @field_validator("generator")
    @classmethod
    def _known(cls, name: str) -> str:
        return toml.one_of(name, GENERATORS)


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


class TraceWorkload(Mode):
    """A recorded trace; the format is sniffed by content when not given."""

    trace: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), AfterValidator(os.path.expanduser)]
    format: FormatName | None = None
    time_unit: TimeUnit | None = None
    """What the trace's times count, instead of its format's unit."""


def _workload_kind(data: object) -> str:
    is_trace = isinstance(data, TraceWorkload) or (isinstance(data, Mapping) and "trace" in data)
    is_codex = isinstance(data, CodexWorkload) or (isinstance(data, Mapping) and data.get("generator") == "codex")
    return "<trace>" if is_trace else "<codex>" if is_codex else "<agentic>"


Workload = Annotated[
    Annotated[AgenticWorkload, Tag("<agentic>")]
    | Annotated[CodexWorkload, Tag("<codex>")]
    | Annotated[TraceWorkload, Tag("<trace>")],
    Discriminator(_workload_kind),
]

"""The trace that a scenario's [workload] section asks for."""

from typing import Any

from kvsim.config.mode import Mode
from kvsim.config.workload import (
    AgenticWorkload,
    ChatWorkload,
    CodexWorkload,
    LongDocumentWorkload,
    RagWorkload,
    ScalingWorkload,
    TraceWorkload,
    Workload,
)
from kvsim.scenario import Scenario
from kvsim.workload import agentic, chat, codex, long_document, rag
from kvsim.workload.load import load_trace
from kvsim.workload.offered import offered
from kvsim.workload.trace import Trace


def trace_of(scenario: Scenario, *, use_cache: bool = True) -> Trace:
    """The workload as its mode offers it, drawn with the scenario's seed.

    Raises TraceError for a file that cannot be used, InvalidArgument for a mode that makes no sense with it.
    """
    seed = scenario.scenario.seed
    return offered(recorded(scenario.workload, seed, use_cache=use_cache), scenario.workload, seed)


def recorded(workload: Workload, seed: int, *, use_cache: bool) -> Trace:
    """Generated, or read from a file."""
    match workload:
        case TraceWorkload():
            return load_trace(workload.trace, workload.format, time_unit=workload.time_unit, use_cache=use_cache)
        case AgenticWorkload():
            return agentic.generate(agentic.Agentic(**parameters(workload)), seed)
        case ScalingWorkload():
            return agentic.generate(agentic.scaling(workload.gpus), seed)
        case CodexWorkload():
            return codex.generate(codex.Codex(**parameters(workload)), seed)
        case ChatWorkload():
            return chat.generate(chat.Chat(**parameters(workload)), seed)
        case RagWorkload():
            return rag.generate(rag.Rag(**parameters(workload)), seed)
        case LongDocumentWorkload():
            return long_document.generate(long_document.LongDocument(**parameters(workload)), seed)


def parameters(workload: Mode) -> dict[str, Any]:
    """What is set of a generator's own."""
    return workload.model_dump(exclude={"generator", *Mode.model_fields}, exclude_none=True)

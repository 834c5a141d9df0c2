"""The trace that a scenario's [workload] section asks for."""

from kvsim.config.workload import AgenticWorkload, CodexWorkload
from kvsim.scenario import Scenario
from kvsim.workload import agentic, codex
from kvsim.workload.load import load_trace
from kvsim.workload.trace import Trace


def trace_of(scenario: Scenario, *, use_cache: bool = True) -> Trace:
    """Generated with the scenario's seed, or read from a file; raises TraceError for one that cannot be used."""
    workload = scenario.workload
    if isinstance(workload, AgenticWorkload):
        return agentic.generate(agentic.Agentic(**workload.model_dump(exclude={"generator"})), scenario.scenario.seed)
    if isinstance(workload, CodexWorkload):
        chosen = workload.model_dump(exclude={"generator"}, exclude_none=True)
        return codex.generate(codex.Codex(**chosen), scenario.scenario.seed)
    return load_trace(workload.trace, workload.format, time_unit=workload.time_unit, use_cache=use_cache)

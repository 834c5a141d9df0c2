"""Published step times, and what every backend says of them; times to a first token with the transfers that they hold.

What is published as time to the first token is compared with steps and transfers alone: a server's own time is in no
model of the hardware.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from kvsim import catalog
from kvsim.clock import PS_PER_MS
from kvsim.config.cluster import AICONFIGURATOR, ROOFLINE, TABLE, EngineConfig
from kvsim.cost.backends import make_step_time
from kvsim.cost.deployment import Deployment
from kvsim.cost.shipped import measured_on
from kvsim.cost.step_time import PrefillChunk, StepTimeModel
from kvsim.links.points import CONNECTOR_POINTS, link_points

CHUNK_LEN = EngineConfig().max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One published time of steps that run one after the other: prompts' chunks, then `decodes` of so much context."""

    name: str
    of: Deployment
    reference_ms: float
    source: str
    chunks: Sequence[PrefillChunk] = ()
    decodes: Sequence[int] = ()
    """Context lengths of the requests of one decode step."""
    transfer_ms: float = field(default=0.0, kw_only=True)
    """Modelled by `kvsim.links.points`, and part of the published time."""

    def predicted_ms(self, steps: StepTimeModel) -> float:
        """By these step times."""
        total_ps = sum(steps.step_ps([chunk], 0, 0) for chunk in self.chunks)
        total_ps += steps.step_ps((), len(self.decodes), sum(self.decodes))
        return total_ps / PS_PER_MS + self.transfer_ms


def step_points() -> tuple[StepPoint, ...]:
    """All of them, by deployment."""
    return (*_kimi(), *_dense(), *_h20(), *_h800())


def backends(of: Deployment) -> tuple[str, ...]:
    """Names of the step-time models that know the deployment; aiconfigurator where it is installed."""
    tables = [TABLE + name for name in catalog.step_tables() if measured_on(name) == of]
    live = [AICONFIGURATOR] if tables and find_spec("aiconfigurator") else []
    return (ROOFLINE, *tables, *live)


def steps_of(backend: str, of: Deployment) -> StepTimeModel:
    """The step times of a deployment by one backend."""
    engine = EngineConfig(
        tensor_parallel_size=of.tensor_parallel_size,
        data_parallel_size=of.data_parallel_size,
        enable_expert_parallel=of.enable_expert_parallel,
        step_time=backend,
    )
    return make_step_time(engine, catalog.llm_model(of.model), catalog.device(of.device))


# --- steps alone ------------------------------------------------------------------------------------------------------

AIC = "aiconfigurator 0.12.0, vLLM database 0.24.0"
KIMI_PREFILL = Deployment("kimi-k2.5-nvfp4", "gb200", 4, 1, True)
KIMI_DECODE = Deployment("kimi-k2.5-nvfp4", "gb200", 1, 8, True)
QWEN_32B = Deployment("qwen3-32b", "h200", 2, 1, False)
LLAMA_8B = Deployment("llama-3.1-8b", "h200", 1, 1, False)


def _kimi() -> Iterator[StepPoint]:
    whole = ((2_048, 71.2), (8_192, 203.9), (32_768, 847.2), (65_536, 2_331.6), (131_072, 7_274.0))
    for num_tokens, time_ms in whole:
        yield StepPoint(f"prefill {num_tokens:,} in one step", KIMI_PREFILL, time_ms, AIC, [(0, num_tokens)])
    yield StepPoint("prefill 65,536 in chunks", KIMI_PREFILL, 2_603.0, AIC, _chunked(0, 65_536))
    for cached, time_ms in ((61_440, 244.9), (63_488, 135.9)):
        name = f"prefill 65,536, {cached:,} cached"
        yield StepPoint(name, KIMI_PREFILL, time_ms, AIC, [(cached, 65_536 - cached)])
    decodes = ((1, 65_536, 23.0), (4, 65_536, 27.1), (8, 65_536, 31.7), (16, 65_536, 35.6), (8, 80_000, 32.4))
    for batch, context, time_ms in decodes:
        name = f"decode {batch} a rank at {context:,}"
        yield StepPoint(name, KIMI_DECODE, time_ms, AIC, decodes=[context] * batch * KIMI_DECODE.data_parallel_size)


def _dense() -> Iterator[StepPoint]:
    for of, prefill, decode_ms in ((QWEN_32B, (222.4, 2_524.6), 15.4), (LLAMA_8B, (92.8, 1_109.9), 9.2)):
        for num_tokens, time_ms in zip((4_096, 32_768), prefill, strict=True):
            yield StepPoint(f"prefill {num_tokens:,} in one step", of, time_ms, AIC, [(0, num_tokens)])
        yield StepPoint("decode 32 at 4,096", of, decode_ms, AIC, decodes=[4_096] * 32)


# --- times to the first token -----------------------------------------------------------------------------------------

H20 = "gahow/agentic-kvc, exp_a_tier_latency, May 2026: one H20, Qwen3-Coder-30B-A3B, vLLM 0.18.1"
CODER_30B = Deployment("qwen3-30b-a3b", "h20", 1, 1, False)
"""Qwen3-Coder-30B-A3B has the layers of Qwen3-30B-A3B."""
SUFFIX_LEN = 16
"""What is computed behind a prefix that is reused: the source does not say; one block is assumed."""
H800 = "Mooncake, vLLM PD performance: 8 H800 a side, Qwen3-8B"
QWEN_8B = Deployment("qwen3-8b", "h800", 8, 1, False)
CONNECTOR_TTFT_MS = (46.1, 48.0, 59.9, 67.3, 85.3, 124.4, 212.1, 387.5, 749.6)
"""For the prompts of `CONNECTOR_POINTS`."""
CODER_30B_TOKEN_BYTES, QWEN_8B_TOKEN_BYTES = 98_304, 147_456
GIB = 1 << 30


def _h20() -> Iterator[StepPoint]:
    for num_tokens, time_ms in ((1_024, 42.0), (65_536, 111.0)):
        yield StepPoint(f"TTFT, {num_tokens:,} in the GPU", CODER_30B, time_ms, H20, [(num_tokens, SUFFIX_LEN)])
    for num_tokens, time_ms in ((1_024, 78.0), (65_536, 15_200.0)):
        yield StepPoint(f"TTFT, {num_tokens:,} computed", CODER_30B, time_ms, H20, _chunked(0, num_tokens))
    yield from _h20_loaded()


def _h20_loaded() -> Iterator[StepPoint]:
    """Over the host's link as modelled; from a store see `kvsim.links.points`."""
    bytes_per_ms = _modelled("host to GPU, PCIe 5.0 x16, H20")[0] * 1e6
    for num_tokens, time_ms in ((1_024, 57.0), (65_536, 272.0)):
        name, transfer_ms = f"TTFT, {num_tokens:,} in host memory", num_tokens * CODER_30B_TOKEN_BYTES / bytes_per_ms
        yield StepPoint(name, CODER_30B, time_ms, H20, [(num_tokens, SUFFIX_LEN)], transfer_ms=transfer_ms)


def _h800() -> Iterator[StepPoint]:
    """Prefill, the transfer as modelled with neighbouring blocks joined, and the first step of the decode side."""
    rates = _modelled("blocks joined")
    for (num_tokens, _), gib_per_s, time_ms in zip(CONNECTOR_POINTS, rates, CONNECTOR_TTFT_MS, strict=True):
        name, chunks = f"TTFT, {num_tokens:,} computed and sent", _chunked(0, num_tokens)
        transfer_ms = num_tokens * QWEN_8B_TOKEN_BYTES / (gib_per_s * GIB / 1_000)
        yield StepPoint(name, QWEN_8B, time_ms, H800, chunks, [num_tokens], transfer_ms=transfer_ms)


def _modelled(name: str) -> list[float]:
    """The link points whose names end so, in their units."""
    return [point.modelled for point in link_points() if point.name.endswith(name)]


def _chunked(start: int, end: int) -> list[PrefillChunk]:
    return [(at, min(CHUNK_LEN, end - at)) for at in range(start, end, CHUNK_LEN)]

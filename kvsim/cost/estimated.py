"""A table that aiconfigurator makes on the spot: `[engine] step_time = "aiconfigurator"`.

It has the points of the shipped tables, and takes some ten seconds. aiconfigurator is an extra, imported here and only
when a scenario asks for it. Its successor aisimulate is to take its place with version 0.13.
"""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from kvsim import catalog
from kvsim.clock import PS_PER_MS
from kvsim.cost.deployment import Deployment
from kvsim.cost.grid import Grid
from kvsim.cost.table import TableSteps

INSTALL = "pip install 'kvtwin[aiconfigurator]'"

MODEL_PATHS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3.1-nvfp4": "nvidia/DeepSeek-V3.1-NVFP4",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
    "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-v4-flash-nvfp4": "nvidia/DeepSeek-V4-Flash-NVFP4",
    "deepseek-v4-pro": "deepseek-ai/DeepSeek-V4-Pro",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "kimi-k2.5-nvfp4": "nvidia/Kimi-K2.5-NVFP4",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
"""Names of the catalogue, and what aiconfigurator has a configuration of."""
SYSTEMS = {
    "a100-sxm": "a100_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
}

NEW_TOKENS = tuple(64 << doubled for doubled in range(12))
CONTEXTS = (1_024, 4_096, 8_192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072, 196_608)
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
DATABASE = {"backend_name": "vllm", "backend_version": "0.24.0"}


@lru_cache(4)
def estimated_table(of: Deployment) -> TableSteps:
    """Its step times; raises ValueError, with the fix, where it is not installed or knows not what is asked for."""
    path = _known(MODEL_PATHS, "model", of.model)
    system = _known(SYSTEMS, "device", of.device)
    estimate = _cli_estimate()
    settings: dict[str, Any] = {"model_path": path, "system_name": system, "osl": 2, **DATABASE, **_sizes(of)}
    try:
        prefill = {
            new: {old: _prefill_ps(estimate, settings, new, old) for old in (0, *CONTEXTS)} for new in NEW_TOKENS
        }
        decode = {batch: {each: _decode_ps(estimate, settings, batch, each) for each in CONTEXTS} for batch in BATCHES}
    except Exception as error:  # of any type, assertions included, for what its database lacks
        raise ValueError(f"{of} to be something that aiconfigurator has data for ({error})") from error
    return TableSteps(Grid(prefill), Grid(decode), of.data_parallel_size)


def _cli_estimate() -> Callable[..., Any]:
    try:
        from aiconfigurator.cli.api import cli_estimate
    except ImportError:
        raise ValueError(f"aiconfigurator to be installed for this engine.step_time: {INSTALL}") from None
    for name in ("aiconfigurator", "aiconfigurator_core"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found: Callable[..., Any] = cli_estimate
    return found


def _known(names: Mapping[str, str], key: str, name: str) -> str:
    if name not in names:
        raise ValueError(f'a {key} of {", ".join(names)} with step_time "aiconfigurator", not {name}')
    return names[name]


def _sizes(of: Deployment) -> dict[str, int]:
    sizes = {"tp_size": of.tensor_parallel_size, "attention_dp_size": of.data_parallel_size}
    if not catalog.llm_model(of.model).rank_weights().experts:
        return sizes
    num_gpus = of.tensor_parallel_size * of.data_parallel_size
    whole, cut = (num_gpus, 1) if of.enable_expert_parallel else (1, num_gpus)
    return {**sizes, "moe_ep_size": whole, "moe_tp_size": cut}


def _prefill_ps(estimate: Callable[..., Any], settings: Mapping[str, Any], new: int, prefix: int) -> int:
    time_ms: float = estimate(mode="static_ctx", isl=new + prefix, prefix=prefix, batch_size=1, **settings).ttft
    return round(time_ms * PS_PER_MS)


def _decode_ps(estimate: Callable[..., Any], settings: Mapping[str, Any], batch: int, context: int) -> int:
    time_ms: float = estimate(mode="static_gen", isl=context, batch_size=batch, **settings).tpot
    return round(time_ms * PS_PER_MS)

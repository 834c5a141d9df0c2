"""The step-time model that `[engine] step_time` names."""

from kvsim.catalog import Device, LlmModel
from kvsim.config.cluster import ROOFLINE, TABLE, EngineConfig
from kvsim.cost.deployment import Deployment
from kvsim.cost.estimated import estimated_table
from kvsim.cost.parallel import Parallel
from kvsim.cost.roofline import Roofline
from kvsim.cost.shipped import shipped_table
from kvsim.cost.step_time import StepTimeModel
from kvsim.llm.model import ExpertPlacement


def make_step_time(engine: EngineConfig, model: LlmModel, device: Device) -> StepTimeModel:
    """Step times of one instance; raises ValueError, saying what was expected, where the backend has none for it."""
    deployment = Deployment(
        model.name,
        device.name,
        engine.tensor_parallel_size,
        engine.data_parallel_size,
        engine.enable_expert_parallel,
    )
    if engine.step_time == ROOFLINE:
        return _roofline(engine, model, device)
    if engine.kv_cache_dtype not in ("auto", model.kv_cache.dtype):
        own = f'engine.kv_cache_dtype "auto" with step_time {engine.step_time}, which is of {model.kv_cache.dtype}'
        raise ValueError(f"{own}, not {engine.kv_cache_dtype}")
    if engine.step_time.startswith(TABLE):
        return shipped_table(engine.step_time.removeprefix(TABLE), deployment)
    return estimated_table(deployment)


def _roofline(engine: EngineConfig, model: LlmModel, device: Device) -> Roofline:
    placement = ExpertPlacement.WHOLE if engine.enable_expert_parallel else ExpertPlacement.CUT
    parallel = Parallel(engine.tensor_parallel_size, engine.data_parallel_size, placement)
    return Roofline(model, device, parallel, None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype)

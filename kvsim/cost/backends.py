"""The step-time model that `[engine] step_time` names."""

from kvsim.catalog import Device, LlmModel
from kvsim.config.cluster import AICONFIGURATOR, TABLE, EngineConfig
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
    if engine.step_time.startswith(TABLE):
        return shipped_table(engine.step_time.removeprefix(TABLE), deployment)
    if engine.step_time == AICONFIGURATOR:
        return estimated_table(deployment)
    placement = ExpertPlacement.WHOLE if engine.enable_expert_parallel else ExpertPlacement.CUT
    parallel = Parallel(engine.tensor_parallel_size, engine.data_parallel_size, placement)
    return Roofline(model, device, parallel, None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype)

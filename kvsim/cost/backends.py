"""The step-time model that `[engine] step_time` names."""

from kvsim.catalog import Device, LlmModel
from kvsim.config.cluster import TABLE, EngineConfig
from kvsim.cost.deployment import Deployment
from kvsim.cost.roofline import Roofline
from kvsim.cost.shipped import shipped_table
from kvsim.cost.step_time import StepTimeModel


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
    if engine.num_gpus > 1:
        raise ValueError("engine.tensor_parallel_size and engine.data_parallel_size of 1 with step_time roofline")
    return Roofline(model, device)

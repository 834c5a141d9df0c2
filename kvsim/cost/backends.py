"""The step-time model that `[engine] step_time` names."""

from kvsim.catalog import Device, LlmModel
from kvsim.config.cluster import EngineConfig
from kvsim.cost.roofline import Roofline
from kvsim.cost.step_time import StepTimeModel


def make_step_time(name: str, model: LlmModel, device: Device, engine: EngineConfig) -> StepTimeModel:
    """Step times of one instance; raises ValueError, saying what was expected, where the backend has none for it."""
    if name != "roofline":
        raise ValueError(f"engine.step_time to be roofline, not {name!r}")
    if engine.num_gpus > 1:
        raise ValueError(f"engine.tensor_parallel_size and engine.data_parallel_size of 1 with step_time {name}")
    return Roofline(model, device)

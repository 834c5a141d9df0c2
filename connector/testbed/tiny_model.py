"""Models of a few hundred thousand weights that the CPU backend runs: a config.json and seeded weights in a folder.

`load_format="dummy"` would not do: its output ignores the prompt, so no wrong KV could ever show.
"""

import json
from pathlib import Path
from types import MappingProxyType

import numpy as np

WEIGHT_STD = 0.15
CONFIGS = json.loads(Path(__file__).with_name("tiny_models.json").read_text())


def write_tiny_model(name, folder, seed=0, changes=MappingProxyType({})):
    """Write model `name` of tiny_models.json into `folder`, and return the folder as the engine's model path.

    `changes`: entries of its configuration that are to be others.
    """
    from safetensors.numpy import save_file  # comes with the engine

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[name], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors")
    return str(folder)


def _weights(config, rng):
    """Norms that change nothing, and noise: under the names and in the shapes that the published models have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    neutral = np.zeros if config["model_type"].startswith("gemma") else np.ones  # Gemma's norm multiplies by 1 + weight
    return {
        name: neutral(tensor.shape, np.float32) if tensor.ndim == 1 else _noise(rng, tensor.shape)
        for name, tensor in model.state_dict().items()
    }


def _noise(rng, shape):
    return (rng.standard_normal(tuple(shape)) * WEIGHT_STD).astype(np.float32)

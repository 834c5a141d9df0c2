"""Parameters of our models against transformers' own classes, built on the meta device: equal, but for small ones.

Sizes are given where a class's default configuration is not the published model: those of its config.json.
"""

import warnings
from importlib import import_module

import pytest

from kvsim import catalog, toml
from kvsim.llm.model import LlmModel
from tests.support import PROJECT

pytestmark = pytest.mark.engine

MODELS = {
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Config", {}),
    "deepseek-v3.2": ("deepseek_v32", "DeepseekV32Config", {}),
    "deepseek-v4-flash": ("deepseek_v4", "DeepseekV4Config", {"compress_ratios": [0, 0, *[4, 128] * 20, 4]}),
    "gemma-4-31b": (
        "gemma4",
        "Gemma4TextConfig",
        {
            "hidden_size": 5376,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "global_head_dim": 512,
            "intermediate_size": 21_504,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "glm-5": ("glm_moe_dsa", "GlmMoeDsaConfig", {}),
    "gpt-oss-120b": ("gpt_oss", "GptOssConfig", {}),
    "llama-4-scout": ("llama4", "Llama4TextConfig", {}),
    "minimax-m2.5": ("minimax_m2", "MiniMaxM2Config", {}),
    "qwen3-30b-a3b": ("qwen3_moe", "Qwen3MoeConfig", {"num_hidden_layers": 48, "head_dim": 128}),
    "qwen3-8b": (
        "qwen3",
        "Qwen3Config",
        {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12_288},
    ),
    "qwen3.5-397b-a17b": (
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "linear_num_value_heads": 64,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
    ),
}
# Norms, biases (gpt-oss) and hyper-connections (DeepSeek-V4) are not counted where the file does not say how many.
SMALL = {"gpt-oss-120b": 4e-4, "deepseek-v4-flash": 2e-4, "gemma-4-31b": 1e-4}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers_model(name):
    assert missing_share(catalog.llm_model(name)) <= SMALL.get(name, 1e-5)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("glm-5", "v_head_dim = 256", "v_head_dim = 128"),
        ("qwen3.5-397b-a17b", "output_gate = true", "output_gate = false"),
        ("gemma-4-31b", "k_is_v = true", "k_is_v = false"),
        ("deepseek-v3.2", "q_lora_rank = 1536", "q_lora_rank = 1024"),
    ],
)
def test_a_wrong_file_has_others(tmp_path, name, old, new):
    text = (PROJECT / "models" / "llm" / f"{name}.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "wrong.toml").write_text(text.replace(old, new), encoding="utf-8")
    assert missing_share(toml.load(LlmModel, tmp_path / "wrong.toml")) > SMALL.get(name, 1e-5)


def missing_share(model):
    """How much of transformers' parameters ours are off by."""
    theirs = parameters(*MODELS[model.name])
    return abs(theirs - model.num_params) / theirs


def parameters(module, config, sizes):
    """Those of a model that has no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    found = getattr(import_module(f"transformers.models.{module}.configuration_{module}"), config)(**sizes)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_config(found)
    return sum(parameter.numel() for parameter in model.parameters())

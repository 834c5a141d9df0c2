"""Models of a few hundred thousand weights that the CPU backend runs: a config.json and seeded weights in a folder.

`load_format="dummy"` would not do: its output ignores the prompt, so no wrong KV could ever show.
"""

import json
from pathlib import Path

import numpy as np

WEIGHT_STD = 0.15
CONFIGS = json.loads(Path(__file__).with_name("tiny_models.json").read_text())


def write_tiny_model(name, folder, seed=0):
    """Write model `name` of tiny_models.json into `folder`, and return the folder as the engine's model path."""
    from safetensors.numpy import save_file  # comes with the engine

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors")
    return str(folder)


def _weights(config, rng):
    def matrix(*shape):
        return (rng.standard_normal(shape) * WEIGHT_STD).astype(np.float32)

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    gemma = config["model_type"].startswith("gemma")
    norm = np.zeros if gemma else np.ones  # Gemma's norm multiplies by 1 + weight
    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": norm(hidden, np.float32),
        "lm_head.weight": matrix(vocab, hidden),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in norms:
            weights[f"{prefix}.{name}.weight"] = norm(hidden, np.float32)
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{name}.weight"] = norm(head, np.float32)
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head, hidden),
            ("self_attn.k_proj", kv_heads * head, hidden),
            ("self_attn.v_proj", kv_heads * head, hidden),
            ("self_attn.o_proj", hidden, heads * head),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
    return weights

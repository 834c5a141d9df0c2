"""Every file of models/ loads, its numbers fit together, every mistake is named."""

from pathlib import Path

import pytest

from kvcore.errors import InvalidArgument
from kvsim import catalog, toml
from kvsim.catalog import Device, LlmModel
from tests.support import PROJECT

LLAMA = PROJECT / "models" / "llm" / "llama-3.1-8b.toml"


def test_every_file_loads():
    assert "llama-3.1-8b" in catalog.llm_models() and "h100-sxm" in catalog.devices()
    assert all(isinstance(catalog.llm_model(name), LlmModel) for name in catalog.llm_models())
    assert all(isinstance(catalog.device(name), Device) for name in catalog.devices())


def test_llama_by_arithmetic():
    model = catalog.llm_model("llama-3.1-8b")
    assert model.sequence_bytes(1) == 131_072
    assert model.num_params == model.weights.published_params == 8_030_261_248
    # vLLM prints 14.96 GiB for it.
    assert round(model.rank_weights().size_bytes / 2**30, 2) == 14.96


def test_h100():
    device = catalog.device("h100-sxm")
    assert device.memory.capacity_bytes == 80 * 2**30
    assert device.memory.bandwidth_bytes_per_s == 3_350 * 10**9
    assert device.compute.bf16_flops_per_s == 989 * 10**12


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidArgument, match=r"name = 'gpt-5': expected one of .*llama-3.1-8b.*models/llm/gpt-5.toml"):
        catalog.llm_model("gpt-5")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("hidden_size = 4096", "hidden_size = -1", "architecture.hidden_size = -1: expected greater than 0"),
        ("num_heads = 32", "num_heads = '32'", "attention.0.num_heads = '32': expected a valid integer"),
        ("num_heads = 32", "num_head = 32", "num_head = 32: expected a known key; did you mean num_heads"),
        ("hidden_size = 4096", "", "architecture.hidden_size: expected a value; this key is required"),
        ("num_layers = 32", "num_layers = 31", "expected at most as many feed-forward layers as attention layers, 31"),
        ('kind = "gqa"', 'kind = "gqqa"', "attention.0.kind = 'gqqa': expected a known name; did you mean gqa?"),
        ("[weights]\nsource", "[weights]\nsauce", "weights.sauce"),
        ("[weights]", "[weights", "expected TOML (Expected ']'"),
    ],
)
def test_a_wrong_file_names_key_and_fix(tmp_path: Path, old, new, expected):
    path = tmp_path / "wrong.toml"
    path.write_text(LLAMA.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(toml.InvalidToml) as error:
        toml.load(LlmModel, path)
    assert str(error.value).startswith(f"{path}: ") and expected in str(error.value)
    assert "\n" not in str(error.value)

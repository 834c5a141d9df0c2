"""The tables of docs/MODELS.md out of the catalogue. `python -m tests.house.models_document` writes them."""

import re
import sys

from kvsim import catalog
from kvsim.llm.listing import BLOCK_SIZE, bytes_per_sequence, bytes_per_token, kind_of
from tests.support import PROJECT

DOCUMENT = PROJECT / "docs" / "MODELS.md"
CLASSES = {
    "gqa": "GQA",
    "mla": "MLA",
    "compressed": "window + compressed latents",
    "gdn": "GDN",
    "kda": "KDA",
    "mamba2": "Mamba2",
}


def with_tables(text):
    """The document with its tables as they must be."""
    for name, lines in (("models", model_rows()), ("sources", source_rows()), ("devices", device_rows())):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, rows=lines: m[1] + "\n".join(rows) + "\n" + m[2],
            text,
            flags=re.S,
        )
    return text


def model_rows():
    yield (
        "| model | class | parameters, 1e9 (published) | KV dtype | groups: layers x kind / tokens in a block "
        "| bytes a token | bytes a sequence | by the published formula, 1K / 32K / 128K |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for model in map(catalog.llm_model, catalog.llm_models()):
        groups = model.kv_groups(BLOCK_SIZE)
        averages = (f"{model.sequence_bytes(n * 1024) // (n * 1024):,}" for n in (1, 32, 128))
        cells = [
            model.name,
            class_of(model),
            f"{model.num_params / 1e9:,.1f} ({model.weights.published_params / 1e9:,.1f})",
            model.kv_cache.dtype,
            "; ".join(f"{group.num_layers} x {kind_of(group.spec)} / {group.spec.block_size}" for group in groups),
            f"{bytes_per_token(groups):,}",
            f"{bytes_per_sequence(groups):,}",
            " / ".join(averages),
        ]
        yield f"| {' | '.join(cells)} |"


def class_of(model):
    kinds = dict.fromkeys(CLASSES[layer.kind] + features(layer) for layer in model.attention)
    experts = any(layer.kind == "moe" for layer in model.feed_forward)
    return " + ".join(kinds) + (", MoE" if experts else ", dense")


def features(layer):
    if layer.kind == "gqa" and layer.window is not None:
        return f" in windows of {layer.window:,}"
    if layer.kind == "gqa" and layer.chunk is not None:
        return f" in chunks of {layer.chunk:,}"
    return " with a sparse index" if layer.kind == "mla" and layer.index is not None else ""


def source_rows():
    yield "| model | read | source of the layers |"
    yield "|---|---|---|"
    for model in map(catalog.llm_model, catalog.llm_models()):
        yield f"| {model.name} | {model.architecture.date} | {model.architecture.source} |"


def device_rows():
    yield "| device | memory, GiB | TB/s | bf16 / fp8 / fp4 TFLOP/s | NVLink / NIC / PCIe GB/s | host | source |"
    yield "|---|---|---|---|---|---|---|"
    for device in map(catalog.device, catalog.devices()):
        compute, network, host = device.compute, device.network, device.host
        rates = (compute.bf16_flops_per_s, compute.fp8_flops_per_s, compute.fp4_flops_per_s)
        links = (network.nvlink_bytes_per_s, network.nic_bytes_per_s, network.pcie_bytes_per_s)
        cells = [
            device.name,
            f"{device.memory.capacity_bytes / 2**30:,.1f}",
            f"{device.memory.bandwidth_bytes_per_s / 1e12:,.2f}",
            " / ".join("-" if rate is None else f"{rate / 1e12:,.0f}" for rate in rates),
            " / ".join(f"{rate / 1e9:,.0f}" for rate in links),
            "-" if host is None else f"{host.memory_bytes / 1e9:,.0f} GB, C2C {host.c2c_bytes_per_s / 1e9:,.0f} GB/s",
            device.compute.source,
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)

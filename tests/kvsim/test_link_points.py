"""The comparison with published measurements, and that its document says what it gives."""

import re

from kvsim.links.points import CONNECTOR_POINTS, link_points
from tests.support import PROJECT

POINTS = {point.name: point for point in link_points()}
ROW = re.compile(r"^\| (.+?) \| (GB/s|GiB/s|s) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \|$", re.MULTILINE)


def test_the_document_has_every_point_as_it_is_computed():
    text = (PROJECT / "docs" / "LINKS.md").read_text(encoding="utf-8")
    written = {name: (unit, *map(float, numbers)) for name, unit, *numbers in ROW.findall(text)}
    computed = {
        name: (point.unit, float(f"{point.measured:.4g}"), float(f"{point.modelled:.4g}"), round(point.ratio, 2))
        for name, point in POINTS.items()
    }
    assert written == computed


def test_wires_and_host_links_are_within_a_tenth():
    for name in ("one 400 Gb/s NIC", "host to GPU, PCIe 5.0 x16, H20", "host to GPU, PCIe 5.0 x16"):
        assert 0.9 < POINTS[name].ratio < 1.1, name


def test_what_is_measured_lies_between_joined_and_single_blocks_from_a_thousand_tokens_on():
    """Below, a fixed time that the model does not have makes both too fast."""
    for num_tokens, measured in CONNECTOR_POINTS:
        label = f"MooncakeConnector, 8 H800, {num_tokens:,} tokens, blocks"
        joined, single = POINTS[f"{label} joined"], POINTS[f"{label} single"]
        assert joined.measured == single.measured == measured
        assert single.modelled < joined.modelled
        assert (single.modelled < measured) == (num_tokens >= 1_024)
        assert measured < joined.modelled


def test_a_store_is_slower_than_its_wires_and_the_measured_default_is_nearer():
    """Why [link] is what scenarios have unless they ask for more."""
    ratios = {name: point.ratio for name, point in POINTS.items()}
    assert ratios["64k tokens from a store, TTFT, [network]"] < 0.5
    assert ratios["64k tokens from a store, TTFT, [link]"] > 0.75
    assert ratios["pool get, GB200, [network]"] > 5

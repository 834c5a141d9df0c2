"""`kvsim models --compare`: every model of the hardware beside what was published."""

import pytest

from kvsim import catalog
from kvsim.config.cluster import ROOFLINE
from kvsim.cost.points import step_points, steps_of
from kvsim.links.points import link_points
from tests.kvsim.command import document, inside, refused


@pytest.fixture(scope="module")
def compared():
    return document("models", "--compare")


def test_every_point_is_compared_with_the_roofline(compared):
    by_roofline = [row for row in compared["step_times"] if row["backend"] == ROOFLINE]
    assert [(row["model"], row["point"]) for row in by_roofline] == [(p.of.model, p.name) for p in step_points()]
    assert len(by_roofline) == 34
    assert [row["point"] for row in compared["links"]] == [point.name for point in link_points()]
    assert len(compared["tables"]) == 2 * len(catalog.step_tables())


def test_a_ratio_is_predicted_over_reference(compared):
    for row in compared["step_times"]:
        assert row["ratio"] == row["predicted_ms"] / row["reference_ms"] > 0
        assert row["source"]


def test_tables_say_what_their_tool_published(compared):
    """Every point of aiconfigurator is one of a table, to the digits that it was published with."""
    rows = [row for row in compared["step_times"] if row["backend"].startswith("table:")]
    assert len(rows) == 19
    assert all(row["ratio"] == pytest.approx(1, abs=4e-3) for row in rows), rows


def test_the_roofline_is_where_the_document_says(compared):
    """docs/STEP_TIMES.md, by deployment; measured, not fitted."""
    bands = {}
    for row in compared["step_times"]:
        if row["backend"] == ROOFLINE:
            bands.setdefault((row["model"], row["tensor_parallel_size"]), []).append(row["ratio"])
    found = {of: (round(min(ratios), 2), round(max(ratios), 2)) for of, ratios in bands.items()}
    assert found == {
        ("kimi-k2.5-nvfp4", 4): (0.51, 0.83),
        ("kimi-k2.5-nvfp4", 1): (0.34, 0.78),
        ("qwen3-32b", 2): (0.98, 1.45),
        ("llama-3.1-8b", 1): (0.96, 1.5),
        ("qwen3-30b-a3b", 1): (0.23, 2.02),
        ("qwen3-8b", 8): (0.1, 0.56),
    }


def test_a_wrong_step_time_shows(compared):
    """The comparison with a table of another deployment is not 1."""
    point = step_points()[0]
    wrong = steps_of("table:kimi-k2.5-nvfp4_gb200_dp8ep8", step_points()[8].of)
    assert point.predicted_ms(wrong) / point.reference_ms > 1.2


def test_people_get_tables():
    result = inside("models", "--compare")
    assert result.returncode == 0
    for said in ("kimi-k2.5-nvfp4 on gb200, tensor parallel 4", "whole tables", "links", "decode 8 a rank at 80,000"):
        assert said in result.stdout


def test_ranks_beside_compare_are_refused():
    line = refused("models", "--compare", "--tensor-parallel-size", 2)
    assert line.startswith("--tensor-parallel-size = 2: expected none with --compare")

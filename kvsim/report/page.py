"""Runs in, one HTML page out: the same bytes for the same folders."""

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvsim import result_folder
from kvsim.report import figures, summary, theme
from kvsim.report.parts import Figure
from kvsim.report.run_series import RunSeries
from kvsim.report.series import NUM_POINTS


def page(folders: Sequence[Path]) -> str:
    """The page about these results, overlaid; raises InvalidArgument for a folder that holds none."""
    results = [result_folder.read(folder) for folder in folders]
    labels = distinct_labels([result.scenario["scenario"]["name"] for result in results], folders)
    runs = [RunSeries(result, label) for result, label in zip(results, labels, strict=True)]
    pictures = figures.figures(runs)
    template = Environment(
        loader=PackageLoader("kvsim.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("page.html.j2")
    return template.render(
        runs=runs,
        rows=summary.rows(runs),
        differences=summary.differences([result.scenario for result in results]),
        warnings=summary.warnings(runs),
        figures=pictures,
        figures_json=script_json([_plain(figure) for figure in pictures]),
        plotly_js=Markup(get_plotlyjs()),
        colours_json=script_json({mode: theme.colours(mode) for mode in theme.RUNS}),
        light=theme.RUNS["light"],
        dark=theme.RUNS["dark"],
        num_points=NUM_POINTS,
    )


def distinct_labels(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The scenarios' names; where one stands twice, the folders', and where these do too, with a number."""
    labels = list(names) if len(set(names)) == len(names) else [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({number})" for number, label in enumerate(labels, 1)]
    return labels


def script_json(value: object) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _plain(figure: Figure) -> dict[str, object]:
    return {"name": figure.name, "data": figure.data, "layout": figure.layout}

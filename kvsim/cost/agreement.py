"""What `kvsim models --compare` prints: every backend beside every published point, the roofline beside every table."""

from collections.abc import Iterator
from statistics import median

from kvsim import catalog
from kvsim.config.cluster import ROOFLINE
from kvsim.cost.points import backends, step_points, steps_of
from kvsim.cost.shipped import measured_on, rows
from kvsim.cost.step_time import StepTimeModel
from kvsim.document import Document
from kvsim.links.points import link_points

PHASES = ("prefill", "decode")


def comparison() -> Document:
    """`step_times`: a row per point and backend; `tables`: the roofline over each; `links`: a row per point."""
    return {"step_times": list(_step_times()), "tables": list(_tables()), "links": list(_links())}


def ratios(table: str, phase: str, steps: StepTimeModel) -> list[float]:
    """Predicted over measured at every point of a table; every data parallel rank has what the table says of one."""
    ranks = measured_on(table).data_parallel_size
    found = []
    for first, second, time_ps in rows(table, phase):
        if phase == "prefill":
            step_ps = steps.step_ps([(second, first)] * ranks, 0, 0)
        else:
            step_ps = steps.step_ps((), first * ranks, first * second * ranks)
        found.append(step_ps / time_ps)
    return found


def _step_times() -> Iterator[Document]:
    points = step_points()
    models = {of: {name: steps_of(name, of) for name in backends(of)} for of in {point.of: None for point in points}}
    for point in points:
        for backend, steps in models[point.of].items():
            predicted_ms = point.predicted_ms(steps)
            yield {
                **point.of._asdict(),
                "point": point.name,
                "backend": backend,
                "predicted_ms": predicted_ms,
                "reference_ms": point.reference_ms,
                "ratio": predicted_ms / point.reference_ms,
                "source": point.source,
            }


def _tables() -> Iterator[Document]:
    for table in catalog.step_tables():
        steps = steps_of(ROOFLINE, measured_on(table))
        for phase in PHASES:
            found = ratios(table, phase, steps)
            bounds = {"min_ratio": min(found), "median_ratio": median(found), "max_ratio": max(found)}
            yield {"table": table, "phase": phase, "backend": ROOFLINE, "points": len(found), **bounds}


def _links() -> Iterator[Document]:
    for point in link_points():
        yield {
            "point": point.name,
            "unit": point.unit,
            "predicted": point.modelled,
            "reference": point.measured,
            "ratio": point.ratio,
            "source": point.source,
        }

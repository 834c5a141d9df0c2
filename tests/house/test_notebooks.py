"""Notebooks are kept without outputs, begin with a claim, end with what holds it, and use public names only."""

import ast
import copy
import json
import sys

import pytest

from tests.support import PROJECT

NOTEBOOKS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((PROJECT / "notebooks").glob("*.ipynb"))}
USED = {"kvcore", "kvsim", "numpy", "plotly"}


def complaints(notebook):
    """What is wrong with a notebook."""
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    if any(cell["outputs"] or cell["execution_count"] is not None for cell in code):
        yield "outputs are kept"
    if cells[0]["cell_type"] != "markdown" or "**Claim.**" not in "".join(cells[0]["source"]):
        yield "the first cell claims nothing"
    if cells[-1]["cell_type"] != "code" or "assert " not in sources[-1]:
        yield "the last cell asserts nothing"
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        yield from private_names(node)
        yield from foreign_modules(node)


def private_names(node):
    names = [node.attr] if isinstance(node, ast.Attribute) else []
    if isinstance(node, ast.ImportFrom):
        names = [*node.module.split("."), *(alias.name for alias in node.names)]
    return [f"{name} is private" for name in names if name.startswith("_")]


def foreign_modules(node):
    modules = [node.module] if isinstance(node, ast.ImportFrom) else []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    roots = {module.partition(".")[0] for module in modules}
    return [f"{root} is not installed with the simulator" for root in roots - USED - sys.stdlib_module_names]


def test_there_are_notebooks():
    assert list(NOTEBOOKS) == ["01_one_request", "02_masks", "03_capacity"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_as_it_should_be(name):
    assert list(complaints(NOTEBOOKS[name])) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda cells: cells[1].update(execution_count=1), "outputs are kept"),
        (lambda cells: cells[1].update(outputs=[{}]), "outputs are kept"),
        (lambda cells: cells[0].update(source=["# A title"]), "the first cell claims nothing"),
        (lambda cells: cells.append(cells[0]), "the last cell asserts nothing"),
        (lambda cells: cells[1].update(source=["from kvsim.run import _names"]), "_names is private"),
        (lambda cells: cells[1].update(source=["run._clock"]), "_clock is private"),
        (lambda cells: cells[1].update(source=["import pandas"]), "pandas is not installed with the simulator"),
    ],
)
def test_a_notebook_that_is_not_is_found(change, says):
    notebook = copy.deepcopy(NOTEBOOKS["01_one_request"])
    change(notebook["cells"])
    assert list(complaints(notebook)) == [says]

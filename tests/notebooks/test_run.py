"""Every notebook runs in a kernel of its own, from its first cell to the assertions of its last."""

import asyncio

import pytest

from tests.support import PROJECT, shared_data

NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Nothing is written to the user's home."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def run(notebook):
    """The notebook with its outputs; raises CellExecutionError."""
    import nbclient

    resources = {"metadata": {"path": str(PROJECT / "notebooks")}}
    client = nbclient.NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources=resources)
    return asyncio.run(client.async_execute())


def read(path):
    import nbformat

    return nbformat.read(path, as_version=4)


def kinds_of_output(notebook):
    """MIME types of all that the cells have shown."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return {kind for output in outputs for kind in output.get("data", {})}


def printed(notebook):
    return "".join(output["text"] for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_what_it_claims_and_draws_it(path, monkeypatch):
    monkeypatch.setenv("KVTWIN_TRACE", "no such file")
    done = run(read(path))
    assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")
    assert "application/vnd.plotly.v1+json" in kinds_of_output(done)


def test_capacity_holds_on_the_recorded_trace_and_says_what_it_looked_at(monkeypatch):
    (path,) = (path for path in NOTEBOOKS if "capacity" in path.stem)
    monkeypatch.setenv("KVTWIN_TRACE", str(shared_data("mooncake_conversation_trace.jsonl.gz")))
    assert "requests of mooncake_conversation_trace.jsonl.gz" in printed(run(read(path)))


def test_a_notebook_whose_claim_is_wrong_fails():
    import nbclient.exceptions
    import nbformat

    wrong = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        run(wrong)

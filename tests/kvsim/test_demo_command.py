"""`kvsim demo` ends with the path of its page, and nothing that is there already is touched."""

import pytest

from kvsim import scenario
from kvsim.demo_command import DEMO, new_folder
from tests.kvsim.command import inside, kvsim

SMALL = ["cluster.instances=4", "workload.sessions=17", "workload.turns=4", "workload.common_len=1000"]


def test_it_ends_with_a_page_in_a_new_folder_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = scenario.load
    monkeypatch.setattr("kvsim.scenario.load", lambda source, *_: load(source, SMALL))
    for folder in ("out/demo", "out/demo-2"):
        result = inside("demo")
        assert (result.returncode, result.stderr) == (0, "")
        assert "ratio of pool-16 to nopool-16" in result.stdout
        assert result.stdout.splitlines()[-1] == f"{folder}/report.html"
        assert "<title>nopool-16 · pool-16" in (tmp_path / folder / "report.html").read_text()
        assert {name for name in DEMO if (tmp_path / folder / name / "events.parquet").exists()} == set(DEMO)


def test_a_folder_of_the_users_is_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine").write_text("mine")
    (tmp_path / "demo-2").write_text("a file")
    assert new_folder(tmp_path) == tmp_path / "demo-3"
    assert (tmp_path / "demo" / "mine").read_text() == "mine"


def test_where_nothing_can_be_written_it_says_so_before_it_simulates(tmp_path):
    (tmp_path / "out").write_text("a file")
    result = kvsim("demo", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("out/demo: not written: ") and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    result = kvsim("demo", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / result.stdout.splitlines()[-1]).exists()

"""Who may import whom: the contracts of pyproject.toml hold, and each rejects a tree that breaks it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES, Module, imports, modules
from tests.support import PROJECT

KVCORE_MAY_IMPORT = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools",
    "json", "math", "operator", "pickle", "re", "reprlib", "struct", "types", "typing",
    "cbor2", "xxhash", "kvcore",
}  # fmt: skip


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", PROJECT / "pyproject.toml"]
    path = os.pathsep.join([str(tree), str(tree / "connector")])
    return subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )


def test_the_arrows_hold():
    result = lint_imports(PROJECT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("kvcore/bad.py", "import threading", "kvcore has no driver"),
        ("kvcore/bad.py", "from kvsim import clock", "kvcore has no driver"),
        ("kvsim/bad.py", "from kvconnector import scheduler", "kvsim knows neither"),
        ("kvsim/reference/bad.py", "import kvconnector.transfer", "kvsim knows neither"),
        ("kvsim/reference/bad.py", "import torch", "kvsim knows neither"),
        ("kvconnector/bad.py", "import kvsim.clock", "kvconnector never loads"),
    ],
)
def test_a_tree_that_breaks_an_arrow_is_rejected(tmp_path, file, line, contract):
    small_tree(tmp_path)
    assert lint_imports(tmp_path).returncode == 0, "the tree is fine before the bad import"
    (tmp_path / file).write_text(line + "\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    broken = " ".join(result.stdout.split("Broken contracts")[1].split())
    assert contract in broken


def small_tree(root: Path) -> None:
    files = {
        "kvcore/__init__.py": "",
        "kvsim/__init__.py": "",
        "kvsim/clock.py": "import kvcore, simpy",
        "kvsim/reference/__init__.py": "from kvconnector import scheduler",
        "kvconnector/__init__.py": "",
        "kvconnector/scheduler.py": "import kvcore, vllm",
        "kvconnector/transfer.py": "import torch",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text + "\n")


def strangers(module: Module) -> set[str]:
    """What a module of kvcore imports beyond the pure part of the standard library."""
    return {name.partition(".")[0] for name in imports(module)} - KVCORE_MAY_IMPORT


def test_kvcore_imports_nothing_but_pure_things():
    assert not {module.name: strangers(module) for module in modules("kvcore") if strangers(module)}
    assert strangers(Module("kvcore.bad", "from time import monotonic")) == {"time"}


def test_nothing_else_is_at_the_top_of_the_packages():
    """A wheel with a module called `connector` or `models` would shadow the user's own in every vLLM process."""
    assert all((root / "__init__.py").exists() for root in PACKAGES.values())
    assert not (PROJECT / "connector" / "__init__.py").exists()
    assert not list((PROJECT / "models").rglob("*.py"))


@pytest.fixture(autouse=True)
def _linter_is_here():
    if shutil.which(str(Path(sys.executable).parent / "lint-imports")) is None:
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")

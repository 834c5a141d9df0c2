"""What a user installs: three packages and the models' data, no tests, and a base import that costs nothing."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from tests.house.sources import PACKAGES
from tests.support import PROJECT

HEAVY = ["vllm", "torch", "mooncake", "numpy", "simpy", "pydantic", "pyarrow", "asyncio", "kvsim"]

PROBE = f"""
import json, pkgutil, sys, time
start = time.process_time()  # of this process: others may be busy
import kvcore, kvcore.planner, kvcore.request, kvconnector
took_ms = (time.process_time() - start) * 1e3
heavy = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps(dict(took_ms=took_ms, heavy=heavy, path=kvcore.__file__)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Path of a wheel built from the checkout, without network."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, timeout=60)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_three_packages_and_the_models(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvcore", "kvsim", "kvconnector"}
    models = {f"kvsim/models/{path.relative_to(PROJECT / 'models')}" for path in (PROJECT / "models").rglob("*.toml")}
    assert models
    assert models <= set(names)
    assert "kvsim/report/page.html.j2" in names
    assert not [name for name in names if "test" in name.lower()]
    assert {"kvcore/py.typed", "kvsim/py.typed", "kvconnector/py.typed"} <= set(names)


def test_the_base_import_is_light(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    probes = [probe(tmp_path) for _ in range(3)]
    assert all(result["path"].startswith(str(tmp_path)) for result in probes), "not the wheel's own files"
    assert all(result["heavy"] == [] for result in probes)
    assert min(result["took_ms"] for result in probes) < 150, "it takes about 50"


def test_this_checkout_exposes_three_names_and_no_more(tmp_path):
    """An editable install finds the packages from any folder, and offers no `tests`, `models` or `connector`."""
    names = ["kvcore", "kvsim", "kvconnector", "tests", "models", "connector"]
    script = (
        f"import importlib.util as u; print(*[getattr(u.find_spec(n), 'origin', None) for n in {names}], sep='\\n')"
    )
    command = [sys.executable, "-c", script]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    ours, others = result.stdout.split()[:3], result.stdout.split()[3:]
    assert ours == [str(PACKAGES[name] / "__init__.py") for name in names[:3]]
    assert others == ["None"] * 3


def probe(root):
    command = [sys.executable, "-c", PROBE]
    result = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(result.stdout)

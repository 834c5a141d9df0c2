"""vLLM 0.33, of which only the Python can be had without a GPU: this folder's tests run on it, in a process of its own.

`KVTWIN_VLLM_033` names the folder in which its folder `vllm` is: that of `pip download --no-deps vllm==0.33.0`,
unzipped (336 MB, for which CI has no time). Its compiled parts are missed by nothing here: configuration, signatures,
its own scheduler with both halves of the connector, and what they say and count.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PROJECT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FOLDER = os.environ.get("KVTWIN_VLLM_033", "")
RARE = "test_a_broken_connector_is_found[forgetting_ranks]"
"""A control that 250 examples find on 0.32, and do not on 0.33."""


@pytest.mark.skipif(not FOLDER, reason="KVTWIN_VLLM_033 names no folder with the Python of vLLM 0.33")
def test_the_connector_s_tests_pass_on_its_python():
    path = os.pathsep.join([str(Path(FOLDER).resolve()), str(PROJECT), str(PROJECT / "connector")])
    environment = {**os.environ, "PYTHONPATH": path}
    say = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    said = subprocess.run(say, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip().splitlines()[-1].startswith("0.33."), said.stdout
    folder = Path(__file__).parent
    deselected = ["--deselect", f"{folder.relative_to(PROJECT)}/test_real_scheduler.py::{RARE}"]
    markers = ["-m", "not store and not slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *markers, *deselected, str(folder)]
    tested = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=1_500)
    assert tested.returncode == 0, tested.stdout[-4_000:]
    assert " passed" in tested.stdout

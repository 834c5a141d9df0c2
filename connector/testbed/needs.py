"""What the engine and the store need of this machine. Nothing heavier, so that anybody can ask."""

import ctypes
import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path


@cache
def missing(need: str) -> str | None:
    """Why there is no "engine", no "store" or no "nixl" on this machine; or None."""
    if need == "nixl" and importlib.util.find_spec("nixl") is None:
        return "NIXL is not installed (make test installs it where it can)"
    if need == "engine" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (make test installs it where it can)"
    if need != "store":
        return None
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed (make test installs it where it can)"
    if shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is None:
        return "mooncake_master is neither beside Python nor on PATH"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "libibverbs.so.1, which Mooncake is linked against, is not installed"
    return None

"""Where the tests find data that is not part of the project."""

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


def shared_data(*parts: str) -> Path:
    """Path in the shared data folder (KVTWIN_SHARED, else ../shared, then data/); skips the test when it is absent."""
    root = Path(os.environ.get("KVTWIN_SHARED", PROJECT.parent / "shared")) / "data"
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared data not here: {'/'.join(parts)} (set KVTWIN_SHARED to the folder that holds data/)")
    return path

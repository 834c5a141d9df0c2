"""What is written down is true: every command and file that a document names exists, and no path is of one machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES, text_files
from tests.support import PROJECT

MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt|mnt|tmp/w)/")
DOCUMENTS = sorted(path for top in (".", "docs", "tests", "connector") for path in (PROJECT / top).glob("*.md"))


def test_no_machine_paths():
    hits = [
        f"{path.relative_to(PROJECT)}: {line.strip()}"
        for path in text_files()
        for line in path.read_text(encoding="utf-8").splitlines()
        if MACHINE_PATH.search(line)
    ]
    assert hits == []


def test_a_machine_path_is_found():
    assert MACHINE_PATH.search("open('/" + "root/x')")
    assert MACHINE_PATH.search("see /" + "work/data")
    assert not MACHINE_PATH.search("https://example.org/" + "work/data")
    assert not MACHINE_PATH.search("../net/" + "work/")


def commands(text: str, program: str) -> set[str]:
    """First arguments of a program in the text's code: `make test` gives test."""
    found = re.findall(rf"^ {{4}}(?:\S*/)?{program} ([a-z-]+)|`{program} ([a-z-]+)`", text, re.MULTILINE)
    return {indented or inline for indented, inline in found}


def test_commands_are_found_in_code_only():
    text = "    make clean\n    .venv/bin/make x\n`make y` and make z"
    assert commands(text, "make") == {"clean", "x", "y"}


def test_the_readme_and_the_makefile_agree():
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert commands((PROJECT / "README.md").read_text(encoding="utf-8"), "make") == targets


def test_the_readme_and_the_command_line_agree():
    skip_until_wired()
    command = [Path(sys.executable).parent / "kvsim", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    named = commands((PROJECT / "README.md").read_text(encoding="utf-8"), "kvsim")
    assert named
    assert [name for name in named if not re.search(rf"\b{name}\b", shown)] == []


def files_named(text: str) -> set[str]:
    """Paths in backticks and in links; only those with a folder, since a bare name may be anything."""
    quoted = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    linked = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    return {*quoted, *linked}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_files_that_a_document_names_exist(document):
    skip_until_wired()
    named = files_named(document.read_text(encoding="utf-8"))
    missing = {name for name in named if not (PROJECT / name).exists() and not (document.parent / name).exists()}
    assert missing == set()


def test_a_file_that_is_not_there_is_found():
    text = "`kvcore/spec.py`, `kvcore/nothing.py`, [a](docs/b.md), [c](https://example.org/d.md), `x / y`"
    assert files_named(text) == {"kvcore/spec.py", "kvcore/nothing.py", "docs/b.md"}


def skip_until_wired() -> None:
    if not (PACKAGES["kvsim"] / "cli.py").exists():
        pytest.skip("kvsim has no command line yet")

"""No path of anybody's machine in the project, and every command the README gives exists."""

import re

from tests.house.sources import text_files
from tests.support import PROJECT

MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt|mnt|tmp/w)/")


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


def make_targets() -> set[str]:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    return set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())


def commands(text: str, program: str) -> set[str]:
    """First arguments of a program in the text's code: `make test` gives test."""
    return set(re.findall(rf"^ {{4}}(?:\S*/)?{program} ([a-z-]+)|`{program} ([a-z-]+)`", text, re.MULTILINE))


def test_the_readme_and_the_makefile_agree():
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    named = {a or b for a, b in commands(readme, "make")}
    assert named == make_targets()
    assert {a or b for a, b in commands("    make clean\n    .venv/bin/make x\n`make y` and make z", "make")} == {
        "clean", "x", "y",
    }  # fmt: skip

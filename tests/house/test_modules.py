"""No module that nothing imports, no package that is not declared, no test that needs an engine to be collected."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.sources import Module, imports, modules
from tests.support import PROJECT

METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What a room may import that is on PyPI: the base install, and the extra that belongs to it.
EXTRA_OF = {"kvcore": ("xxhash",), "kvconnector": ("connector", "xxhash"), "kvsim": ("sim",)}
ENGINE = {"vllm", "torch", "mooncake"}
OPTIONAL = {"kvsim.cost.estimated": {"aiconfigurator"}}
"""What a module imports when it is asked for, by an extra of the same name."""
COMES_WITH_ENGINE = {"safetensors", "transformers"}
COMES_WITH = {"vllm": "torch", "pydantic": "pydantic_core", "jinja2": "markupsafe"}


def entry_points() -> set[str]:
    """Modules that something outside loads by name."""
    named = [*METADATA["scripts"].values(), *METADATA["entry-points"]["vllm.general_plugins"].values()]
    return {value.partition(":")[0] for value in named}


def names_used(module: Module) -> set[str]:
    """Imports, and modules named in a string: vLLM loads a connector by its dotted name."""
    strings = {node.value for node in ast.walk(module.tree) if isinstance(node, ast.Constant)}
    return imports(module) | {value for value in strings if isinstance(value, str)}


def dead(found: list[Module], used: set[str]) -> set[str]:
    """Modules that neither a module of the product nor an entry point names; packages count by their contents."""
    packages = {module.name.rpartition(".")[0] for module in found}
    for module in found:
        used = used | (names_used(module) - {module.name})
    return {module.name for module in found} - used - packages


def test_every_module_is_used():
    if "kvsim.cli" not in {module.name for module in modules("kvsim")}:
        pytest.skip("kvsim has no command line yet, so nothing is wired")
    assert dead(modules(), entry_points() | names_used_by_tests()) == set()


def test_a_module_that_nothing_imports_is_found():
    pair = [Module("kvsim.a", "import kvsim.b"), Module("kvsim.b", ""), Module("kvsim.c", "'kvsim.c'")]
    assert dead(pair, {"kvsim.a"}) == {"kvsim.c"}


def names_used_by_tests() -> set[str]:
    files = [path for top in ("tests", "benchmarks") for path in (PROJECT / top).rglob("*.py")]
    return {name for path in files for name in names_used(Module(path.stem, path.read_text(encoding="utf-8")))}


def declared(package: str) -> set[str]:
    """Distributions that the package's room declares, by normalised name."""
    lines = [*METADATA["dependencies"]]
    for extra in EXTRA_OF[package]:
        lines += METADATA["optional-dependencies"][extra]
    return {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("-", "_") for line in lines}


@pytest.mark.parametrize("package", list(EXTRA_OF))
def test_third_party_imports_are_declared(package):
    own = set(EXTRA_OF) | set(sys.stdlib_module_names)
    import_names = {"mooncake_transfer_engine": "mooncake"}
    known = {import_names.get(name, name) for name in declared(package)}
    known |= {part for whole, part in COMES_WITH.items() if whole in known}
    for module in modules(package):
        foreign = {name.partition(".")[0] for name in imports(module)} - own
        allowed = known | ENGINE if module.name.startswith("kvsim.reference") else known
        assert foreign <= allowed | OPTIONAL.get(module.name, set()), module.name


def test_what_is_optional_has_an_extra():
    assert {name for names in OPTIONAL.values() for name in names} <= METADATA["optional-dependencies"].keys()


def test_tests_can_be_collected_without_an_engine():
    for path in [*(PROJECT / "tests").rglob("test_*.py"), *(PROJECT / "tests").rglob("conftest.py")]:
        loaded = {name.partition(".")[0] for name in loaded_with(path.read_text(encoding="utf-8"))}
        assert not (ENGINE | COMES_WITH_ENGINE) & loaded, path


def test_what_a_helper_imports_counts():
    assert "tests.support" in loaded_with("from tests.kvsim import test_hits\n") >= {"numpy"}
    assert "numpy" not in loaded_with("def f():\n    import numpy\n")


def loaded_with(text: str) -> set[str]:
    """What loading a test module with this text imports: at its top, and at the tops of the helpers it loads."""
    found: set[str] = set()
    new = top_imports(text)
    while new:
        found |= new
        files = [(PROJECT / Path(*name.split("."))).with_suffix(".py") for name in new if name.startswith("tests.")]
        new = {name for file in files if file.exists() for name in top_imports(file.read_text("utf-8"))} - found
    return found


def top_imports(text: str) -> set[str]:
    """What is imported outside functions."""
    return imports(Module("", "\n".join(ast.unparse(node) for node in ast.parse(text).body if is_import(node))))


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)

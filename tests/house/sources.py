"""The product's own source, parsed: what the house rules look at."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import PROJECT

PACKAGES = {
    "kvcore": PROJECT / "kvcore",
    "kvsim": PROJECT / "kvsim",
    "kvconnector": PROJECT / "connector" / "kvconnector",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One file of a package (or a snippet that a negative control invents)."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def modules(*packages: str) -> list[Module]:
    """Every module of the packages, all three when none is named, in the order of their names."""
    found = []
    for package in packages or PACKAGES:
        root = PACKAGES[package]
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path.read_text(encoding="utf-8")))
    return found


def imports(module: Module) -> set[str]:
    """Dotted names that the module imports anywhere; `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def parameters(function: Function) -> list[ast.arg]:
    """All named parameters, without *args and **kwargs."""
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def text_files() -> list[Path]:
    """Every text file of the project that is written by hand."""
    skipped = {"build", "dist", "out", "__pycache__"}
    found: list[Path] = []
    for top in PROJECT.iterdir():
        if top.name in skipped or (top.name.startswith(".") and top.name not in {".ci", ".gitignore"}):
            continue
        found.extend([top] if top.is_file() else (path for path in top.rglob("*") if path.is_file()))
    return sorted(path for path in found if not skipped & set(path.parts) and b"\0" not in path.read_bytes()[:1024])

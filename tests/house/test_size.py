"""A module fits in the head: at most 400 lines, functions at most 70 and mostly at most 8."""

import ast
import statistics

from tests.house.sources import Function, Module, modules

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_MEDIAN_BODY_LINES = 8

# Longer than the limit for a reason, with the number of lines they may have. Numbers here only ever shrink.
ALLOWED_LINES: dict[str, int] = {}


def too_long(module: Module) -> list[str]:
    """Modules and functions of this file above their limit."""
    lines = len(module.text.splitlines())
    found = [f"{module.name}: {lines} lines"] if lines > ALLOWED_LINES.get(module.name, MAX_MODULE_LINES) else []
    for function in module.functions():
        lines = function.end_lineno - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            found.append(f"{module.name}.{function.name}: {lines} lines")
    return found


def body_lines(function: Function) -> int:
    """Lines of the body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_modules_and_functions_are_short():
    assert [name for module in modules() for name in too_long(module)] == []


def test_half_of_all_functions_are_a_few_lines():
    for package in ("kvcore", "kvsim", "kvconnector"):
        sizes = [body_lines(function) for module in modules(package) for function in module.functions()]
        assert not sizes or statistics.median(sizes) <= MAX_MEDIAN_BODY_LINES, package


def test_an_allowance_is_no_larger_than_its_module():
    sizes = {module.name: len(module.text.splitlines()) for module in modules()}
    assert {name: sizes.get(name) for name in ALLOWED_LINES} == ALLOWED_LINES


def test_a_long_module_and_a_long_function_are_rejected():
    assert too_long(Module("long", "x = 1\n" * 401)) == ["long: 401 lines"]
    assert too_long(Module("long", "def f():\n" + "    x = 1\n" * 70)) == ["long.f: 71 lines"]
    assert too_long(Module("short", "def f():\n" + "    x = 1\n" * 69)) == []

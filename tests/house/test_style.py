"""Names carry their unit; signatures carry no flags, no **kwargs and no -1 for "none"."""

import ast
from collections.abc import Iterator

from tests.house.sources import Module, modules, parameters

MEASURED = {
    "bandwidth", "capacity", "deadline", "delay", "duration", "interval", "latency", "lease", "rtt", "size", "timeout",
    "ttl",
}  # fmt: skip

UNITS = ("_ps", "_ns", "_us", "_ms", "_s", "_bytes", "_tokens", "_blocks", "_len", "_per_s", "_percent")

# The engine's and the model cards' own words, whose unit they imply.
WORDS_OF_THE_FIELD = {
    "block_size",  # tokens
    "chunk_size",  # tokens, of chunked local attention
    "data_parallel_size",  # ranks
    "expert_hidden_size",  # elements
    "expert_intermediate_size",  # elements
    "hash_block_size",  # tokens
    "hidden_size",  # elements
    "intermediate_size",  # elements
    "retention_interval",  # tokens
    "shared_intermediate_size",  # elements
    "tensor_parallel_size",  # ranks
    "vocab_size",  # entries
}


# Overrides of vLLM's, which passes them keywords that differ from version to version.
ENGINE_SIGNATURES = {"kvconnector.connector.start_load_kv", "kvconnector.connector.save_kv_layer"}


def annotated(module: Module) -> Iterator[tuple[str, str]]:
    """(name, annotation) of every annotated variable, field and parameter."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
            yield name, ast.unparse(node.annotation)
    for function in module.functions():
        for parameter in parameters(function):
            if parameter.annotation is not None:
                yield parameter.arg, ast.unparse(parameter.annotation)


def unitless(module: Module) -> list[str]:
    """Names of measured numbers that do not say in what."""
    numbers = {"int", "float", "int | None", "float | None", "Count", "PositiveCount"}
    return sorted(
        {
            f"{module.name}: {name}"
            for name, annotation in annotated(module)
            if annotation in numbers
            and MEASURED & set(name.lower().strip("_").split("_"))
            and not name.lower().endswith(UNITS)
            and name.lower().strip("_") not in WORDS_OF_THE_FIELD
        }
    )


def test_measured_numbers_name_their_unit():
    assert [name for module in modules() for name in unitless(module)] == []


def test_a_number_without_unit_is_rejected():
    bad = Module("bad", "class A:\n    rtt: int\ndef f(timeout: float | None, *, lease_ttl: int): ...\n")
    assert unitless(bad) == ["bad: lease_ttl", "bad: rtt", "bad: timeout"]
    good = Module("good", "rtt_ns: int\nblock_size: int\nsize_bytes: int\nsize: str\ndef f(deadline_ns: int): ...\n")
    assert unitless(good) == []


def flags(module: Module) -> list[str]:
    """Parameters that are bool, in functions whose name is public."""
    return [
        f"{module.name}.{function.name}({parameter.arg})"
        for function in module.functions()
        if not function.name.startswith("_")
        for parameter in parameters(function)
        if parameter.annotation is not None and ast.unparse(parameter.annotation) in {"bool", "bool | None"}
    ]


def test_no_function_of_kvcore_takes_a_flag():
    assert [flag for module in modules("kvcore") for flag in flags(module)] == []
    assert flags(Module("bad", "def f(x: int, *, dry: bool = False): ...")) == ["bad.f(dry)"]


def sentinels(module: Module) -> list[str]:
    """`-1` returned or as a default, and ** parameters: both hide what a caller must know."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) == "-1":
            found.append(f"{module.name}: return -1")
        if isinstance(node, ast.AnnAssign) and node.value is not None and ast.unparse(node.value) == "-1":
            found.append(f"{module.name}: {ast.unparse(node.target)} = -1")
    for function in module.functions():
        defaults = [*function.args.defaults, *(value for value in function.args.kw_defaults if value)]
        if any(ast.unparse(value) == "-1" for value in defaults):
            found.append(f"{module.name}.{function.name}: default -1")
        if function.args.kwarg is not None and f"{module.name}.{function.name}" not in ENGINE_SIGNATURES:
            found.append(f"{module.name}.{function.name}: **{function.args.kwarg.arg}")
    return found


def test_no_minus_one_and_no_kwargs():
    assert [name for module in modules() for name in sentinels(module)] == []
    bad = Module("bad", "x: int = -1\ndef f(a=-1, **more): return -1\n")
    assert len(sentinels(bad)) == 4

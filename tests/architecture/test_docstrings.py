"""A docstring names only arguments and attributes that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import MODULES, name, tree
from tfdist.config import OptimizerConfig

_ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:(?: |$)")
# Attributes that `__getattr__` finds: the arguments of all optimizers.
_FOUND = {"OptimizerConfig": OptimizerConfig("package.module:Name").option_fields()}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def entries(docstring: str, section: str) -> list[str]:
    """Returns the names that a section of a docstring lists, such as `Args`."""
    found = re.search(rf"^{section}:\n((?:(?: {{4}}.*)?\n)*)", docstring + "\n", re.MULTILINE)
    lines = found[1].splitlines() if found else []
    return [each.strip("* ") for line in lines if (entry := _ENTRY.match(line)) for each in entry[1].split(",")]


def parameters(function: Function) -> set[str]:
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {each.arg for each in every if each}


def fields(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class's body assigns or declares: fields of a dataclass or NamedTuple, attributes of a class."""
    targets = [each for line in node.body if isinstance(line, ast.Assign) for each in line.targets]
    targets += [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def members(node: ast.ClassDef) -> set[str]:
    """Returns a class's fields and properties, and the attributes that its methods assign."""
    functions = [each for each in node.body if isinstance(each, Function)]
    assigned = {
        each.attr
        for function in functions
        for each in ast.walk(function)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    properties = {each.name for each in functions if any("property" in ast.unparse(of) for of in each.decorator_list)}
    return fields(node) | properties | assigned


def classes() -> dict[str, ast.ClassDef]:
    """Returns the package's classes by name."""
    nodes = [node for path in MODULES.values() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    return {node.name: node for node in nodes}


def with_bases(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yields a class and those of the package that it inherits from."""
    yield node
    for base in node.bases:
        found = known.get(ast.unparse(base).rpartition(".")[2].partition("[")[0])
        if found is not None and found is not node:
            yield from with_bases(found, known)


def unknown(module: ast.Module, known: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yields what a module's docstrings name that is not there, as `line: name`."""
    for node in ast.walk(module):
        if not isinstance(node, (ast.ClassDef, *Function.__args__)) or not (said := ast.get_docstring(node)):
            continue
        arguments, attributes = set[str](), set[str]()
        if isinstance(node, ast.ClassDef):
            family = list(with_bases(node, known))
            attributes = set().union(*map(members, family), _FOUND.get(node.name, ()))
            made = [each for of in family for each in of.body if isinstance(each, Function) and each.name == "__init__"]
            arguments = parameters(made[0]) if made else set().union(*map(fields, family))
        else:
            arguments = parameters(node)
        yield from (f"{node.lineno}: {each}" for each in entries(said, "Args") if each not in arguments)
        yield from (f"{node.lineno}: {each}" for each in entries(said, "Attributes") if each not in attributes)


def test_docstrings_name_arguments_and_attributes_that_exist():
    known = classes()
    wrong = [f"{name(path)}:{each}" for path in MODULES.values() for each in unknown(tree(path), known)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('def f(a, *b, **c):\n    """Does.\n\n    Args:\n        a: A.\n        *b: B.\n        **c: C.\n    """', []),
        ('def f(a):\n    """Does.\n\n    Args:\n        a: A, as\n            b: no entry.\n        c: C.\n    """', ["1: c"]),
        ('class C:\n    """One.\n\n    Args:\n        a: A.\n    """\n    def __init__(self, b): pass', ["1: a"]),
        ('class C:\n    """One.\n\n    Args:\n        a: A.\n\n    Attributes:\n        a: A.\n    """\n    a: int', []),
        ('class C:\n    """One.\n\n    Attributes:\n        a: A.\n        b: B.\n    """\n    def f(self): self.a = 1', ["1: b"]),
        ('class B:\n    @property\n    def p(self): pass\n    def q(self): pass\nclass C(B):\n    """One.\n\n    Attributes:\n        p: P.\n        q: Q.\n    """', ["5: q"]),
    ],
)  # fmt: skip
def test_the_search_finds_names_that_do_not_exist(source, wrong):
    module = ast.parse(source)
    known = {node.name: node for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    assert list(unknown(module, known)) == wrong

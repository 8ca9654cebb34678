"""Only `tfdist/compat` names what is private in Keras and TensorFlow, looks at callers' frames, or swaps an object's class.

And no test names what is private in tfdist.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import MODULES, PACKAGE, ROOT, name, tree

COMPAT = PACKAGE / "compat"
OUTSIDE = [path for path in MODULES.values() if COMPAT not in path.parents]

PRIVATE_PACKAGES = ("keras.src", "tensorflow.python", "tensorflow.compiler", "tensorflow.core")
# Python's own: documented although their names begin with an underscore, but for the last two.
PYTHON = {"os._exit", "sys._current_frames", "atexit._run_exitfuncs", "runpy._run_module_as_main"}
NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}
FRAMES = {"f_back", "f_code", "f_globals", "f_locals"}
ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr"}
_IMPORT = re.compile(r"\b(from|import) tfdist\b")
# Private in Keras and TensorFlow, where tests need them; tfdist has attributes of the same names.
FOREIGN_IN_TESTS = {
    "EXTENDED._get_variable_creator_initial_value",
    "distributed._iterators",
    "eager_context._context",
    "eager_context.context()._seed",
    "inner._learning_rate",
    "v._value",
    "variable._value",
}


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore, or with two and does not end with two."""
    return bool(re.fullmatch(r"_\w*[a-zA-Z0-9]\w*", name)) and not (name.startswith("__") and name.endswith("__"))


def defined_names(module: ast.AST) -> set[str]:
    """Returns the private names that a module defines: functions, classes, variables and attributes of `self`."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def names_of_tfdist() -> set[str]:
    """Returns the private names that the modules of tfdist define."""
    return set().union(*(defined_names(tree(path)) for path in MODULES.values())) - NAMED_TUPLES


def named_in_compat() -> set[str]:
    """Returns the private names that `tfdist/compat` reads, and does not define, on other objects."""
    names = set()
    for path in COMPAT.rglob("*.py"):
        own = defined_names(tree(path))
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr not in own:
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return {name for name in names if is_private(name)} - NAMED_TUPLES


def findings(module: ast.AST, own: set[str], foreign: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, what is named) for each private thing of Keras, TensorFlow or the interpreter.

    Args:
        module: The module's syntax tree.
        own: The private names that tfdist defines.
        foreign: Private names that belong to Keras or TensorFlow. tfdist may define the same names on its own objects, so
            they are reported only where the object is not `self`, `cls` or `super()`.
    """
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _in_private_package(alias.name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _in_private_package(name := f"{node.module}.{alias.name}") or (
                    node.module and not node.module.startswith("tfdist") and is_private(alias.name)
                ):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute):
            yield from ((node.lineno, name) for name in _attribute(node, own, foreign))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTRIBUTE_FUNCTIONS:
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    name = argument.value
                    if name == "__class__" and node.func.id in ("setattr", "delattr"):
                        yield node.lineno, "assignment to __class__"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Also a constant or a table of names that getattr and the like are given.
            name = node.value
            if is_private(name):
                hidden = not name.startswith("_tfdist_") and (name in foreign or name not in own)
            else:
                hidden = bool(re.fullmatch(r"[\w.]+", name)) and _in_private_package(name)
            if hidden:
                yield node.lineno, f'"{name}"'


def _attribute(node: ast.Attribute, own: set[str], foreign: set[str]) -> Iterator[str]:
    name = node.attr
    if name == "__internal__" or name in FRAMES:
        yield ast.unparse(node)
    elif name == "__class__" and isinstance(node.ctx, ast.Store):
        yield "assignment to __class__"
    elif _in_private_package(ast.unparse(node)):
        yield ast.unparse(node)
    elif not is_private(name) or name in NAMED_TUPLES or ast.unparse(node) in PYTHON:
        return
    elif name not in own or (name in foreign and not _is_own(node.value)):
        yield ast.unparse(node)


def _is_own(node: ast.AST) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _in_private_package(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in PRIVATE_PACKAGES)


def test_no_file_but_those_of_compat_names_what_is_private():
    own = names_of_tfdist()
    foreign = named_in_compat()
    found = [
        f"{name(path)}:{line}: {private}" for path in OUTSIDE for line, private in findings(tree(path), own, foreign)
    ]
    assert not found, (
        "private names of Keras, TensorFlow or Python outside of tfdist/compat:\n  "
        + "\n  ".join(found)
        + "\nAdd a function to tfdist/compat/keras_internals.py, keras_losses.py, keras_loops.py, tf_internals.py, tf_cluster.py or "
        "call_stack.py, call it here, and let tests/architecture/test_keras_internals.py check the name."
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from keras import src", "keras.src"),
        ("from tensorflow.python.eager import context", "tensorflow.python.eager.context"),
        ("importlib.import_module('tensorflow.python.eager')", '"tensorflow.python.eager"'),
        ("from numpy import _core", "numpy._core"),
        ("tf.__internal__.EagerTensor", "tf.__internal__"),
        ("sys._getframe(1)", "sys._getframe"),
        ("frame.f_locals['self']", "frame.f_locals"),
        ("value.__class__ = Other", "assignment to __class__"),
        ("setattr(value, '__class__', Other)", "assignment to __class__"),
        ("model._flatten_layers()", "model._flatten_layers"),
        ("getattr(model, '_flatten_layers')", '"_flatten_layers"'),
        ("NAME = '_flatten_layers'\ngetattr(model, NAME)", '"_flatten_layers"'),
        ("coordinator._cluster.schedule()", "coordinator._cluster"),  # tfdist has an attribute of this name, too
    ],
)
def test_the_search_finds_what_is_private(source, expected):
    assert expected in [what for _, what in findings(ast.parse(source), {"_own", "_cluster"}, {"_cluster"})]


@pytest.mark.parametrize(
    "source",
    [
        "from tensorflow import keras",
        "from tfdist.data.arrays import _helper",
        "self._own = other._own",
        "self._cluster.schedule()",
        "getattr(self, '_own')",
        "getattr(model, '_tfdist_group')",
        "kind = value.__class__",
        "loss._replace(loss=1)",
        "os._exit(1)",
        "'a text about keras.src and _names'",
    ],
)
def test_the_search_leaves_what_is_public_or_our_own(source):
    assert not list(findings(ast.parse(source), {"_own", "_cluster"}, {"_cluster"}))


def constants_of_compat(module: ast.AST) -> list[str]:
    """Returns the names of compat's constants (`KERAS_...`, `TF_...`) that a file imports or reads from a module."""
    names = [alias.name for node in ast.walk(module) if isinstance(node, ast.ImportFrom) for alias in node.names]
    names += [node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    return [name for name in names if name.startswith(("KERAS_", "TF_")) and name.isupper()]


def test_only_compat_uses_its_constants():
    found = [f"{name(path)} uses {constants}" for path in OUTSIDE if (constants := constants_of_compat(tree(path)))]
    assert not found, "\n".join([*found, "Call a function of tfdist/compat instead."])


def test_no_c_function_is_given_an_object_of_tensorflow():
    """`tfdist/runtime` and `tfdist/launch` know no TensorFlow, so that what they call by ctypes is the system's and the interpreter's."""
    users = {
        name(path)
        for path in MODULES.values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Import) and "ctypes" in (each.name for each in node.names)
    }
    assert users, "this test looks for nothing"
    assert all(each.startswith(("tfdist/runtime/", "tfdist/launch/")) for each in users)


def uses_of_tfdist(module: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, what is named) for each private name of tfdist that a test uses, also in a program in a string.

    Args:
        module: The test's syntax tree.
        own: The private names that tfdist defines. Those that the test defines itself may be its own.
    """
    own = own - defined_names(module)
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfdist":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names if alias.name in own)
        elif isinstance(node, ast.Attribute) and node.attr in own and not _is_own(node.value):
            if ast.unparse(node) not in FOREIGN_IN_TESTS:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ATTRIBUTE_FUNCTIONS:
            names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            yield from ((node.lineno, f'"{name}"') for name in names if name in own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _IMPORT.search(node.value):
            with contextlib.suppress(SyntaxError):
                yield from ((node.lineno, what) for _, what in uses_of_tfdist(ast.parse(node.value), own))


def test_no_test_uses_what_is_private_in_tfdist():
    own = names_of_tfdist()
    found = [
        f"{name(path)}:{line}: {private}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, private in uses_of_tfdist(tree(path), own)
    ]
    assert not found, (
        "private names of tfdist in tests:\n  "
        + "\n  ".join(found)
        + "\nTest what a caller sees, or make the name public if it has a contract of its own."
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from tfdist.data import _hidden", ["tfdist.data._hidden"]),
        ("source._hidden", ["source._hidden"]),
        ("source.made()._hidden = 3", ["source.made()._hidden"]),
        ("monkeypatch.setattr(source, '_hidden', 3)", ['"_hidden"']),
        ("getattr(source, '_hidden')", ['"_hidden"']),
        ("PROGRAM = 'from tfdist.data import source; source._hidden = 3'", ["source._hidden"]),
        ("self._hidden = other._hidden", []),  # the test's own
        ("super()._hidden()", []),
        ("variable._value", []),  # Keras'
        ("setattr(source, 'limit', '_hidden')", []),
        ("'a text that says import tfdist and _hidden'", []),
    ],
)
def test_the_search_finds_what_tests_use(source, expected):
    assert [what for _, what in uses_of_tfdist(ast.parse(source), {"_hidden", "_value"})] == expected

"""Random generators from which Python code draws: those of the process, and those that the code holds."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfdist.aliases import Json, RandomGenerator
from tfdist.compat.tf_internals import PYTHON_FUNCTION_HOLDERS

# The functions of the modules `random` and `np.random` are bound methods of these generators.
PROCESS_GENERATORS: tuple[RandomGenerator, RandomGenerator] = (random.getstate.__self__, np.random.get_state.__self__)  # type: ignore[attr-defined]
_KINDS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_LIBRARIES = {"tensorflow", "keras", "numpy", "tfdist"}
# Limits of the search, for example in a list of a million file names.
_MOST_OBJECTS = 5000
_MOST_ITEMS = 100


def find_generators(*roots: Any) -> list[RandomGenerator]:
    """Returns the generators that Python code can reach, in an order that is the same in the next run of the program.

    The effect of Python code is unknown before it runs. Therefore the search covers the values that the code holds: attributes and items of
    objects, closures, defaults, and the globals that functions name. It misses state in modules of C extensions and installed
    packages.

    Args:
        roots: Functions and objects.
    """
    visited: dict[int, Any] = {}  # by address; holding the values keeps their addresses in use
    queue = collections.deque(roots)
    while queue and len(visited) < _MOST_OBJECTS:
        value = queue.popleft()
        if id(value) not in visited:
            visited[id(value)] = value
            queue.extend(_held(value))
    return [v for v in visited.values() if isinstance(v, _KINDS) and not isinstance(v, random.SystemRandom)]


def get_state(generator: RandomGenerator) -> Json:
    """Returns a generator's state: plain values and arrays."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits(generator).state


def set_state(generator: RandomGenerator, state: Json) -> None:
    """Sets the state that `get_state` returned, also if JSON has converted its tuples to lists."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def reset(generator: RandomGenerator) -> None:
    """Sets a generator to a state that is the same in every process."""
    if isinstance(generator, (random.Random, np.random.RandomState)):
        generator.seed(0)
    else:
        bits = _bits(generator)
        bits.state = type(bits)(0).state


def _bits(generator: np.random.Generator | np.random.BitGenerator) -> np.random.BitGenerator:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value[:_MOST_ITEMS]
    elif isinstance(value, dict):
        yield from itertools.islice(value.values(), _MOST_ITEMS)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.BuiltinMethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _held_by_function(value)
    elif isinstance(value, type):
        if not _is_library(value.__module__):
            yield from (attribute for attribute in vars(value).values() if callable(attribute))
            yield from value.__bases__
    elif isinstance(value, PYTHON_FUNCTION_HOLDERS) or not _is_library(type(value).__module__):
        yield from getattr(value, "__dict__", {}).values()
        yield type(value)


def _held_by_function(function: types.FunctionType) -> Iterator[Any]:
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            pass
    yield from cells.values()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not _is_library(function.__module__ or "") and "site-packages" not in function.__code__.co_filename:
        yield from _named(function.__code__, collections.ChainMap(cells, function.__globals__))


def _named(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the globals that `code` names, and the attributes of modules that it names, such as `np.random.normal`."""
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            yield value  # the code loads no attribute of the previous value
            value = names.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            if value in (random, np, np.random) or not _is_library(value.__name__):
                value = getattr(value, step.argval, None)
            else:
                value = None
        else:
            yield value
            value = None
    for constant in code.co_consts:  # the code of inner functions and comprehensions
        if isinstance(constant, types.CodeType):
            yield from _named(constant, names)


def _is_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names - {"__main__"}

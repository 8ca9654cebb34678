"""Random generators from which Python code draws: those of the process, and those that the code holds."""

from __future__ import annotations

import collections
import dis
import functools
import gc
import json
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.aliases import Json, RandomGenerator
from tfdist.compat.tf_internals import PYTHON_FUNCTION_HOLDERS

# The functions of the modules `random` and `np.random` are bound methods of these generators.
PROCESS_GENERATORS: tuple[RandomGenerator, RandomGenerator] = (random.getstate.__self__, np.random.get_state.__self__)  # type: ignore[attr-defined]
_KINDS = (
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    random.Random,
    keras.random.SeedGenerator,
)
_HOLDERS = (
    list,
    tuple,
    dict,
    functools.partial,
    types.MethodType,
    types.BuiltinMethodType,
    *PYTHON_FUNCTION_HOLDERS,
)
_LIBRARIES = {"tensorflow", "keras", "numpy", "tfdist"}
# Limits of the search, for example in a list of a million file names.
_MOST_OBJECTS = 5000
_MOST_ITEMS = 100
_ARRAY = "array of "


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
    found = [v for v in visited.values() if isinstance(v, _KINDS) and not isinstance(v, random.SystemRandom)]
    # Seed generators of layers are part of the model's state.
    layers = [value for value in visited.values() if isinstance(value, keras.Layer)]
    of_layers = {id(variable) for layer in layers for variable in layer.variables}
    return [v for v in found if not isinstance(v, keras.random.SeedGenerator) or id(v.state) not in of_layers]


def get_states(generators: Sequence[RandomGenerator]) -> list[Json]:
    """Returns the states of generators, as plain JSON."""
    return [to_json(_get_state(generator)) for generator in generators]


def set_states(generators: Sequence[RandomGenerator], states: Sequence[Json]) -> None:
    """Sets the states that `get_states` returned, except those that are None."""
    for generator, state in zip(generators, states, strict=True):
        if state is not None:
            _set_state(generator, from_json(state))


def reset(generator: RandomGenerator) -> None:
    """Sets a generator to a state that is the same in every process."""
    if isinstance(generator, (random.Random, np.random.RandomState)):
        generator.seed(0)
    else:
        kind: Any = type(_bits(generator))
        _set_state(generator, _get_state(kind(0)))


def to_json(state: Any) -> Json:
    """Returns a state of plain values and arrays as plain JSON."""
    return json.loads(json.dumps(state, default=_plain))


def from_json(state: Json) -> Any:
    """Returns the state of which `to_json` returned this JSON, with lists in place of tuples."""
    return json.loads(json.dumps(state), object_hook=_decode_array)


def _get_state(generator: RandomGenerator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, keras.random.SeedGenerator):
        return np.asarray(generator.state)
    return _bits(generator).state


def _set_state(generator: RandomGenerator, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, keras.random.SeedGenerator):
        generator.state.assign(state)
    else:
        _bits(generator).state = state


def _bits(generator: RandomGenerator) -> Any:
    return getattr(generator, "bit_generator", generator)


def _plain(value: Any) -> Json:
    if isinstance(value, (np.ndarray, np.generic)):
        return {_ARRAY + value.dtype.str: value.tolist()}
    raise TypeError(f"state_dict() must return plain values and arrays. Received: {type(value).__name__}.")


def _decode_array(values: dict[str, Any]) -> Any:
    if len(values) == 1:
        ((name, value),) = values.items()
        if name.startswith(_ARRAY):
            return np.asarray(value, name.removeprefix(_ARRAY))
    return values


def _held(value: Any) -> Sequence[Any]:
    if isinstance(value, types.FunctionType):
        return list(_held_by_function(value))
    if isinstance(value, _HOLDERS):
        return gc.get_referents(value)[:_MOST_ITEMS]
    kind = value if isinstance(value, type) else type(value)
    if _is_library(kind.__module__):
        return []
    return [*getattr(value, "__dict__", {}).values(), *(kind.__bases__ if kind is value else [kind])]


def _held_by_function(function: types.FunctionType) -> Iterator[Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: value for name, cell in cells for value in gc.get_referents(cell)}  # none if not assigned yet
    yield from closure.values()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not _is_library(function.__module__ or "") and "site-packages" not in function.__code__.co_filename:
        yield from _named(function.__code__, collections.ChainMap(closure, function.__globals__))


def _named(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the globals that `code` names, and the attributes of modules that it names, such as `np.random.normal`.

    The order of its instructions is needed: `np.random.default_rng(3).normal()`, which is the remedy, has the same names.
    """
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            is_searched = value in (random, np, np.random) or not _is_library(value.__name__)
            value = getattr(value, step.argval, None) if is_searched else None
        else:
            yield value
            value = names.get(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else None
    for constant in code.co_consts:  # the code of inner functions and comprehensions
        if isinstance(constant, types.CodeType):
            yield from _named(constant, names)


def _is_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names - {"__main__"}

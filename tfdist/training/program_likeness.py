"""The comparison of the workers' programs before training: arguments of the script, model, optimizer, `compile`.

Workers that train in step must run the same program. TensorFlow notices only different shapes: another loss or dropout rate on one
worker would raise no error. A false alarm is worse than a miss, so properties that may differ between tasks or runs are not compared:
automatic names, seeds, addresses of objects, the code of functions, callbacks, paths, and arguments that name a task.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.cluster import task_versions
from tfdist.compat import keras_internals, optimizer_search
from tfdist.training.alike import Alike

_REMEDY = (
    "Start all tasks with the same arguments, and build and compile the same model; for actions of one task alone, test "
    "trainer.is_chief or an environment variable."
)
# Entries of Keras' configurations that may differ between runs of one program, and the arguments of `compile` that are optimizers.
_NOT_COMPARED = ("seed", "module", "registered_name", "shared_object_id", "build_config", "optimizer")
_PLAIN = (bool, int, float, str, type(None))
# Addresses, and numbers that Keras appends to names in the order in which the process creates objects.
_OF_PROCESS = re.compile(r"0x[0-9a-f]+|_\d+\b")
# Words in names of arguments whose values may differ between tasks.
_OF_TASKS = re.compile(
    r"(^|[-_.])(task|rank|workers?|node|index|idx|id|host(s|name)?|addr(ess)?|ip|port|local|gpus?|devices?|cuda|proc(ess)?|shard|part(ition)?|"
    r"threads?|dir(ectory)?|folder|path|file|logs?|out(put)?|workdir|name|tag|token|time|date|seed|verbos(e|ity)|profile|debug)([-_.]|$)"
)
_LOCATION = re.compile(r"[/\\:@]|\.\w*[a-zA-Z]")  # a path, a host, or a file's name
_COUNTED = re.compile(r"(?<=[A-Za-z_-])\d+$")  # the number in worker-1

# For each model the arguments of its last `compile`, and its description then: the chief's learning rate applies to later changes.
_described: weakref.WeakKeyDictionary[keras.Model, tuple[Any, dict[str, str]]] = weakref.WeakKeyDictionary()


def add_program(alike: Alike, model: keras.Model, workers: int) -> None:
    """Adds the properties of the program that must be equal on all workers."""
    compiled = keras_internals.compile_arguments(model)
    known = _described.get(model)
    if known is None or known[0] is not compiled:
        optimizers = optimizer_search.optimizers(model)
        layers: list[Any] = []
        for layer in keras_internals.layers(model):
            # The configuration of a nested model holds its layers, which are in the list, too.
            if isinstance(layer, keras.Model):
                layer = type(layer).__name__
            layers.append(layer)
        described = {
            "The arguments of the script": "\n".join(_script_arguments(sys.argv[1:], workers)),
            "The model": describe(layers, "layers"),
            "The learning rate": ", ".join(map(_given_rate, optimizers)),
            "The optimizer": describe(optimizers, "optimizers"),
            "The arguments of compile": describe(compiled),
        }
        known = compiled, described
        _described[model] = known
    for name, text in known[1].items():
        alike.add(name, text, _REMEDY)


def describe(value: Any, path: str = "") -> str:
    """Returns a line for each part of a value: `layers[1].Dense.units: 4`. An object that Keras cannot serialize is described by its name."""
    return _OF_PROCESS.sub("", "\n".join(_lines(value, path)))


def _lines(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping) and "class_name" in value:
        path = f"{path}.{value['class_name']}"
        yield path
        # The configuration of a lambda is its bytecode, which differs between versions of Python.
        if value["class_name"] == "__lambda__":
            return
        value = value.get("config")
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            if name not in _NOT_COMPARED:
                yield from _lines(value[name], f"{path}.{name}".lstrip("."))
    elif isinstance(value, _PLAIN):
        yield f"{path}: {value!r}"
    elif isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
        yield f"{path}: {list(value)!r}"
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _lines(item, f"{path}[{number}]")
    else:
        yield from _lines(_serialized(value), path)


def _serialized(value: Any) -> Any:
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    if isinstance(value, types.FunctionType):
        return name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about lambdas, which cannot be loaded
            return keras.saving.serialize_keras_object(value)
    except Exception:  # a user's class may raise any error
        return name


def _script_arguments(argv: Sequence[str], workers: int) -> Iterator[str]:
    """Yields the arguments of the user's script, without those that may differ between tasks: names, paths, and numbers up to `workers`."""
    script = os.path.realpath(getattr(sys.modules.get("__main__"), "__file__", None) or os.sep)
    libraries = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    # `tfdist train` has compared its configuration; a launcher in a library, such as Ray's, gives each task different arguments.
    if task_versions.configuration or any(script.startswith(f"{path}{os.sep}") for path in libraries):
        return
    named: dict[str, list[str]] = {}
    flag = ""
    for argument in argv:
        assigned = "="
        if re.match(r"-+[A-Za-z]", argument):
            flag, assigned, argument = argument.partition("=")
        if assigned:  # else the next argument is the flag's value
            named.setdefault(flag, []).append(argument)
            flag = ""
    for flag, values in sorted(named.items()):
        if not _OF_TASKS.search(flag.lower()):
            shown = [_argument(value, workers) for value in values]
            yield " ".join(filter(None, [flag, *shown]))


def _argument(value: str, workers: int) -> str:
    """Returns an argument's value for the comparison; empty if the value may differ between tasks."""
    if _LOCATION.search(value) or (value.isdecimal() and int(value) <= workers):
        return ""
    return _COUNTED.sub("", value)


def _given_rate(optimizer: keras.optimizers.Optimizer) -> str:
    """Returns the learning rate that this worker's program has set, before the chief's replaced it."""
    rate: Any = getattr(getattr(optimizer, "inner_optimizer", optimizer), "learning_rate", None)
    variable: Any = getattr(rate, "value", None)
    if not hasattr(variable, "given_and_broadcast"):
        return "a schedule"
    local_rate, broadcast = variable.given_and_broadcast
    now = float(rate)
    if now != broadcast:  # set since then
        local_rate = now
    return f"{local_rate:.6g}"

"""Comparison of the workers' programs before training: arguments of the script, model, `compile`, `fit`.

Workers that train in step must run the same program. TensorFlow notices only different shapes: another loss or dropout rate on one
worker would raise no error. A false alarm is worse than a miss, so properties that may differ between tasks or runs are not compared:
automatic names, seeds, addresses of objects, the code of functions, callbacks, paths, and arguments that name a task.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import types
import warnings
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.cluster import task_versions
from tfdist.collectives.ranks import Ranks
from tfdist.compat import optimizer_search

Item = tuple[str, str]  # the name of a compared property, and its value

_TEXT_LENGTH = 200  # characters of an item in a message
_MOST_ITEMS = 5000  # items that are compared one by one
# Arguments besides those that `checks` compares.
_FIT = (
    "validation_freq",
    "validation_split",
    "class_weight",
    "shuffle",
)
_COMPILE = ("loss_weights", "metrics", "weighted_metrics", "run_eagerly", "steps_per_execution", "jit_compile")
# Entries of Keras' configurations that may differ between runs of one program.
_NOT_COMPARED = ("seed", "module", "registered_name", "shared_object_id", "build_config")
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_NUMBERED = re.compile(r"_\d+$")  # Keras numbers the layers of a class in the order in which the process creates them
# Words in names of arguments whose values may differ between tasks.
_OF_TASKS = re.compile(
    r"(^|[-_.])(task|rank|workers?|node|index|idx|id|host(s|name)?|addr(ess)?|ip|port|local|gpus?|devices?|cuda|proc(ess)?|shard|part(ition)?|"
    r"threads?|dir(ectory)?|folder|path|file|logs?|out(put)?|workdir|name|tag|token|time|date|seed|verbos(e|ity)|profile|debug)([-_.]|$)"
)
_LOCATION = re.compile(r"[/\\:@]|\.\w*[a-zA-Z]")  # a path, a host, or a file's name
_COUNTED = re.compile(r"(?<=[A-Za-z_-])\d+$")  # the number in worker-1

# For each model its optimizer and loss, and its items. An entry is valid until the model is compiled again.
_described: weakref.WeakKeyDictionary[keras.Model, tuple[Any, list[Item]]] = weakref.WeakKeyDictionary()


def describe(model: keras.Model, arguments: Mapping[str, Any], workers: int) -> list[Item]:
    """Returns the items that must be equal on all workers, likely causes of other differences first."""
    compiled = (model.optimizer, getattr(model, "loss", None))
    known = _described.get(model)
    if known is None or any(a is not b for a, b in zip(known[0], compiled, strict=True)):
        known = compiled, [*_script_arguments(sys.argv[1:], workers), *_model(model), *_compiled(model)]
        _described[model] = known
    arguments_of_fit = {name: arguments[name] for name in _FIT if arguments.get(name) is not None}
    return [*known[1], *((f"fit's {name}", _text(value)) for name, value in arguments_of_fit.items())]


def digest(items: Sequence[Item]) -> float:
    """Returns one number for all items."""
    return float(zlib.crc32(repr(items).encode(errors="replace")))


def difference_message(ranks: Ranks, items: Sequence[Item]) -> str:
    """Returns the message about the first difference between the workers' programs; `items` describe this worker's. A collective."""
    most = min(int(ranks.gather(float(len(items)))[:, 0].max()), _MOST_ITEMS)
    local_digests = [digest([item]) for item in items[:most]]
    digests = ranks.gather(*local_digests, *[0.0] * (most - len(local_digests)))
    unlike = (digests != digests[0]).any(0)
    number = int(unlike.argmax()) if unlike.any() else most
    name, value = items[number] if number < len(items) else ("", "")
    texts = [ranks.gather_texts(text[:_TEXT_LENGTH]) for text in (name, value)]
    names, values = ([text[rank] for rank in (0, _first_other(digests, number))] for text in texts)
    other = f"worker:{_first_other(digests, number)}"
    if names[0] == names[1]:
        difference = f"{names[0]} is {values[1]} on {other}, and {values[0]} on worker:0"
    else:
        parts = [f"{name} ({value})" if name else "nothing more" for name, value in zip(names, values, strict=True)]
        difference = f"{other} has {parts[1]} where worker:0 has {parts[0]}"
    return (
        f"All workers must run the same program. Received: {difference}. Start all with the same arguments, and build and compile the same model; "
        "for actions of one task alone, test trainer.is_chief or an environment variable."
    )


def _first_other(digests: np.ndarray, number: int) -> int:
    """Returns the first worker whose item at index `number` differs from worker 0's."""
    column = digests[:, number] if number < digests.shape[1] else np.arange(len(digests))
    return int((column != column[0]).argmax())


def _script_arguments(argv: Sequence[str], workers: int) -> Iterator[Item]:
    """Yields the arguments of the user's script, without those that may differ between tasks: names, paths, and numbers up to `workers`."""
    script = os.path.realpath(getattr(sys.modules.get("__main__"), "__file__", None) or os.sep)
    libraries = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    # `tfdist train` has compared its configuration; a launcher in a library, such as Ray's, gives each task different arguments.
    if task_versions.configuration or any(script.startswith(f"{path}{os.sep}") for path in libraries):
        return
    named: dict[str, list[str]] = {}
    flag = ""
    for argument in argv:
        if is_flag := bool(re.match(r"-+[A-Za-z]", argument)):
            flag, assigned, argument = argument.partition("=")
        if not is_flag or assigned:
            named.setdefault(flag, []).append(argument)
            flag = ""
    for flag, values in sorted(named.items()):
        if not _OF_TASKS.search(flag.lower()):
            shown = [value for value in map(functools.partial(_argument, workers=workers), values) if value]
            yield f"the script's argument {flag}".strip(), " ".join(shown)


def _argument(value: str, workers: int) -> str:
    """Returns an argument's value for the comparison; empty if the value may differ between tasks."""
    if _LOCATION.search(value) or (value.isdecimal() and int(value) <= workers):
        return ""
    return _COUNTED.sub("", value)


def _model(model: keras.Model) -> Iterator[Item]:
    """Yields the model's class, its layers with their configurations, and its variables."""
    yield "the model's class", type(model).__name__
    yield from _layers(model, "")
    for variable in model.variables if model.built else ():
        path = "/".join(_NUMBERED.sub("", part) for part in variable.path.split("/"))
        kind = "trainable" if variable.trainable else "not trainable"
        yield f"the model's variable {path}", f"{tuple(variable.shape)} {variable.dtype}, {kind}"


def _layers(parent: keras.layers.Layer, inside: str) -> Iterator[Item]:
    for number, layer in enumerate(getattr(parent, "layers", ()), 1):
        where = f"layer {number}{inside}"
        yield f"the model's {where}", type(layer).__name__
        if getattr(layer, "layers", None):
            yield from _layers(layer, f" of {where}")
            continue
        for name, value in _config(layer).items():
            yield f"the model's {where} ({type(layer).__name__}): {name}", value


def _compiled(model: keras.Model) -> Iterator[Item]:
    """Yields the arguments of a model's `compile`."""
    yield "the model's loss", _text(getattr(model, "loss", None))
    for number, optimizer in enumerate(optimizer_search.optimizers(model)):
        title = f"the optimizer{f' {number + 1}' if number else ''}"
        yield title, type(optimizer).__name__
        while optimizer is not None:
            for name, value in _config(optimizer).items():
                if name == "learning_rate" and (rate := _given_rate(optimizer)) is not None:
                    value = f"{rate:.6g}"
                if name != "inner_optimizer":
                    yield f"{title}: {name}", value
            optimizer = getattr(optimizer, "inner_optimizer", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about lambdas, which cannot be loaded
            config = model.get_compile_config() or {}
    except Exception:  # a user's object may raise any error
        config = {}
    for name in _COMPILE:
        if name in config:
            yield f"compile's {name}", _text(config[name])


def _given_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns the learning rate that this worker's program has set, before the chief's replaced it; None for a schedule."""
    variable: Any = getattr(optimizer.learning_rate, "value", None)
    if not hasattr(variable, "given_and_broadcast"):
        return None
    (local_rate, broadcast), now = variable.given_and_broadcast, float(optimizer.learning_rate)
    return local_rate if now == broadcast else now


def _config(value: Any) -> dict[str, str]:
    """Returns an object's configuration by name; empty without a configuration."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = value.get_config()
    except Exception:  # a user's class may raise any error
        return {}
    if not isinstance(config, Mapping):
        return {}
    return {
        str(name): _NUMBERED.sub("", _text(entry)[1:-1]) if name == "name" else _text(entry)
        for name, entry in config.items()
        if name not in _NOT_COMPARED
    }


def _text(value: Any) -> str:
    """Returns a text for a value; equal values have the same text in each run of a program."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":
            return "a lambda"
        compared = {str(name): item for name, item in value.items() if name not in _NOT_COMPARED}
        if set(compared) == {"class_name", "config"}:  # as Keras serializes an object
            return f"{compared['class_name']} {_text(compared['config'])}"
        entries = (
            (name, _NUMBERED.sub("", item) if name == "name" and isinstance(item, str) else item)
            for name, item in sorted(compared.items())
        )
        return f"{{{', '.join(f'{name}: {_text(item)}' for name, item in entries)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"[{', '.join(sorted(map(_text, value)))}]"
    if isinstance(value, np.generic):
        return _text(value.item())
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(_ADDRESS.sub("0x", value))
    if isinstance(value, functools.partial):
        return f"{_text(value.func)} {_text(value.args)} {_text(value.keywords)}"
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__}{_constants(value.__code__) if value.__name__ == '<lambda>' else ''}"
    if hasattr(value, "get_config") and not isinstance(value, type):
        return f"{type(value).__name__} {_text(_config(value))}"
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _constants(code: types.CodeType) -> str:
    """Returns the names and constants in the code of a lambda, which are the same for all versions of Python."""
    numbers = [constant for constant in code.co_consts if isinstance(constant, (int, float, str))]
    inner = [_constants(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return f" of {', '.join(map(str, [*code.co_names, *numbers, *inner]))}"

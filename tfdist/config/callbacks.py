"""The field `callbacks`: the callbacks of a run, Keras' or your own. No TensorFlow here.

An example is `EarlyStopping(monitor=val_loss, patience=3); package.module:function`. Values are Python literals; a bare word is a text.
"""

from __future__ import annotations

import ast
import os
import string
from collections.abc import Iterator
from typing import Any

from tfdist.config import registry
from tfdist.config.constraints import Constraint, at_least, between
from tfdist.errors import ConfigError, collect_errors, describe_error, format_value, unknown_name_message


def _of_type(what: str, types: tuple[type, ...], number: Constraint) -> Constraint:
    expected, holds = number
    return f"{what}, {expected}", lambda value: type(value) in types and holds(value)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and -1e30 <= value <= 1e30


_COUNT = _of_type("a whole number", (int,), at_least(0))
_IS_STEPS = _of_type("a whole number", (int,), at_least(1))[1]
_BOOL: Constraint = "True or False", lambda value: type(value) is bool
_TEXT: Constraint = "a text", lambda value: isinstance(value, str) and bool(value.strip())
_FINITE: Constraint = "a finite number", _is_finite
_FINITE_OR_NONE: Constraint = "a finite number or None", lambda value: value is None or _is_finite(value)
_MODE: Constraint = "one of: auto, min, max", lambda value: value in ("auto", "min", "max")
_FREQ: Constraint = "'epoch' or a number of steps, 1 or more", lambda value: value == "epoch" or _IS_STEPS(value)
_HEADERS: Constraint = "None or a dict", lambda value: value is None or isinstance(value, dict)
_CHARACTER: Constraint = "one character", lambda value: isinstance(value, str) and len(value) == 1
_MONITORS = {"monitor": _TEXT, "mode": _MODE, "verbose": _COUNT}
# Keras' callbacks whose arguments are numbers and texts, without those that have their own config field. The checks cover what
# Keras does not check, or checks only after an epoch.
CALLBACKS: dict[str, dict[str, Constraint]] = {
    "CSVLogger": {"filename": _TEXT, "separator": _CHARACTER, "append": _BOOL},
    "EarlyStopping": {
        **_MONITORS,
        "min_delta": _FINITE,
        "patience": _COUNT,
        "baseline": _FINITE_OR_NONE,
        "restore_best_weights": _BOOL,
        "start_from_epoch": _COUNT,
    },
    "ModelCheckpoint": {
        **_MONITORS,
        "filepath": _TEXT,
        "save_best_only": _BOOL,
        "save_weights_only": _BOOL,
        "save_freq": _FREQ,
        "initial_value_threshold": _FINITE_OR_NONE,
    },
    "ReduceLROnPlateau": {
        **_MONITORS,
        "factor": _of_type("a number", (int, float), between(1e-30, 0.9999999)),
        "patience": _COUNT,
        "min_delta": _FINITE,
        "cooldown": _COUNT,
        "min_lr": _of_type("a number", (int, float), between(0, 1e6)),
    },
    "RemoteMonitor": {"root": _TEXT, "path": _TEXT, "field": _TEXT, "headers": _HEADERS, "send_as_json": _BOOL},
    "SwapEMAWeights": {"swap_on_epoch": _BOOL},
    "TerminateOnNaN": {"raise_error": _BOOL},
}
_LONGEST_NAME = 255
# The argument that a callback needs, and an example.
_REQUIRED = {"CSVLogger": ("filename", "log.csv"), "ModelCheckpoint": ("filepath", "best.keras")}


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names of the callbacks in the field's value, each with its arguments.

    Raises:
        ConfigError: The text does not have the form of the module's example, or a name or argument of a Keras callback is unknown.
    """
    faults: list[str] = []
    parsed = []
    for part in filter(None, map(str.strip, text.split(";"))):
        with collect_errors(faults):
            parsed.append(_parse_one(part))
    if faults:
        raise ConfigError(faults)
    return parsed


def _parse_one(text: str) -> tuple[str, dict[str, Any]]:
    name, bracket, arguments_text = text.partition("(")
    name = name.strip()
    try:
        # Only the arguments are parsed, as those of a call of `f`: the name may be `package.module:function`.
        text_of_call = f"f({arguments_text}" if bracket else "f()"
        call = ast.parse(text_of_call, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        if "None" in arguments or len(arguments) < len(call.keywords):  # `**kwargs`, or a repeated name
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ConfigError(
            "callbacks must be such as 'EarlyStopping(monitor=val_loss, patience=3); package.module:function', with numbers and "
            f"texts as values, and each argument once. Received: {format_value(text)}."
        ) from None
    if ":" in name:
        registry.check_findable("callback", name)
        return name, arguments
    if name not in CALLBACKS:
        raise ConfigError(unknown_name_message("callback", name, [*CALLBACKS, "package.module:function"]))
    faults = list(_argument_faults(name, arguments))
    if faults:
        raise ConfigError(faults)
    return name, arguments


def _argument_faults(name: str, arguments: dict[str, Any]) -> Iterator[str]:
    """Yields the errors in the arguments of a Keras callback."""
    wrong = False
    for argument, value in arguments.items():
        if argument not in CALLBACKS[name]:
            yield unknown_name_message(f"argument of callback {name}", argument, CALLBACKS[name])
            continue
        expected, holds = CALLBACKS[name][argument]
        if not holds(value):
            wrong = True
            yield f"callbacks: {argument} of {name} must be {expected}. Received: {format_value(value)}."
    if wrong or name not in _REQUIRED:
        return
    path, example = _REQUIRED[name]
    if path not in arguments:
        yield f"callbacks: {name} needs {path}, such as {name}({path}={example!r})."
        return
    if name == "ModelCheckpoint":
        yield from _checkpoint_faults(arguments)
        return
    why = why_no_file(arguments[path])
    if why:
        yield f"callbacks: {path} of {name} must be a file that can be written. Received: {format_value(arguments[path])} ({why})."


def _checkpoint_faults(arguments: dict[str, Any]) -> Iterator[str]:
    path = arguments["filepath"]
    weights = arguments.get("save_weights_only", False)
    ends = (".weights.h5",) if weights else (".keras", ".h5")
    received = f"Received: {format_value(path)}"
    if not path.endswith(ends):
        condition = ""
        if "save_weights_only" in arguments:
            condition = f" with save_weights_only={weights}"
        yield f"callbacks: filepath of ModelCheckpoint must end in {' or '.join(ends)}{condition}. {received}."
        return
    try:
        names = placeholders(path)
        # Format the path as Keras does: epochs and batches count from 1, and metrics are floats.
        written = path.format(**{**dict.fromkeys(names, 0.5), "epoch": 1, "batch": 1})
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, MemoryError) as e:  # {epoch:99999999999}
        yield (
            "callbacks: filepath of ModelCheckpoint must be a text in which {epoch:02d}, {batch} or a metric such as {val_loss:.2f} are "
            f"filled in. {received} ({describe_error(e)})."
        )
        return
    if arguments.get("save_freq", "epoch") == "epoch":
        when = "after an epoch"
        unknown = [name for name in names if name == "batch"]
    else:
        when = "after a batch"
        unknown = [name for name in names if name.startswith("val_")]
    if unknown:
        yield f"callbacks: filepath of ModelCheckpoint has {{{unknown[0]}}}, which is not known {when}; see save_freq. {received}."
    why = why_no_file(written)
    if why:
        yield f"callbacks: filepath of ModelCheckpoint must be a file that can be written. {received} ({why})."


def placeholders(path: str) -> list[str]:
    """Returns the names in braces in a checkpoint's path. Raises ValueError if the braces do not match."""
    return [name for _, name, _, _ in string.Formatter().parse(path) if name is not None]


def why_no_file(path: str) -> str:
    """Returns the reason why a path cannot be that of a file, or an empty text. A file that does not exist yet is valid."""
    if "\0" in path:
        return "a path has no null character"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return "a path has no lone surrogates"
    if len(os.fsencode(os.path.basename(path))) > _LONGEST_NAME:
        return f"a file's name has at most {_LONGEST_NAME} bytes"
    if os.path.isdir(path):
        return "it is a folder"
    return ""


def monitored(text: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the metric of each Keras callback that follows a metric. `text` is the field's value, which must be valid."""
    for name, arguments in parse(text):
        follows = name != "ModelCheckpoint" or arguments.get("save_best_only") or "monitor" in arguments
        if "monitor" in CALLBACKS.get(name, ()) and follows:
            yield name, arguments.get("monitor", "val_loss")
        if name == "ModelCheckpoint":
            for placeholder in placeholders(arguments["filepath"]):
                if placeholder not in ("epoch", "batch"):
                    yield name, placeholder


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    return ast.literal_eval(node)


def resolve(name: str) -> Any:
    """Returns the class or function of a callback. Imports TensorFlow.

    Raises:
        ConfigError: The user's own callback of this name does not exist.
    """
    return registry.resolve("callback", name, {callback: f"keras.callbacks:{callback}" for callback in CALLBACKS})

"""The field `callbacks`: the callbacks of a run, Keras' or your own. No TensorFlow here.

An example is `EarlyStopping(monitor=val_loss, patience=3); package.module:function`. Values are Python literals; a bare word is a text.
"""

from __future__ import annotations

import ast
import os
import string
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.config import registry
from tfdist.config.ranges import MOST_STEPS, Range
from tfdist.errors import ConfigError, collect_errors, describe_error, format_value, unknown_name_message

_Check = tuple[str, Callable[[Any], bool]]  # the requirement, for messages, and the function that checks it


def _number(allowed: Range, expected: str = "", optional: bool = False) -> _Check:
    def holds(value: Any) -> bool:
        return (type(value) in (int, float) and value in allowed) or (optional and value is None)

    return expected or f"a number, {allowed}", holds


def _count(least: int = 0) -> _Check:
    allowed = Range(least, MOST_STEPS)
    return f"a whole number, {allowed}", lambda value: type(value) is int and value in allowed


_BOOL: _Check = "True or False", lambda value: type(value) is bool
_TEXT: _Check = "a text", lambda value: isinstance(value, str) and bool(value.strip())
_FINITE = _number(Range(-1e30, 1e30), "a finite number")
_FINITE_OR_NONE = _number(Range(-1e30, 1e30), "a finite number or None", optional=True)
_MODE: _Check = "one of: auto, min, max", lambda value: value in ("auto", "min", "max")
_FREQ: _Check = "'epoch' or a number of steps, 1 or more", lambda value: value == "epoch" or _count(1)[1](value)
_HEADERS: _Check = "None or a dict", lambda value: value is None or isinstance(value, dict)
_CHARACTER: _Check = "one character", lambda value: isinstance(value, str) and len(value) == 1
_MONITORS = {"monitor": _TEXT, "mode": _MODE, "verbose": _count()}
# Keras' callbacks whose arguments are numbers and texts, without those that have their own config field. The checks cover what
# Keras does not check, or checks only after an epoch.
CALLBACKS: dict[str, dict[str, _Check]] = {
    "CSVLogger": {"filename": _TEXT, "separator": _CHARACTER, "append": _BOOL},
    "EarlyStopping": {
        **_MONITORS,
        "min_delta": _FINITE,
        "patience": _count(),
        "baseline": _FINITE_OR_NONE,
        "restore_best_weights": _BOOL,
        "start_from_epoch": _count(),
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
        "factor": _number(Range(1e-30, 0.9999999)),
        "patience": _count(),
        "min_delta": _FINITE,
        "cooldown": _count(),
        "min_lr": _number(Range(0, 1e6)),
    },
    "RemoteMonitor": {"root": _TEXT, "path": _TEXT, "field": _TEXT, "headers": _HEADERS, "send_as_json": _BOOL},
    "SwapEMAWeights": {"swap_on_epoch": _BOOL},
    "TerminateOnNaN": {"raise_error": _BOOL},
}
_LONGEST_NAME = 255
_REQUIRED = {"CSVLogger": "filename", "ModelCheckpoint": "filepath"}


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names of the callbacks, each with its arguments.

    Args:
        text: The field's value.

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


def faults(text: str) -> Iterator[str]:
    """Yields a message for each error of the field that can be detected before TensorFlow is loaded."""
    try:
        parse(text)
    except ConfigError as e:
        yield from e.faults


def _parse_one(text: str) -> tuple[str, dict[str, Any]]:
    name, bracket, arguments_text = text.partition("(")
    name = name.strip()
    try:
        call = ast.parse(f"f({arguments_text}" if bracket else "f()", mode="eval").body
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
    if faults := list(_argument_faults(name, arguments)):
        raise ConfigError(faults)
    return name, arguments


def _argument_faults(name: str, arguments: dict[str, Any]) -> Iterator[str]:
    """Yields the errors in the arguments of a Keras callback."""
    wrong = False
    for argument, value in arguments.items():
        if argument not in CALLBACKS[name]:
            yield unknown_name_message(f"argument of callback {name}", argument, CALLBACKS[name])
        elif not CALLBACKS[name][argument][1](value):
            wrong = True
            yield f"callbacks: {argument} of {name} must be {CALLBACKS[name][argument][0]}. Received: {format_value(value)}."
    path = _REQUIRED.get(name)
    if wrong or not path:
        return
    if path not in arguments:
        yield f"callbacks: {name} needs {path}, such as {name}({path}={('log.csv' if path == 'filename' else 'best.keras')!r})."
    elif name == "ModelCheckpoint":
        yield from _checkpoint_faults(arguments)
    elif why := why_no_file(arguments[path]):
        yield f"callbacks: {path} of {name} must be a file that can be written. Received: {format_value(arguments[path])} ({why})."


def _checkpoint_faults(arguments: dict[str, Any]) -> Iterator[str]:
    path, weights = arguments["filepath"], arguments.get("save_weights_only", False)
    ends = (".weights.h5",) if weights else (".keras", ".h5")
    received = f"Received: {format_value(path)}"
    if not path.endswith(ends):
        condition = f" with save_weights_only={weights}" if "save_weights_only" in arguments else ""
        yield f"callbacks: filepath of ModelCheckpoint must end in {' or '.join(ends)}{condition}. {received}."
        return
    try:
        names = placeholders(path)
        # Format the path as Keras does: epochs and batches count from 1, and metrics are floats.
        written = path.format(**{name: 1 if name in ("epoch", "batch") else 0.5 for name in names})
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, MemoryError) as e:  # {epoch:99999999999}
        yield (
            "callbacks: filepath of ModelCheckpoint must be a text in which {epoch:02d}, {batch} or a metric such as {val_loss:.2f} are "
            f"filled in. {received} ({describe_error(e)})."
        )
        return
    freq = arguments.get("save_freq", "epoch")
    unknown = [name for name in names if (name == "batch" if freq == "epoch" else name.startswith("val_"))]
    if unknown:
        when = "after an epoch" if freq == "epoch" else "after a batch"
        yield f"callbacks: filepath of ModelCheckpoint has {{{unknown[0]}}}, which is not known {when}; see save_freq. {received}."
    if why := why_no_file(written):
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
    return "it is a folder" if os.path.isdir(path) else ""


def monitored(text: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the metric of each Keras callback that follows a metric.

    Args:
        text: The field's value, which must be valid.
    """
    for name, arguments in parse(text):
        follows = name != "ModelCheckpoint" or arguments.get("save_best_only") or "monitor" in arguments
        if "monitor" in CALLBACKS.get(name, ()) and follows:
            yield name, arguments.get("monitor", "val_loss")
        if name == "ModelCheckpoint":
            yield from (
                (name, placeholder)
                for placeholder in placeholders(arguments["filepath"])
                if placeholder not in ("epoch", "batch")
            )


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def resolve(name: str) -> Any:
    """Returns the class or function of a callback. Imports TensorFlow.

    Raises:
        ConfigError: The user's own callback of this name does not exist.
    """
    return registry.resolve("callback", name, {callback: f"keras.callbacks:{callback}" for callback in CALLBACKS})

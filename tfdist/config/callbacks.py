"""The field `callbacks`: which callbacks of Keras, or of one's own, a run has. No TensorFlow here.

Such as `EarlyStopping(monitor=val_loss, patience=3); package.module:function`. Values are Python's literals; a word is a text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from tfdist.config import registry
from tfdist.errors import ConfigError, collect_errors, format_value, unknown_name_message

_PLATEAU = ("monitor", "factor", "patience", "verbose", "mode", "min_delta", "cooldown", "min_lr")
_STOPPING = (
    "monitor",
    "min_delta",
    "patience",
    "verbose",
    "mode",
    "baseline",
    "restore_best_weights",
    "start_from_epoch",
)
_CHECKPOINT = ("filepath", "monitor", "verbose", "save_best_only", "save_weights_only", "mode", "save_freq")
# Those of Keras whose arguments are numbers and texts, and which no field of their own makes.
CALLBACKS = {
    "CSVLogger": ("filename", "separator", "append"),
    "EarlyStopping": _STOPPING,
    "ModelCheckpoint": (*_CHECKPOINT, "initial_value_threshold"),
    "ReduceLROnPlateau": _PLATEAU,
    "RemoteMonitor": ("root", "path", "field", "headers", "send_as_json"),
    "SwapEMAWeights": ("swap_on_epoch",),
    "TerminateOnNaN": ("raise_error",),
}


def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names of callbacks, each with its arguments.

    Args:
        text: The field.

    Raises:
        ConfigError: It is not of the form above, or a name or argument of Keras' is unknown.
    """
    faults: list[str] = []
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        with collect_errors(faults):
            found.append(_parse_one(part))
    if faults:
        raise ConfigError(faults)
    return found


def faults(text: str) -> Iterator[str]:
    """Yields a sentence for each fault of the field that shows before TensorFlow is loaded."""
    try:
        parse(text)
    except ConfigError as e:
        yield from e.faults


def _parse_one(text: str) -> tuple[str, dict[str, Any]]:
    name, bracket, rest = text.partition("(")
    name = name.strip()
    try:
        call = ast.parse(f"f({rest}" if bracket else "f()", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        given = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        if "None" in given:  # **
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ConfigError(
            "callbacks must be such as 'EarlyStopping(monitor=val_loss, patience=3); package.module:function', with numbers and "
            f"texts as values. Received: {format_value(text)}."
        ) from None
    if ":" in name:
        return name, given
    if name not in CALLBACKS:
        raise ConfigError(unknown_name_message("callback", name, [*CALLBACKS, "package.module:function"]))
    for argument in given:
        if argument not in CALLBACKS[name]:
            raise ConfigError(unknown_name_message(f"argument of callback {name}", argument, CALLBACKS[name]))
    return name, given


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def resolve(name: str) -> Any:
    """Returns the class or function of a callback. Imports TensorFlow.

    Raises:
        ConfigError: There is none of one's own of this name.
    """
    return registry.resolve("callback", name, {each: f"keras.callbacks:{each}" for each in CALLBACKS})

"""Checks of what the methods of a user's `Task` return, and explanations of Keras' errors in the first step."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data, Logs, Structure
from tfdist.config import registry
from tfdist.config.ranges import MOST_STEPS
from tfdist.errors import ConfigError, describe_error, format_value, truncate, unknown_name_message

# Errors that Keras and TensorFlow raise if the shapes or types of a model, its loss and its data do not match.
_MISMATCH_ERRORS = (ValueError, TypeError, AttributeError, IndexError, KeyError, tf.errors.InvalidArgumentError)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_FILE = re.compile(r'File "([^"]+)", line')
# In the TypeError of a call with wrong arguments.
_CALLBACK_METHOD = re.compile(r"\.on_(train|test|epoch)_?[a-z_]*\(\) ")
_ADDED_PARAGRAPHS = (
    "Exception encountered when calling",
    "Graph execution error",
    "Arguments received by",
    "Stack trace",
)
_LIBRARY_FOLDERS = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        os.path.dirname(keras.__file__),
        os.path.dirname(tf.__file__),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    }
)


def make_task(name: str, options: Any) -> Any:
    """Creates a task with its options. Raises ConfigError if the task is unknown or its constructor does not accept the options."""
    kind = registry.resolve("task", name, registry.TASKS)
    try:
        return kind(options)
    except TypeError as e:
        if _is_raised_by_user_code(e):
            raise
        raise ConfigError(
            f"the constructor of task {name!r} must accept the options, as that of tfdist.Task does: {describe_error(e)}."
        ) from e


def checked_model(task: str, model: keras.Model) -> keras.Model:
    """Returns the result of a task's `build_model`. Raises ConfigError if it is not a model."""
    if not isinstance(model, keras.Model):
        raise ConfigError(f"build_model of task {task!r} must return a keras.Model. Received: {format_value(model)}.")
    return model


def checked_compile_arguments(task: str, model: keras.Model, arguments: Any) -> dict[str, Any]:
    """Returns the result of a task's `compile_arguments`. Raises ConfigError if `model.compile` does not take it."""
    where = f"compile_arguments of task {task!r}"
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where} must return a dict. Received: {format_value(arguments)}.")
    if "optimizer" in arguments:
        raise ConfigError(f"{where} must leave out 'optimizer', which the configuration sets: use the field optimizer.")
    accepted = inspect.signature(model.compile).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if wrong := [name for name in arguments if name not in accepted and not any_name]:
        raise ConfigError(unknown_name_message(f"argument in {where}", wrong[0], accepted))
    return arguments


def checked_steps(task: str, steps: Any) -> int | None:
    """Returns the result of a task's `steps_per_epoch`. Raises ConfigError if it is not a number of steps."""
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps <= MOST_STEPS):
        raise ConfigError(
            f"steps_per_epoch of task {task!r} must return a whole number of steps, or None. Received: {format_value(steps)}."
        )
    return steps


def checked_data(task: str, method: str, data: Data, is_validation: bool = False) -> Data:
    """Returns the data from a task's method. Raises ConfigError if they are not a dataset."""
    if is_validation and isinstance(data, tf.data.Dataset) and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            f"{method} of task {task!r} must return a dataset that ends, because validation reads all of it. Remove its repeat(), or add take()."
        )
    if (data is None and is_validation) or isinstance(data, tf.data.Dataset):
        return data
    # Validation data may also be arrays, or a function of the input context.
    if is_validation and (isinstance(data, (tuple, keras.utils.PyDataset)) or callable(data)):
        return data
    none = " or None" if is_validation else ""
    raise ConfigError(
        f"{method} of task {task!r} must return a tf.data.Dataset{none}. Received: {format_value(type(data).__name__)}."
    )


class FirstStep(keras.callbacks.Callback):
    """Callback that records whether the first step of training and of validation has run.

    Only an error of a first step can mean that the model does not match its data.

    Attributes:
        data_method: The method of the task that provides the data of the first step; empty once that step has run.
    """

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.data_method = "train_data"
        self._is_validated = False

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.data_method = ""

    def on_test_begin(self, logs: Logs = None) -> None:
        self.data_method = "" if self._is_validated else "eval_data"

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._is_validated, self.data_method = True, ""


@contextlib.contextmanager
def explaining_first_step(task: str, model: keras.Model, first: FirstStep, elements: dict[str, Any]) -> Iterator[None]:
    """Turns an error of the first step of training or validation into one ConfigError, unless the user's code raised it.

    `first` must be a callback of the `fit` in the block. `elements` maps the names of the task's methods to the `element_spec` of their datasets.
    """
    try:
        yield
    except ConfigError:
        raise
    except _MISMATCH_ERRORS as e:
        if not first.data_method or _is_raised_by_user_code(e):
            raise
        if _CALLBACK_METHOD.search(str(e)):
            raise ConfigError(
                f"a callback does not take the arguments of Keras' calls: {_reason(e)} Give the callback's method the parameters of the method in keras.callbacks.Callback, with the same names."
            ) from e
        raise ConfigError(
            f"the model of task {task!r} cannot be trained on its data: "
            f"{type(e).__name__}: {_reason(e)}{_shapes(model, first.data_method, elements.get(first.data_method))}"
        ) from e


def compile_model(task: str, model: keras.Model, arguments: dict[str, Any]) -> None:
    """Compiles a task's model. Raises ConfigError if Keras does not take the arguments, but keeps errors that the user's code raised."""
    try:
        model.compile(**arguments)
    except _MISMATCH_ERRORS as e:
        if isinstance(e, ConfigError) or _is_raised_by_user_code(e):
            raise
        raise ConfigError(
            f"compile_arguments of task {task!r} cannot be compiled: {type(e).__name__}: {_reason(e)}"
        ) from e


def _is_raised_by_user_code(error: BaseException) -> bool:
    frames = [os.path.realpath(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    if any(title in str(error) for title in ("in user code:", "Traceback (most recent call last)")):
        # Files of functions that TensorFlow has traced or called.
        frames += map(os.path.realpath, _FILE.findall(str(error)))
    if not all(name.startswith(_LIBRARY_FOLDERS) or name.endswith(">") for name in frames):
        return True
    # Keras 3.16 wraps the error of a loss.
    return error.__cause__ is not None and _is_raised_by_user_code(error.__cause__)


def _reason(error: BaseException) -> str:
    """Returns the message of the original error, without the paragraphs that Keras and TensorFlow add."""
    text = _ESCAPES.sub("", str(error))
    if "in user code:" in text:
        text = text.rpartition("Error: ")[2]
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    relevant = [part for part in paragraphs if part and not part.startswith(_ADDED_PARAGRAPHS)]
    message = relevant[0] if relevant else paragraphs[0]
    if message.startswith("Detected at node"):
        message = next((line for line in reversed(text.splitlines()) if line.strip() and "[[" not in line), message)
    return truncate(message.strip()).rstrip(".") + "."


def _shapes(model: keras.Model, method: str, element: Structure) -> str:
    if element is None:
        return ""
    accepted = getattr(model, "input_shape", None) if model.built else None
    x = element[0] if isinstance(element, tuple) and element else element
    sentence = f" {method} gives {truncate(str(element))}" + (
        f", the model takes {truncate(str(accepted))}" if accepted else ""
    )
    rank = getattr(getattr(x, "shape", None), "rank", None)
    if (
        isinstance(accepted, tuple)
        and rank == len(accepted) - 1
        and all(not isinstance(part, tuple) for part in accepted)
    ):
        return f"{sentence}: is .batch() missing?"
    return f"{sentence}; change build_model, compile_arguments or {method} so that they fit."

"""Checks of the values that the methods of a user's `Task` return."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data
from tfdist.config import registry
from tfdist.config.constraints import MOST_STEPS
from tfdist.errors import ConfigError, describe_error, format_value, unknown_name_message


def make_task(name: str, options: Any) -> Any:
    """Creates a task with its options. Raises ConfigError if the task is unknown or its constructor does not accept the options."""
    kind = registry.resolve("task", name, registry.TASKS)
    try:
        inspect.signature(kind).bind(options)
    except TypeError as e:
        raise ConfigError(
            f"the constructor of task {name!r} must accept the options, as that of tfdist.Task does: {describe_error(e)}."
        ) from e
    return kind(options)


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
    wrong = [name for name in arguments if name not in accepted and not any_name]
    if wrong:
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

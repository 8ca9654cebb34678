"""The arguments of Keras' `fit`, `evaluate` and `predict`, in the forms that users give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list, however they were given."""
    given = getattr(callbacks, "callbacks", callbacks)  # a keras CallbackList
    return [given] if isinstance(given, keras.callbacks.Callback) else list(given or [])


def bind(method: Callable[..., Any], model: keras.Model, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments by name: those of the model's own method, where it has one, else of Keras'.

    Args:
        method: Keras' method.
        model: The model, whose class may override it with more arguments.
        args: By place.
        kwargs: By name.
    """
    own = inspect.signature(getattr(type(model), method.__name__))
    _, *others = own.bind(model, *args, **kwargs).arguments.items()
    given: dict[str, Any] = {}
    for name, value in others:
        kind = own.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:  # which it passes on to Keras
            left = [each for each in list(inspect.signature(method).parameters)[1:] if each not in given]
            given |= zip(left, value, strict=False)
        else:
            given |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return given


def data_name(method: Callable[..., Any], model: keras.Model, given: dict[str, Any]) -> str:
    """Returns the name by which the model's method takes its data: x, or, where it has no x, its first argument's."""
    names = list(inspect.signature(getattr(type(model), method.__name__)).parameters)[1:]
    return "x" if "x" in (*given, *names) else names[0]


def is_function(data: Any) -> bool:
    """Whether data are a function of an input context."""
    return callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset))


def cuts_executions(model: keras.Model, steps: int | None) -> bool:
    """Whether the last of `steps` steps ends amid an execution."""
    return bool(steps and steps % model.steps_per_execution)

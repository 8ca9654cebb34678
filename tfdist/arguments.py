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
    """Returns the arguments by Keras' names."""
    given = dict(inspect.signature(method).bind(model, *args, **kwargs).arguments)
    del given["self"]
    return given


def is_function(data: Any) -> bool:
    """Whether data are a function of an input context."""
    return callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset))


def cuts_executions(model: keras.Model, steps: int | None) -> bool:
    """Whether the last of `steps` steps ends amid an execution."""
    return bool(steps and steps % model.steps_per_execution)

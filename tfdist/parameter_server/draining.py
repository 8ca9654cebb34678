"""Waits for the scheduled steps before something looks at what they have counted."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def drain_steps(model: keras.Model) -> None:
    """Waits until all steps of `model` that are scheduled are counted."""
    for function in (model.train_function, model.test_function):
        if drain := getattr(function, "drain", None):
            drain()


class DrainFirst:
    """A method of a model that first waits until all scheduled steps are counted.

    Keras calls `get_metrics_result` at the end of an epoch or evaluation, and callbacks save within an epoch.

    Args:
        model: The model.
        method: The name of the method.
    """

    def __init__(self, model: keras.Model, method: str):
        self._model = model
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function():  # where a step is traced
            drain_steps(self._model)
        return getattr(type(self._model), self._method)(self._model, *args, **kwargs)

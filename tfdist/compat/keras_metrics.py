"""Private names of Keras' metrics; see `keras_internals.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.aliases import Function

KERAS_FUNCTION = "_fn"
KERAS_FUNCTION_ARGUMENTS = "_fn_kwargs"
KERAS_COMPILED_METRICS = "_compile_metrics"
KERAS_GIVEN_METRICS = ("_user_metrics", "_user_weighted_metrics")


def function(metric: keras.metrics.MeanMetricWrapper) -> tuple[Function, Mapping[str, Any]]:
    """Returns the function whose values a metric averages, and the arguments that the metric adds."""
    return getattr(metric, KERAS_FUNCTION), getattr(metric, KERAS_FUNCTION_ARGUMENTS)


def compiled_metrics(model: keras.Model) -> keras.metrics.Metric:
    """Returns Keras' container of the metrics that a model is compiled with, or None."""
    return getattr(model, KERAS_COMPILED_METRICS, None)


def compiled(container: keras.metrics.Metric) -> list[Any]:
    """Returns the metrics as they were given to `compile`: names, functions and objects."""
    given = [getattr(container, name) for name in KERAS_GIVEN_METRICS]
    return [each for each in keras.tree.flatten(given) if each is not None]


def metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns a model's metrics, among them those that its container of compiled metrics holds, once it is built."""
    return [*model.metrics, *getattr(compiled_metrics(model), "metrics", ())]


def is_keras_code(function: object) -> bool:
    """Returns whether a function is Keras' own; False for a callable object."""
    return hasattr(function, "__code__") and function.__module__.startswith("keras.")

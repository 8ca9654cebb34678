"""`train_on_batch`, `test_on_batch` and `predict_on_batch`: one step on one batch."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.aliases import Data, Logs, Structure
from tfdist.compat import keras_loops
from tfdist.engine import Engine
from tfdist.step import model_building
from tfdist.training import checks

# The number of calls by method. All workers count alike, so that all of them compare in the same calls.
_calls: weakref.WeakKeyDictionary[keras.Model, collections.Counter[str]] = weakref.WeakKeyDictionary()


def train_on_batch(
    engine: Engine,
    model: keras.Model,
    x: Data,
    y: Data = None,
    sample_weight: Data = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
) -> Logs:
    """Trains a model on one batch, as Keras' `train_on_batch`. The engine must have attached the model."""
    keras_loops.check_compiled(model)
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError(
                "Arguments `sample_weight` and `class_weight` cannot be specified at the same time. "
                f"Received: sample_weight={sample_weight}, class_weight={class_weight}"
            )
        sample_weight = keras_loops.class_weight_to_sample_weights(y, class_weight)
    return _logs(engine, model, "train_on_batch", "train_step", (x, y, sample_weight), return_dict)


def test_on_batch(
    engine: Engine, model: keras.Model, x: Data, y: Data = None, sample_weight: Data = None, return_dict: bool = False
) -> Logs:
    """Evaluates a model on one batch, as Keras' `test_on_batch`."""
    keras_loops.check_compiled(model)
    return _logs(engine, model, "test_on_batch", "test_step", (x, y, sample_weight), return_dict)


def predict_on_batch(engine: Engine, model: keras.Model, x: Data) -> Structure:
    """Returns a model's outputs for one batch, as Keras' `predict_on_batch`."""
    _compare(engine, model, "predict_on_batch", (x,))
    model.make_predict_function()
    return keras_loops.as_arrays(engine.predict_batch(model, (x,)))


METHODS = {method.__name__: method for method in (train_on_batch, test_on_batch, predict_on_batch)}


def _logs(engine: Engine, model: keras.Model, method: str, step: str, batch: Structure, return_dict: bool) -> Logs:
    """Runs a step on the batch of a method, and returns its logs as the method does."""
    _compare(engine, model, method, batch)
    logs = run(engine, model, step, batch, keras_loops.RESETS_METRICS_FOR_BATCH)
    if return_dict:
        return logs
    return keras_loops.flat_logs(model, logs)


def _compare(engine: Engine, model: keras.Model, method: str, batch: Structure) -> None:
    """Compares the workers' batches in the first call of a method, the second, the fourth, the eighth and so on.

    Raises ConfigError. A worker that compared only batches of a new shape could wait for workers whose batches have a known one.
    """
    if engine.ranks is None or engine.ranks.size == 1 or engine.strategy.batches_are_parts:
        return
    calls = _calls.setdefault(model, collections.Counter())
    calls[method] += 1
    if calls[method].bit_count() == 1:
        checks.check_batch(engine.ranks, method, batch)


def run(
    engine: Engine, model: keras.Model, step: str, batch: Structure, reset_metrics: bool, is_whole: bool = True
) -> dict[str, Any]:
    """Runs `"train_step"` or `"test_step"` of a model on one batch; returns the logs. `is_whole` as for `Engine.run_batch`."""
    model_building.build(model, step, batch)
    if step == "train_step":
        model.make_train_function()
        function = model.train_function
    else:
        model.make_test_function()
        function = model.test_function
    if reset_metrics:
        model.reset_metrics()
    logs: dict[str, Any] = keras_loops.pythonify_logs(engine.run_batch(function, batch, is_whole))
    return logs

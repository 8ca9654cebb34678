"""Whether losses of one number are sums or means over the batch, found out by trying: on some rows, on others, and on both."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_internals
from tfdist.replicas import random_seeds

Reduction = Literal["vector", "sum", "mean"]

_ROWS = 16
_ROUNDING, _NOISE = 1e-3, 0.2
_UNKNOWN = 3  # for a size that is not known


def infer_reduction(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Reduction | None:
    """Finds out what a compiled loss function returns.

    Args:
        loss: The loss.
        y_true: What it is called with in a step that is being traced: its shapes and types are looked at.
        y_pred: Likewise.

    Returns:
        `"vector"`: a number for each example, which Keras reduces; `"sum"`: their sum; `"mean"`: their mean, also where it is
        neither, with a warning. None where it cannot be tried.
    """

    def numbers(rows: Any) -> list[tuple[int, float]]:
        # As Keras calls it: data of a `tf.data.Dataset` may have another type than the model's.
        found = loss.call(*tf.nest.map_structure(lambda one: keras.ops.convert_to_tensor(one, loss.dtype), rows))
        return [(np.ndim(found), float(tf.reduce_sum(found)))]

    kinds = _infer_reductions(numbers, (y_true, y_pred), f"The loss {loss.name}")
    return kinds[0] if kinds else None


def infer_added_loss_reductions(model: keras.Model, x: Any, training: bool) -> list[Reduction]:
    """Finds out what layers add by `add_loss`.

    Args:
        model: Built.
        x: Its inputs in a step that is being traced: their shapes and types are looked at.
        training: Whether it trains.

    Returns:
        A kind for each of `losses_added_by_layers(model)`; an empty list if the model cannot be tried.
    """
    local = model.distribute_strategy.experimental_local_results

    def numbers(rows: Any) -> list[tuple[int, float]]:
        values = [(variable, local(variable.value)[0]) for variable in model.variables]
        with keras.StatelessScope(values, collect_losses=True):
            inputs = tf.nest.map_structure(tf.convert_to_tensor, rows)
            model(inputs, training=training) if keras_internals.call_takes_training(model) else model(inputs)
            return [(np.ndim(each), float(tf.reduce_sum(each))) for each in losses_added_by_layers(model)]

    return _infer_reductions(numbers, x, f"A loss that a layer of {model.name} adds")


def losses_added_by_layers(model: keras.Model) -> list[Any]:
    """Returns what layers have added by `add_loss` in their last call, without regularizers."""
    return [loss for layer in keras_internals.layers(model) for loss in keras_internals.added_losses(layer)]


def _infer_reductions(numbers: Callable[[Any], list[tuple[int, float]]], like: Any, name: str) -> list[Reduction]:
    """Tries losses on some rows, on others, and on both together.

    Args:
        numbers: Returns the rank and the sum of each loss for rows.
        like: Tensors of the rows' shapes and types.
        name: For the warning.
    """
    # What is tried must not draw a number of the steps: a resumed training tries again.
    with tf.init_scope(), random_seeds.StepSeedGenerator(tf.constant(0), seed=0).installed():
        try:
            first, second = _rows(like, 0.1, 0.4), _rows(like, 0.5, 0.9)
            both = tf.nest.map_structure(lambda a, b: np.concatenate([a, b]), first, second)
            turned = tf.nest.map_structure(lambda each: each[::-1], first)
            found = zip(*map(numbers, (first, turned, second, both)), strict=True)
            return [
                "vector" if rank else _classify(a, again, b, ab, name)
                for (rank, a), (_, again), (_, b), (_, ab) in found
            ]
        except Exception:  # it may want what is not known here
            return []


def _classify(a: float, again: float, b: float, ab: float, name: str) -> Reduction:
    """Returns the kind of a loss by its values for rows, for the same turned round, for others, and for all of them."""
    size = abs(a) + abs(b)
    if not size or not math.isfinite(size + ab):
        return "mean"
    noisy = abs(again - a) > _ROUNDING * size  # it draws random numbers, or has rows meet other rows
    tolerance = _NOISE if noisy else _ROUNDING
    if abs(ab - a - b) < tolerance * size:
        return "sum"
    if abs(ab - (a + b) / 2) >= tolerance * size:
        warnings.warn(
            f"{name} is neither a sum nor a mean over examples: it is {a:.3g} for some, {b:.3g} for as many others, and {ab:.3g} "
            "for all of them. Several replicas train the mean of what it is for their parts of the batch, which is another "
            "loss than one device's.",
            stacklevel=2,
        )
    return "mean"


def _rows(like: Any, low: float, high: float) -> Any:
    """Returns rows of random numbers of the shapes and types of tensors; those of a later tensor are smaller."""
    random, numbers = np.random.default_rng(0), itertools.count(1)

    def fill(tensor: Any) -> Any:
        shape = [_ROWS, *(size or _UNKNOWN for size in tensor.shape[1:])]
        if tensor.dtype == tf.string:
            return np.full(shape, "a")
        if tensor.dtype == tf.bool or tensor.dtype.is_integer:
            return random.integers(0, 2, shape).astype(tensor.dtype.as_numpy_dtype)
        return (random.uniform(low, high, shape) / next(numbers)).astype(tensor.dtype.as_numpy_dtype)

    return tf.nest.map_structure(fill, like)

"""Whether losses of one number are sums or means over the batch, found out by trying: on some rows, and on each row twice."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

Kind = Literal["vector", "sum", "mean"]

_ROWS = 16
_TOLERANCE = 0.25  # in doublings, as a loss may draw random numbers
_UNKNOWN = 3  # for a size that is not known


def kind_of_function(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Kind:
    """Finds out what a compiled loss function returns.

    Args:
        loss: The loss.
        y_true: What it is called with in a step that is being traced: its shapes and types are looked at.
        y_pred: Likewise.

    Returns:
        `"vector"`: a number for each example, which Keras reduces; `"sum"`: their sum; `"mean"`: what does not depend on the
        number of examples. Also where that cannot be found out; with a warning where it depends on it otherwise.
    """
    with tf.init_scope():
        try:
            rows = _rows((y_true, y_pred))
            once, twice = (
                # As Keras calls it: data of a `tf.data.Dataset` may have another type than the model's.
                loss.call(*tf.nest.map_structure(lambda one: keras.ops.convert_to_tensor(one, loss.dtype), each))
                for each in (rows, _twice(rows))
            )
        except Exception:  # it may want what is not known here
            return "mean"
        if np.ndim(once):
            return "vector"
        return _kind(float(once), float(twice), f"The loss {loss.name}")


def kinds_of_added(model: keras.Model, x: Any, training: bool) -> list[Kind]:
    """Finds out what layers add by `add_loss`.

    Args:
        model: Built.
        x: Its inputs in a step that is being traced: their shapes and types are looked at.
        training: Whether it trains.

    Returns:
        A kind for each of `own_losses(model)`; an empty list if the model cannot be tried.
    """
    local = model.distribute_strategy.experimental_local_results
    with tf.init_scope():
        try:
            values = [(variable, local(variable.value)[0]) for variable in model.variables]
            found = []
            for rows in (_rows(x), _twice(_rows(x))):
                with keras.StatelessScope(values, collect_losses=True):
                    inputs = tf.nest.map_structure(tf.convert_to_tensor, rows)
                    model(inputs, training=training) if model._call_has_training_arg else model(inputs)
                    found.append([(np.ndim(each), float(tf.reduce_sum(each))) for each in own_losses(model)])
        except Exception:  # its call may be of no use by itself
            return []
    kinds: list[Kind] = []
    for (rank, once), (_, twice) in zip(*found, strict=False):
        kinds.append("vector" if rank else _kind(once, twice, f"A loss that a layer of {model.name} adds"))
    return kinds


def own_losses(model: keras.Model) -> list[Any]:
    """Returns what layers have added by `add_loss` in their last call, without regularizers."""
    return [loss for layer in model._flatten_layers() for loss in layer._get_own_losses()]


def _kind(once: float, twice: float, name: str) -> Kind:
    if not once or not math.isfinite(once) or not math.isfinite(twice):
        return "mean"
    ratio = twice / once
    doublings = math.log2(ratio) if ratio > 0 else math.inf
    if abs(doublings - 1) < _TOLERANCE:
        return "sum"
    if abs(doublings) >= _TOLERANCE:
        warnings.warn(
            f"{name} is neither a sum nor a mean over the batch: with each example twice it is {ratio:.3g} times as large. "
            "Several replicas train its mean over their parts of the batch, which is another loss than one device's.",
            stacklevel=2,
        )
    return "mean"


def _rows(like: Any) -> Any:
    """Returns rows of random numbers of the shapes and types of tensors."""
    random = np.random.default_rng(0)

    def fill(tensor: Any) -> Any:
        shape = [_ROWS, *(size or _UNKNOWN for size in tensor.shape[1:])]
        if tensor.dtype == tf.string:
            return np.full(shape, "a")
        if tensor.dtype == tf.bool or tensor.dtype.is_integer:
            return random.integers(0, 2, shape).astype(tensor.dtype.as_numpy_dtype)
        return random.uniform(0.1, 0.9, shape).astype(tensor.dtype.as_numpy_dtype)

    return tf.nest.map_structure(fill, like)


def _twice(rows: Any) -> Any:
    return tf.nest.map_structure(lambda each: np.concatenate([each, each]), rows)

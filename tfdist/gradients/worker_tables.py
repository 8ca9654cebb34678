"""Gradients of tables: of the rows that each worker holds, which are summed over all replicas already (`layers/worker_rows.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.compat import model_features
from tfdist.config import relations
from tfdist.gradients import gradient_lists
from tfdist.layers.table import is_own


def own_indices(grads: Sequence[Gradient], variables: Variables) -> list[int]:
    """Returns the indices of the gradients of this worker's rows."""
    pairs = zip(grads, variables, strict=True)
    return [index for index, (grad, variable) in enumerate(pairs) if grad is not None and is_own(variable)]


def shared_indices(variables: Variables) -> list[int]:
    """Returns the indices of the variables that all workers hold."""
    return [index for index, variable in enumerate(variables) if not is_own(variable)]


def map_others(
    function: Callable[[list[Gradient]], Sequence[Gradient]], grads: Sequence[Gradient], variables: Variables
) -> list[Gradient]:
    """Applies a function to the gradients without those of this worker's rows, which are None in its argument; returns all."""
    own = own_indices(grads, variables)
    others = [None if index in own else grad for index, grad in enumerate(grads)]
    mapped = list(function(others))
    for index in own:
        mapped[index] = grads[index]
    return mapped


def check(optimizer: keras.optimizers.Optimizer, clips_local: bool) -> None:
    """Raises ConfigError if an optimizer needs more of a table than this worker's rows. `clips_local`: each replica clips before the sum."""
    asked = {"worker_table": "", **model_features.of_optimizer(optimizer)}
    if clips_local:
        asked["replica_clip"] = f"the optimizer {type(optimizer).__name__}, which clips the gradient of each replica"
    relations.check(asked, "worker_table")


def agree_on_finite(grads: Sequence[Gradient], variables: Variables) -> list[Gradient]:
    """Returns the gradients; those of this worker's rows have a NaN if such a gradient of any worker is not finite. A collective."""
    own = own_indices(grads, variables)
    agreed = list(grads)
    flag = gradient_lists.nan_unless_finite([grads[index] for index in own])
    (zero_or_nan,) = gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, [flag])
    # A worker without rows in this step gets one, to hold the NaN.
    count = tf.where(tf.math.is_finite(zero_or_nan), 0, 1)
    for index in own:
        grad = grads[index]
        width = grad.values.shape[1]
        values = tf.concat([grad.values, tf.fill([count, width], tf.cast(zero_or_nan, grad.dtype))], 0)
        ids = tf.concat([grad.indices, tf.zeros([count], grad.indices.dtype)], 0)
        agreed[index] = tf.IndexedSlices(values, ids, grad.dense_shape)
    return agreed

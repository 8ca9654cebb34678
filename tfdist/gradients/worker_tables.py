"""Gradients of tables: of the rows that each worker holds, which are summed over all replicas already (`layers/worker_rows.py`), and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Structure, Variables
from tfdist.collectives.communicator import communicator_for
from tfdist.compat import keras_internals
from tfdist.compat.tf_internals import regroup
from tfdist.errors import ConfigError
from tfdist.gradients import gradient_lists
from tfdist.gradients.sharded_update import elementwise_fault
from tfdist.layers.table import is_own, table_of


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
    fault = elementwise_fault(optimizer)
    if clips_local:
        fault = "clips each replica's gradient before the sum"
    if fault:
        raise ConfigError(
            f"The optimizer {type(optimizer).__name__} {fault}, which is not possible (yet) for a table whose rows the workers hold: change the "
            "optimizer, or give tfdist.layers.Embedding shards=1."
        )


def clips(optimizer: keras.optimizers.Optimizer, variables: Variables) -> bool:
    """Returns whether `clip` must replace Keras' clipping, which would use the norms of parts of a table. `variables`: all of the optimizer."""
    tables = [table_of(variable) for variable in variables]
    if optimizer.clipnorm:
        return any(table is not None and len(table.split.indices) > 1 for table in tables)
    return bool(optimizer.global_clipnorm) and any(table is not None and table.is_divided for table in tables)


def take_over_clip(optimizer: keras.optimizers.Optimizer, variables: Variables) -> None:
    """Makes an optimizer leave its clipping to `clip` while `clips` returns true, in place."""
    keras_internals.clip_unless(optimizer, lambda: clips(optimizer, variables))


def clip(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Gradient],
    variables: Variables,
    scale: tf.Tensor | float = 1.0,
) -> list[Gradient]:
    """Returns reduced gradients clipped by the norms of whole tables, in Keras' formulas. A collective, within a replica.

    `scale` is the loss scale that the gradients contain.
    """
    # Replicas have rows in common, whose squares must not be added before the rows are.
    grads = gradient_lists.deduplicate_rows(grads)
    unscaled = gradient_lists.scale(grads, 1 / scale)
    indices = [index for index, grad in enumerate(grads) if grad is not None]
    squares = {index: tf.reduce_sum(tf.square(_values(unscaled[index]))) for index in indices}
    own = own_indices(grads, variables)
    if own:
        context = tf.distribute.get_replica_context()
        local = tf.stack([tf.cast(squares[index], tf.float32) for index in own])
        totals = tf.unstack(context.merge_call(_add_of_workers, args=(local,)), len(own))
        squares |= {index: tf.cast(total, squares[index].dtype) for index, total in zip(own, totals, strict=True)}
    factors = _factors(optimizer, squares, variables)
    clipped = list(grads)
    for index in indices:
        (scaled,) = gradient_lists.scale([unscaled[index]], factors[index])
        (clipped[index],) = gradient_lists.scale([scaled], scale)
    return clipped


def _values(grad: Gradient) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _factors(
    optimizer: keras.optimizers.Optimizer, squares: dict[int, tf.Tensor], variables: Variables
) -> dict[int, tf.Tensor]:
    """Returns the number by which each gradient is multiplied, from the squares of their norms."""
    if optimizer.clipnorm:  # Keras ignores the other one
        shards: dict[int, list[int]] = {}  # the indices of each table, or of each other variable
        for index in squares:
            variable = variables[index]
            shards.setdefault(id(table_of(variable) or variable), []).append(index)
        factors: dict[int, tf.Tensor] = {}
        for indices in shards.values():
            norm = tf.sqrt(tf.add_n([squares[index] for index in indices]))
            factors |= dict.fromkeys(indices, optimizer.clipnorm / tf.maximum(norm, optimizer.clipnorm))
        return factors
    norm = tf.sqrt(tf.add_n([tf.cast(square, tf.float32) for square in squares.values()]))
    factor = optimizer.global_clipnorm / tf.maximum(norm, optimizer.global_clipnorm)
    # Like Keras' factor, NaN if the norm is not finite.
    return dict.fromkeys(squares, factor + (norm - norm))


def _add_of_workers(strategy: tf.distribute.Strategy, squares: Structure) -> Structure:
    """Returns the sums over the workers, in the order of `tree`. In cross-replica context."""
    group = communicator_for(strategy)
    own, *copies = strategy.experimental_local_results(squares)
    # The replicas of a worker have the same rows.
    totals = group.all_reduce([[own], *([tf.zeros_like(copy)] for copy in copies)])
    return regroup(tuple(total for (total,) in totals))


def agree_on_finite(grads: Sequence[Gradient], own: Sequence[int]) -> list[Gradient]:
    """Returns the gradients; those of this worker's rows have a NaN if such a gradient of any worker is not finite. A collective."""
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

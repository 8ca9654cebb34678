"""Functions on lists of gradients. A gradient is a dense tensor, the rows of an embedding (`IndexedSlices`), or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.compat import tf_internals


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Returns the gradient with `function` applied to its values, those of its rows if it is sparse; None stays None."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else function(grad)


def factor(number: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """Returns `number` as a tensor of `dtype`. A Python number is converted directly, not by way of float32, to keep its precision."""
    return tf.convert_to_tensor(number, dtype) if isinstance(number, (int, float)) else tf.cast(number, dtype)


def scale(grads: Sequence[Gradient], number: tf.Tensor | float) -> list[Gradient]:
    """Returns the gradients multiplied by `number`."""
    return [map_values(lambda value: value * factor(number, value.dtype), grad) for grad in grads]


def add_scalar(grads: Sequence[Gradient], number: tf.Tensor) -> list[Gradient]:
    """Returns the gradients with `number` added to every value."""
    return [map_values(lambda value: value + tf.cast(number, value.dtype), grad) for grad in grads]


def scale_no_nan(grads: Sequence[Gradient], share: tf.Tensor | float) -> list[Gradient]:
    """Returns the gradients multiplied by `share`; a share of 0 gives 0 even where a gradient is NaN."""
    return [map_values(lambda value: tf.math.multiply_no_nan(value, factor(share, value.dtype)), g) for g in grads]


def zero_if_no_examples(grads: Sequence[Gradient], share: tf.Tensor | float) -> list[Gradient]:
    """Returns the gradients, or zeros if this replica has no examples (`share` 0): the mean loss of an empty batch is NaN."""
    if isinstance(share, float):
        return list(grads)
    present = [grad for grad in grads if grad is not None]
    values = iter(tf.cond(share > 0, lambda: present, lambda: scale_no_nan(present, share)))
    return [None if grad is None else next(values) for grad in grads]


def deduplicate_rows(grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients, with the rows of equal ids of an embedding summed to one row.

    The gradient of an id is the sum of its rows. Keras 3.15 applies each row separately. Optimizers that square gradients (Adam,
    RMSprop, Adagrad and similar ones) would square the summands instead of the sum. Clipping would take the norm of the summands.
    """

    def summed(grad: tf.IndexedSlices) -> tf.IndexedSlices:
        ids, row_to_id = tf.unique(grad.indices)
        values = tf.math.unsorted_segment_sum(grad.values, row_to_id, tf.size(ids))
        return tf.IndexedSlices(values, ids, grad.dense_shape)

    return [summed(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]


class _Rows(tf.IndexedSlices):
    """`IndexedSlices` that can be divided by a number."""

    def __truediv__(self, number: tf.Tensor | float) -> tf.IndexedSlices:
        return tf.IndexedSlices(self.values / factor(number, self.dtype), self.indices, self.dense_shape)


def with_divisible_rows(grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients, sparse ones as rows that Keras 3.15 can divide by an optimizer's `loss_scale_factor`."""
    return [_Rows(g.values, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def nan_unless_finite(grads: Sequence[Gradient]) -> tf.Tensor:
    """Returns 0.0 if all gradients are finite, else NaN. Its sum over ranks is NaN on every rank if any rank's gradient is not finite."""
    finite = []
    for grad in grads:
        if grad is not None and grad.dtype.is_floating:
            values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
            finite.append(tf.reduce_all(tf.math.is_finite(values)))
    return tf.where(tf.reduce_all(finite), 0.0, float("nan"))


def with_static_shapes(grads: Sequence[Gradient], variables: Variables) -> list[Gradient]:
    """Returns the gradients, dense ones with their variables' static shapes, which some operations lose."""
    shaped = list(grads)
    for index, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if isinstance(grad, tf.Tensor) and grad.shape != variable.shape:
            shaped[index] = tf.ensure_shape(grad, variable.shape)
    return shaped


def all_reduce(op: tf.distribute.ReduceOp, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients reduced over all replicas, in one call per dtype."""
    reduced = list(grads)
    if tf.distribute.in_cross_replica_context():
        return reduced
    for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
        indices = [index for index, g in enumerate(grads) if g is not None and g.dtype == dtype]
        for index, value in zip(indices, tf_internals.all_reduce(op, [grads[i] for i in indices]), strict=True):
            reduced[index] = value
    return reduced

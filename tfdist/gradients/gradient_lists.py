"""Lists of gradients: dense ones, rows of embeddings, and None where a variable has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.aliases import Gradient, Variables


def map_values(function: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Applies a function to a gradient's numbers, rows or dense."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else function(grad)


def factor(number: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
    """Returns a factor in a precision; a number of Python's in all of it, not in float32's."""
    return tf.convert_to_tensor(number, dtype) if isinstance(number, (int, float)) else tf.cast(number, dtype)


def scale(grads: Sequence[Gradient], number: tf.Tensor | float) -> list[Gradient]:
    """Returns the gradients times a number."""
    return [map_values(lambda value: value * factor(number, value.dtype), grad) for grad in grads]


def add_scalar(grads: Sequence[Gradient], number: tf.Tensor) -> list[Gradient]:
    """Returns the gradients with a number added to each of theirs."""
    return [map_values(lambda value: value + tf.cast(number, value.dtype), grad) for grad in grads]


def scale_no_nan(grads: Sequence[Gradient], share: tf.Tensor | float) -> list[Gradient]:
    """Returns the gradients times `share`; 0 makes 0 of NaN, too."""
    return [map_values(lambda value: tf.math.multiply_no_nan(value, factor(share, value.dtype)), g) for g in grads]


def zero_if_no_examples(grads: Sequence[Gradient], share: tf.Tensor | float) -> list[Gradient]:
    """Returns the gradients, or zeros where this replica has no examples: the mean over none is NaN."""
    if isinstance(share, float):
        return list(grads)
    present = [grad for grad in grads if grad is not None]
    values = iter(tf.cond(share > 0, lambda: present, lambda: scale_no_nan(present, share)))
    return [None if grad is None else next(values) for grad in grads]


def deduplicate_rows(grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients, those of embeddings with one row for each id that occurs.

    The sum of the rows of an id is its gradient. Keras 3.15 applies each row by itself, so that optimizers that square
    gradients (Adam, RMSprop, Adagrad and their like) square the parts of a sum, and clipping takes the norm of them.
    """

    def summed(grad: tf.IndexedSlices) -> tf.IndexedSlices:
        ids, place = tf.unique(grad.indices)
        values = tf.math.unsorted_segment_sum(grad.values, place, tf.size(ids))
        return tf.IndexedSlices(values, ids, grad.dense_shape)

    return [summed(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]


class _Rows(tf.IndexedSlices):
    """Rows that can be divided by a number."""

    def __truediv__(self, number: tf.Tensor | float) -> tf.IndexedSlices:
        return tf.IndexedSlices(self.values / factor(number, self.dtype), self.indices, self.dense_shape)


def with_divisible_rows(grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients, rows so that Keras 3.15 can divide them by an optimizer's `loss_scale_factor`."""
    return [_Rows(g.values, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def nan_unless_finite(grads: Sequence[Gradient]) -> tf.Tensor:
    """Returns 0 if all are finite, else NaN: summed over ranks it tells all of them."""
    numbers = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads if grad is not None]
    finite = [tf.reduce_all(tf.math.is_finite(each)) for each in numbers if each.dtype.is_floating]
    return tf.where(tf.reduce_all(finite), 0.0, float("nan"))


def propagate_non_finite(grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns this replica's gradients, or NaN if any replica's is not finite: it sends a number for all of them."""
    (nothing,) = all_reduce(tf.distribute.ReduceOp.SUM, [nan_unless_finite(grads)])
    return add_scalar(grads, nothing)


def with_static_shapes(grads: Sequence[Gradient], variables: Variables) -> list[Gradient]:
    """Returns the gradients, dense ones with their variables' shapes: an operation may not know its shape."""
    return [
        tf.ensure_shape(grad, variable.shape) if isinstance(grad, tf.Tensor) and grad.shape != variable.shape else grad
        for grad, variable in zip(grads, variables, strict=True)
    ]


def all_reduce(op: tf.distribute.ReduceOp, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the gradients reduced over all replicas, in one call for each type of number."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return list(grads)
    reduced = list(grads)
    for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
        places = [place for place, g in enumerate(grads) if g is not None and g.dtype == dtype]
        for place, value in zip(places, context.all_reduce(op, [grads[place] for place in places]), strict=True):
            reduced[place] = value
    return reduced

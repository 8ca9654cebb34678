"""`total`, with which a user declares that a number is a sum over the examples of a batch."""

from __future__ import annotations

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.gradients import gradient_lists
from tfdist.replicas import step_context

_TOTAL = "_tfdist_total"


def total(value: Structure) -> Structure:
    """Declares a number to be a sum over the examples of a batch, in `add_loss`, a loss function or a `train_step`.

    With several replicas an undeclared number is a mean over examples, and is averaged over the replicas. A declared sum is
    added up: `self.add_loss(tfdist.total(kl))`. With one replica, and outside of a training or test step, the value stays as it is.

    Args:
        value: A number: a floating-point tensor of rank 0.

    Returns:
        The tensor to use instead of `value`.

    Examples:
        >>> import tensorflow as tf, tfdist
        >>> float(tfdist.total(tf.constant(3.0)))  # outside of a step there is one replica
        3.0
    """
    context = step_context.current()
    if not tf.is_tensor(value):
        return value
    declared = tf.identity(value)  # a copy, because the mark must not stay at the user's tensor
    if context is not None and not context.is_alone:
        declared = divide_by_share(value, context.part())
    setattr(declared, _TOTAL, True)
    return declared


def is_total(value: Structure) -> bool:
    """Returns whether a value is a result of `total`."""
    return getattr(value, _TOTAL, False)


def sum_dtype(dtype: tf.DType | str) -> tf.DType:
    """Returns the dtype in which values of `dtype` are summed over replicas; every collective supports it."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def divide_by_share(value: Structure, part: Structure) -> Structure:
    """Returns a sum divided by this replica's share, so that the average weighted by shares is the sum over replicas."""
    return tf.math.divide_no_nan(value, gradient_lists.factor(part, value.dtype))

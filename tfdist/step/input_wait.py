"""How long a step waits for its batch: the only measure of it that a graph which draws its own data can give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import tf_internals


def timed(get: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
    """Returns what `get` returns, and the seconds until all of its tensors were there, a float64 scalar.

    NaN where operations are deterministic: TensorFlow then has no clock.

    Args:
        get: Draws a batch, eagerly or while a step is traced.
    """
    if tf_internals.is_op_determinism_enabled():
        return get(), tf.constant(float("nan"), tf.float64)
    begun = tf.timestamp()
    with tf.control_dependencies([begun]):
        data = get()
    parts = [part for part in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(part)]
    with tf.control_dependencies(parts):
        return data, tf.timestamp() - begun

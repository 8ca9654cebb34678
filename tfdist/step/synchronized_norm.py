"""`BatchNormalization(synchronized=True)` if replicas have different numbers of examples, or no examples."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.collectives import own_time
from tfdist.compat import keras_internals
from tfdist.feature import Feature
from tfdist.replicas import step_context


class SynchronizedNorm(Feature):
    """The correction of a model's synchronized BatchNormalization layers for a step on one replica.

    - A padding example that does not count (see `replicas.batch_splitting`) is excluded from the moments.
    - In a custom step each replica's gradient is multiplied by its share at the end. A gradient that comes from another replica
      through the moments must be multiplied by the other replica's share.
    """

    def attach_model(self, model: keras.Model, engine: Any) -> None:
        for layer in keras_internals.layers(model):
            if getattr(layer, "synchronized", False) and not keras_internals.has_replaced_moments(layer):
                moments = functools.partial(_timed_moments, keras_internals.moments(layer))
                keras_internals.replace_moments(layer, moments)


def _timed_moments(moments: Function, inputs: tf.Tensor, mask: Structure) -> Structure:
    """Returns the moments; the wait for the other tasks' moments does not count as this task's own time."""
    return own_time.leave_out_wait(tf.distribute.get_strategy(), inputs, lambda: _moments(moments, inputs, mask))


def _moments(moments: Function, inputs: tf.Tensor, mask: Structure) -> Structure:
    step = step_context.current()
    if step is None or step.examples is None or mask is not None:  # Keras synchronizes nothing under a mask
        return moments(inputs, mask)
    inputs = inputs[: tf.where(step.examples > 0, tf.shape(inputs)[0], 0)]
    share = None if step.weighs_loss else step.gradient_weight
    if not isinstance(share, tf.Tensor):  # a constant share is equal on all replicas
        return moments(inputs, mask)
    inputs = _scale_gradient(tf.math.divide_no_nan(tf.ones_like(share), share), inputs)
    return tuple(_scale_gradient(share, moment) for moment in moments(inputs, mask))


def _scale_gradient(factor: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def same(value: tf.Tensor) -> Structure:
        return tf.identity(value), lambda gradient: gradient * tf.cast(factor, gradient.dtype)

    return same(value)

"""The length of the gradient that updates the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_internals
from tfdist.monitoring.meter import Meter


class GradientNorm(Meter):
    """Reads the L2 norm of the last update's gradient: reduced over all replicas, accumulated, unscaled, and not clipped yet.

    Each replica computes it in its step, on the same gradient. Not with parameter servers, where no replica has that of all, nor
    under a strategy that is not tfdist's, where Keras clips before it reduces.
    """

    _norm: tf.Variable | None = None

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        strategy, optimizer = model.distribute_strategy, getattr(model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # that of a LossScaleOptimizer
        traits = getattr(strategy, "traits", None)
        if optimizer is None or (traits.asynchronous if traits else strategy.num_replicas_in_sync > 1):
            return
        clip = keras_internals.clip_method(optimizer)
        if not isinstance(clip, _NormThenClip):
            clip = _NormThenClip(clip)
            keras_internals.replace_clip(optimizer, clip)
            strategy.gauges = [*getattr(strategy, "gauges", ()), clip.norm]
            model.train_function = None  # to be traced anew; on all workers
        self._norm = clip.norm

    def read(self) -> dict[str, float | None]:
        return {"train/gradient_norm": float(self._norm) if self.is_chief and self._norm is not None else None}


class _NormThenClip:
    """The method of an optimizer that clips gradients; keeps their norm in a variable."""

    def __init__(self, clip: Callable[[Any], Any]):
        self._clip = clip
        self.norm = tf.Variable(float("nan"), trainable=False, name="gradient_norm")

    def __call__(self, grads: Sequence[Any]) -> Any:
        self.norm.assign(tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in grads]))
        return self._clip(grads)

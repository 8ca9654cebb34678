"""What one replica's share of a batch adds to the losses of the whole batch: to their sum, and to their logs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_ADDED_LOSS = "_aggregate_additional_loss"
KERAS_LOSS_TRACKER = "_loss_tracker"
KERAS_COMPILED_LOSS = "_compile_loss"

_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


@contextlib.contextmanager
def of_share(model: keras.Model, examples: tf.Tensor | None, share: Callable[[], Any]) -> Iterator[None]:
    """Makes `model`'s losses right for a step on one replica.

    - A loss that a layer adds as a vector (`add_loss`) is summed over the batch by Keras. Replicas' losses are averaged by
      their shares, so that it is divided by this replica's.
    - The logs `loss` and those of single outputs are means over examples. Keras weighs an output's loss by its batch only
      where the size of the batch is known when the step is traced, which differs between the steps of one execution.
    - A replica without examples adds nothing, also where its loss is NaN.

    Args:
        model: Compiled.
        examples: How many examples this replica has, a scalar; None where that is not known.
        share: Returns this replica's part of the batch, None where its loss is not multiplied by that.
    """
    if not isinstance(vars(model).get(KERAS_ADDED_LOSS), _AddedLoss):
        setattr(model, KERAS_ADDED_LOSS, _AddedLoss(model))
    compiled = getattr(model, KERAS_COMPILED_LOSS, None)
    for tracker in (getattr(model, KERAS_LOSS_TRACKER, None), *getattr(compiled, "metrics", ())):
        if tracker is not None and not isinstance(vars(tracker).get("update_state"), _Tracked):
            tracker.update_state = _Tracked(tracker)
    _replica.examples, _replica.share = examples, share
    try:
        yield
    finally:
        _replica.examples = _replica.share = None


class _AddedLoss:
    """`Model._aggregate_additional_loss`."""

    def __init__(self, model: keras.Model):
        self._add = getattr(model, KERAS_ADDED_LOSS)

    def __call__(self, loss: Any) -> Any:
        total = self._add(loss)
        share = getattr(_replica, "share", None)
        if share is None or not loss.shape.rank or (part := share()) is None:
            return total
        return tf.math.divide_no_nan(total, tf.cast(part, total.dtype))


class _Tracked:
    """`update_state` of the metric that keeps the mean of a loss."""

    def __init__(self, tracker: keras.metrics.Metric):
        self._update = tracker.update_state

    def __call__(self, value: Any, sample_weight: Any = None) -> Any:
        examples = getattr(_replica, "examples", None)
        if examples is None or value.shape.rank:
            return self._update(value, sample_weight=sample_weight)
        value = tf.math.multiply_no_nan(value, tf.cast(examples > 0, value.dtype))
        return self._update(value, sample_weight=examples)

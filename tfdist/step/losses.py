"""What one replica's share of a batch adds to the losses of the whole batch: to their sum, and to their logs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import call_stack, keras_internals
from tfdist.errors import ConfigError
from tfdist.step import loss_reduction

_MEANS = ("sum_over_batch_size", "mean")


@dataclasses.dataclass
class _ReplicaExamples:
    """What a replica has of a batch.

    Attributes:
        examples: How many examples this replica has, a scalar; None where that is not known.
        part: Returns its part of the batch of all replicas; None where there is one replica.
        inputs: What the model is called with; its shapes and types are looked at.
        training: Whether the step trains.
        compiled: Whether XLA compiles the step.
    """

    examples: tf.Tensor | None
    part: Callable[[], Any]
    inputs: Any = None
    training: bool = True
    compiled: bool = False


_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


def _current_share() -> _ReplicaExamples | None:
    return getattr(_replica, "share", None)


@contextlib.contextmanager
def scale_losses_for_replica(model: keras.Model, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Makes `model`'s losses right for a step on one replica. Replicas' losses are averaged by their shares.

    - A sum is divided by this replica's share: `reduction="sum"`, a function or an `add_loss` that sums up, and a vector
      that a layer adds, which Keras sums.
    - Where a mask or `reduction="mean_with_sample_weight"` makes a mean one over fewer numbers, it weighs by these.
    - The logs `loss` and those of single outputs are means over examples. Keras weighs an output's loss by its batch only
      where the size of the batch is known when the step is traced, which differs between the steps of one execution.
    - A replica without examples adds nothing, also where its loss is NaN.
    - A number that an own step adds to a `keras.metrics.Mean` counts by this replica's share.

    Args:
        model: Compiled.
        *args: As of `_ReplicaExamples`.
        **kwargs: As of `_ReplicaExamples`.

    Raises:
        ConfigError: Within it, if XLA would have to compile a collective.
    """
    if not isinstance(keras_internals.replaced_added_loss(model), _AddedLoss):
        keras_internals.replace_added_loss(model, _AddedLoss(model))
    compiled = keras_internals.compiled_loss(model)
    if compiled is not None and compiled.built:
        _replace_losses(compiled)
    elif compiled is not None and "build" not in vars(compiled):
        compiled.build = _BuildReplicaLosses(compiled)
    for tracker in (keras_internals.loss_tracker(model), *getattr(compiled, "metrics", ())):
        if tracker is not None and not isinstance(vars(tracker).get("update_state"), _WeightedLossTracker):
            tracker.update_state = _WeightedLossTracker(tracker)
    for metric in model.metrics:
        if type(metric).update_state is keras.metrics.Mean.update_state and "update_state" not in vars(metric):
            metric.update_state = _Mean(metric)
    _replica.share = _ReplicaExamples(*args, **kwargs)
    try:
        yield
    finally:
        _replica.share = None


def _replace_losses(compiled: Any) -> None:
    losses = keras_internals.losses(compiled)
    for number, each in enumerate(losses):
        if not isinstance(each.loss, _CompiledLoss):
            losses[number] = each._replace(loss=_CompiledLoss(each.loss))


class _BuildReplicaLosses:
    """`CompileLoss.build`."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._build = compiled.build

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._build(*args, **kwargs)
        _replace_losses(self._compiled)


class _CompiledLoss:
    """A loss that a model is compiled with."""

    def __init__(self, loss: Any):
        self.loss = loss
        self._kind: loss_reduction.Reduction | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value, share = self.loss(y_true, y_pred, sample_weight), _current_share()
        if share is None or value.shape.rank or (part := share.part()) is None:
            return value
        if self._sums(y_true, y_pred):
            return _divide_by_share(value, part)
        if (divisor := self._divisor(y_pred, sample_weight, value.dtype)) is None:
            return value
        if share.compiled:
            raise ConfigError(
                f"jit_compile=True: the loss {self.loss.name} is a mean over what a mask or weights leave, which replicas must "
                "count together, and XLA compiles no collectives; compile the model with jit_compile=False."
            )
        if share.examples is not None:
            divisor = tf.where(share.examples > 0, divisor, 0)
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, divisor)
        context.strategy.decorrelate_random_numbers()  # as it has waited for the other replicas
        return value * tf.cast(tf.math.divide_no_nan(divisor, total * tf.cast(part, total.dtype)), value.dtype)

    def _sums(self, y_true: Any, y_pred: Any) -> bool:
        if not isinstance(self.loss, keras.losses.Loss):
            return False
        if self._kind is None:
            keras_own = getattr(self.loss, "fn", self.loss.call).__module__.startswith("keras.")
            found = loss_reduction.infer_reduction(self.loss, y_true, y_pred)
            self._kind = found or ("vector" if keras_own else "mean")
        return self._kind == "sum" or (self._kind == "vector" and self.loss.reduction == "sum")

    def _divisor(self, y_pred: Any, sample_weight: Any, dtype: Any) -> tf.Tensor | None:
        """Returns by what Keras divides this replica's sum, if that is not as many for each example."""
        mask, reduction = keras_internals.mask(y_pred), getattr(self.loss, "reduction", None)
        if self._kind != "vector" or (mask is None and (sample_weight is None or reduction in _MEANS)):
            return None
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        if reduction in _MEANS:
            return tf.reduce_sum(tf.cast(mask, wide))
        weights = None if sample_weight is None else tf.convert_to_tensor(sample_weight)
        return tf.reduce_sum(tf.cast(keras_internals.apply_mask(weights, mask, dtype=wide, reduction=reduction), wide))


class _AddedLoss:
    """`Model._aggregate_additional_loss`."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._add = keras_internals.added_loss_method(model)
        self._kinds: dict[bool, list[loss_reduction.Reduction]] = {}

    def __call__(self, loss: Any) -> Any:
        total, share = self._add(loss), _current_share()
        if share is None or (part := share.part()) is None:
            return total
        return _divide_by_share(total, part) if loss.shape.rank or self._sums(loss, share) else total

    def _sums(self, loss: Any, share: _ReplicaExamples) -> bool:
        added = loss_reduction.losses_added_by_layers(self._model)
        place = next((number for number, each in enumerate(added) if each is loss), None)
        if place is None:  # a regularizer
            return False
        if share.training not in self._kinds:
            self._kinds[share.training] = loss_reduction.infer_added_loss_reductions(
                self._model, share.inputs, share.training
            )
        kinds = self._kinds[share.training]
        return len(kinds) == len(added) and kinds[place] == "sum"


class _WeightedLossTracker:
    """`update_state` of the metric that keeps the mean of a loss; an own step may call it, too."""

    def __init__(self, tracker: keras.metrics.Metric):
        self._update = tracker.update_state
        self._of_own_step = _Mean(tracker)

    def __call__(self, value: Any, sample_weight: Any = None) -> Any:
        share = _current_share()
        if not call_stack.called_from_keras_step():
            return self._of_own_step(value, sample_weight)
        if share is None or share.examples is None or value.shape.rank:
            return self._update(value, sample_weight=sample_weight)
        value = tf.math.multiply_no_nan(value, tf.cast(share.examples > 0, value.dtype))
        return self._update(value, sample_weight=share.examples)


class _Mean:
    """`update_state` of a `keras.metrics.Mean`."""

    def __init__(self, metric: keras.metrics.Metric):
        self._update = metric.update_state

    def __call__(self, values: Any, sample_weight: Any = None) -> Any:
        share = _current_share()
        rank = values.shape.rank if tf.is_tensor(values) else np.ndim(values)
        if share is not None and sample_weight is None and rank == 0:
            sample_weight = share.part()
        return self._update(values, sample_weight=sample_weight)


def _divide_by_share(value: Any, part: Any) -> Any:
    """Returns a sum divided by this replica's share, so that the average by shares is the sum over replicas."""
    return tf.math.divide_no_nan(value, tf.cast(part, value.dtype))

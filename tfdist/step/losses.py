"""Scales a replica's losses to its share of the whole batch, in their sum and in their logs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import call_stack, keras_internals, keras_losses, tf_internals
from tfdist.errors import ConfigError
from tfdist.gradients import gradient_lists
from tfdist.replicas import step_context
from tfdist.replicas.step_context import StepContext
from tfdist.step import metrics, whole_batch
from tfdist.step.graph_copies import depends_on, trace_apart
from tfdist.step.totals import divide_by_share, is_total, total

_MEANS = ("sum_over_batch_size", "mean")
_NONE = ("none", None)
# Keras' own losses whose values are not one for each example, or depend on the other examples of a batch.
_OF_BATCHES = (keras.losses.Circle, keras.losses.Dice, keras.losses.Tversky)
_OF_BATCHES_BY_FUNCTION = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)
_MEAN_TRAINED = (
    "The loss {} returns one number for a batch, and the replicas cannot compute it of the whole batch: {}. They train the mean of "
    "what it is for their parts of the batch, which is the same for a mean over examples only. Or return one value for each "
    "example, or declare a sum: `return tfdist.total(value)`."
)
_MEAN_ADDED = (
    "The layer {} adds a loss of one number (add_loss), which is taken for a mean over the examples and averaged over the replicas. "
    "Declare a sum: `self.add_loss(tfdist.total(value))`. A vector, one value for each example, is summed, as Keras does."
)


@contextlib.contextmanager
def scale_losses_for_replica(model: keras.Model, step: StepContext) -> Iterator[None]:
    """Makes `model`'s losses right for a step on one replica. Replicas' losses are averaged by their shares.

    - A loss of one number, a function's or Dice, is computed of the whole batch on each replica (`whole_batch`).
    - A sum is divided by this replica's share: `reduction="sum"`, a number declared by `total`, and a vector that a layer adds,
      which Keras sums. A number that a layer adds is a mean.
    - Where a mask or `reduction="mean_with_sample_weight"` makes a mean one over fewer numbers, it weighs by these.
    - The logs `loss` and those of single outputs are means over examples. Keras weighs an output's loss by its batch only
      where the size of the batch is known when the step is traced, which differs between the steps of one execution.
    - A replica without examples adds nothing, also where its loss is NaN.
    - A sum that `tf.nn.compute_average_loss` divides by the `global_batch_size` that it is given is a sum, too.
    - A number that an own step adds to a `keras.metrics.Mean` counts by this replica's share.
    - A metric that is no sum over examples is computed of the whole batch, too (`metrics`).

    Within a step, raises ConfigError if XLA would have to compile a collective.
    """
    if not step.is_alone:
        keras_losses.keep_added_losses_apart(model)
    if not isinstance(keras_losses.replaced_added_loss(model), _AddedLoss):
        keras_losses.replace_added_loss(model, _AddedLoss(model))
    compiled = keras_losses.compiled_loss(model)
    if compiled is not None and compiled.built:
        _replace_losses(compiled)
    elif compiled is not None and "build" not in vars(compiled):
        metrics.replace_after_build(compiled, lambda: _replace_losses(compiled))
    for tracker in (keras_losses.loss_tracker(model), *getattr(compiled, "metrics", ())):
        if tracker is not None and not isinstance(vars(tracker).get("update_state"), _WeightedLossTracker):
            tracker.update_state = _WeightedLossTracker(tracker)
    for metric in model.metrics:
        if type(metric).update_state is keras.metrics.Mean.update_state and "update_state" not in vars(metric):
            metric.update_state = functools.partial(_update_mean, metric.update_state)
    if not step.is_alone:
        metrics.give_whole_batch(model)
    with step_context.running(step), tf_internals.correcting_average_losses(_total_of_step):
        yield


def _total_of_step(value: Structure) -> Structure:
    """Returns a sum divided by the size of the whole batch as `total` does, but in a replica's step only."""
    return value if step_context.current() is None else total(value)


def _replace_losses(compiled: keras.losses.Loss) -> None:
    keras_losses.keep_configuration_errors(compiled)
    losses = keras_losses.losses(compiled)
    for number, each in enumerate(losses):
        if not isinstance(each.loss, _CompiledLoss):
            losses[number] = each._replace(loss=_CompiledLoss(each.loss))


class _CompiledLoss:
    """A loss that a model is compiled with."""

    def __init__(self, loss: keras.losses.Loss):
        self.loss = loss
        self._kind: Literal["examples", "whole", "total"] | None = None
        self._warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Structure, y_pred: Structure, sample_weight: Structure = None) -> Structure:
        step = step_context.current()
        if step is None or step.is_alone:
            return self.loss(y_true, y_pred, sample_weight)
        self._kind = self._kind or self._find_kind(y_true, y_pred)
        if self._kind == "whole":
            return self._of_whole_batch(step, y_true, y_pred, sample_weight)
        if self._kind == "total":
            return self.loss(y_true, y_pred, sample_weight)
        value, mask = keras_losses.loss_and_mask(self.loss, y_true, y_pred, sample_weight)
        if value.shape.rank:
            return value
        part = step.part()
        if self.loss.reduction == "sum":
            return divide_by_share(value, part)
        if (divisor := self._divisor(mask, sample_weight, value.dtype)) is None:
            return value
        if step.is_compiled:
            raise ConfigError(
                f"jit_compile=True: the loss {self.loss.name} is a mean over the values that a mask or weights leave, which replicas must "
                "count together, and XLA compiles no collectives; compile the model with jit_compile=False."
            )
        if step.examples is not None:
            divisor = tf.where(step.examples > 0, divisor, 0)
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, divisor)
        context.strategy.decorrelate_random_numbers()  # as it has waited for the other replicas
        return value * tf.cast(
            tf.math.divide_no_nan(divisor, total * gradient_lists.factor(part, total.dtype)), value.dtype
        )

    def _find_kind(self, y_true: Structure, y_pred: Structure) -> Literal["examples", "whole", "total"]:
        """Returns whether the loss has a value for each example, must see the whole batch, or returns a number declared by `total`.

        One that is not Keras' own is traced once more, apart from the step, for the rank of its result.
        """
        function = getattr(self.loss, "fn", None)
        if type(self.loss).__call__ is not keras.losses.Loss.__call__:
            return "whole"
        makers = [type(self.loss).call, *([] if function is None else [function])]
        if all((getattr(each, "__module__", None) or "").startswith("keras.") for each in makers):
            of_batches = isinstance(self.loss, _OF_BATCHES) or function in _OF_BATCHES_BY_FUNCTION
            return "whole" if of_batches else "examples"
        if tf.executing_eagerly():  # where it may do what cannot be traced
            return "examples" if self.loss.reduction in _NONE else "whole"
        rows = tf.nest.map_structure(tf.type_spec_from_value, (y_true, y_pred))
        value = trace_apart(self._values, rows)
        rank = value.shape.rank if tf.is_tensor(value) else np.ndim(value)  # it may return a Python number
        return "total" if is_total(value) else "examples" if rank else "whole"

    def _values(self, y_true: Structure, y_pred: Structure) -> Structure:
        rows = (y_true, y_pred)
        rows = tf.nest.map_structure(lambda each: keras.ops.convert_to_tensor(each, self.loss.dtype), rows)
        return self.loss.call(*rows)

    def _of_whole_batch(self, step: StepContext, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        if (why := whole_batch.obstacle(step, self.loss.dtype, (y_true, y_pred, sample_weight))) is not None:
            if not self._warned:
                warnings.warn(_MEAN_TRAINED.format(self.loss.name, why), stacklevel=2)
            self._warned = True
            return self.loss(y_true, y_pred, sample_weight)
        rows = whole_batch.gathered(step, self.loss, y_true, y_pred, sample_weight)
        with step_context.running(StepContext(None, is_alone=True)):  # the whole batch is here
            value = self.loss(*rows)
        if value.shape.rank:
            raise ConfigError(
                f"The loss {self.loss.name} depends on all examples of a batch, and has a value for each (reduction="
                f"{self.loss.reduction!r}), which replicas cannot divide among them; give it reduction='sum' or 'mean'."
            )
        return whole_batch.divide_gradient(value, step.part())

    def _divisor(self, mask: Structure, sample_weight: Structure, dtype: tf.DType | str) -> tf.Tensor | None:
        """Returns Keras' divisor of this replica's sum, if it is not proportional to the examples."""
        reduction = self.loss.reduction
        if mask is None and (sample_weight is None or reduction in _MEANS):
            return None
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        if reduction in _MEANS:
            return tf.reduce_sum(tf.cast(mask, wide))
        weights = None if sample_weight is None else tf.convert_to_tensor(sample_weight)
        return tf.reduce_sum(tf.cast(keras_losses.apply_mask(weights, mask, dtype=wide, reduction=reduction), wide))


class _AddedLoss:
    """`Model._aggregate_additional_loss`."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._add = keras_losses.added_loss_method(model)
        self._warned: set[str] = set()

    def __call__(self, loss: keras.losses.Loss) -> Structure:
        total, step = self._add(loss), step_context.current()
        if step is None or step.is_alone:
            return total
        if loss.shape.rank:
            return divide_by_share(total, step.part())
        if not is_total(loss):
            self._warn(loss, step)
        return total

    def _warn(self, loss: keras.losses.Loss, step: StepContext) -> None:
        """Says once of a layer that its number is taken for a mean, if it depends on the data."""
        for layer in keras_internals.layers(self._model):
            # Keras divides what an activity regularizer returns by the number of examples.
            if layer.activity_regularizer is not None or layer.name in self._warned:
                continue
            if any(each is loss for each in keras_losses.added_losses(layer)) and depends_on(step.data, loss):
                self._warned.add(layer.name)
                warnings.warn(_MEAN_ADDED.format(layer.name), stacklevel=2)


class _WeightedLossTracker:
    """`update_state` of the metric that keeps the mean of a loss; an own step may call it, too."""

    def __init__(self, tracker: keras.metrics.Metric):
        self._update = tracker.update_state

    def __call__(self, value: Structure, sample_weight: Structure = None) -> Structure:
        step = step_context.current()
        if not call_stack.called_from_keras_step():
            return _update_mean(self._update, value, sample_weight)
        if step is None or step.examples is None or value.shape.rank:
            return self._update(value, sample_weight=sample_weight)
        value = tf.math.multiply_no_nan(value, tf.cast(step.examples > 0, value.dtype))
        return self._update(value, sample_weight=step.examples)


def _update_mean(update: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
    """`update_state` of a `keras.metrics.Mean`, whose own is `update`."""
    step = step_context.current()
    rank = values.shape.rank if tf.is_tensor(values) else np.ndim(values)
    if step is not None and sample_weight is None and rank == 0:
        sample_weight = step.part()
    return update(values, sample_weight=sample_weight)

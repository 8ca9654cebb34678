"""Corrections of a replica's losses, so that their average over the replicas, and their logs, equal those of one process."""

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
from tfdist.compat import call_stack, keras_internals, keras_losses, tf_internals, unsupported
from tfdist.errors import ConfigError
from tfdist.gradients import gradient_lists
from tfdist.replicas import step_context
from tfdist.replicas.step_context import StepContext
from tfdist.step import metrics, split_logits, whole_batch
from tfdist.step.compared_examples import compares_examples
from tfdist.step.graph_copies import depends_on, trace_apart
from tfdist.step.totals import divide_by_share, is_total, sum_dtype, total

Kind = Literal["examples", "compared", "whole", "total"]

_MEANS = ("sum_over_batch_size", "mean")
_NONE = ("none", None)
# Keras' losses that return one value for a batch, or values that depend on other examples of the batch.
_BATCH_LOSSES = (keras.losses.Circle, keras.losses.Dice, keras.losses.Tversky)
_BATCH_LOSS_FUNCTIONS = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)
_MEAN_TRAINED = (
    "The loss {} returns one number for a batch, and the replicas cannot compute it for the whole batch: {}. They train on the mean "
    "of the loss over their parts of the batch, which equals it only if the loss is a mean over examples. Otherwise return one value "
    "for each example, or declare a sum: `return tfdist.total(value)`."
)
_COMPARED = (
    "The loss {} compares the examples of a batch: its value of an example depends on the others. The replicas cannot compute it for "
    "the whole batch: {}. Or compare each example with the rows of all replicas in the loss: `tfdist.whole_batch(tensor)`."
)
_MEAN_ADDED = (
    "The layer {} adds a scalar loss (add_loss), which is treated as a mean over the examples and averaged over the replicas. If it "
    "is a sum, declare it: `self.add_loss(tfdist.total(value))`. A vector, one value for each example, is summed, as in Keras."
)


@contextlib.contextmanager
def scale_losses_for_replica(model: keras.Model, step: StepContext) -> Iterator[None]:
    """Corrects `model`'s losses for a step on one replica, within the context.

    The step averages the replicas' losses, weighted by their shares: the fractions of the batch that they have. Hence:

    - A scalar loss (a function's, Dice), and one that compares examples (an in-batch softmax), is computed on each replica from the
      whole batch (`whole_batch`).
    - A sum is divided by this replica's share: `reduction="sum"`, a number declared by `total`, and a vector that a layer adds,
      which Keras sums. A scalar that a layer adds is a mean.
    - A mean over fewer values, due to a mask or `reduction="mean_with_sample_weight"`, is weighted by their number or weight.
    - The logs `loss` and those of single outputs are means over examples. Keras weights an output's loss by the batch size only
      if that is static when the step is traced, which differs between the steps of one execution.
    - A replica without examples adds nothing, even if its loss is NaN.
    - `tf.nn.compute_average_loss` returns a sum if it is given a `global_batch_size`; it is divided by the share, too.
    - A scalar that a custom step adds to a `keras.metrics.Mean` is weighted by this replica's share.
    - A metric that is not a sum over examples is computed from the whole batch, too (`metrics`).

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
    """Declares a sum over examples as `total` does, within a replica's step; returns it unchanged elsewhere."""
    return value if step_context.current() is None else total(value)


def _replace_losses(compiled: keras.losses.Loss) -> None:
    keras_losses.keep_configuration_errors(compiled)
    losses = keras_losses.losses(compiled)
    for index, output_loss in enumerate(losses):
        if not isinstance(output_loss.loss, _CompiledLoss):
            losses[index] = output_loss._replace(loss=_CompiledLoss(output_loss.loss))


class _CompiledLoss:
    """The replacement of a loss of `model.compile`. The first step determines the kind of the loss, which decides the correction."""

    def __init__(self, loss: keras.losses.Loss):
        self.loss = loss
        self._kind: Kind | None = None
        self._warned = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Structure, y_pred: Structure, sample_weight: Structure = None) -> Structure:
        if y_true is None:
            raise ConfigError(unsupported.NO_LABELS)
        loss = split_logits.loss_of(self.loss, y_pred)
        step = step_context.current()
        if step is None or step.is_alone:
            return loss(y_true, y_pred, sample_weight)
        self._kind = self._kind or self._find_kind(y_true, y_pred)
        if self._kind in ("whole", "compared"):
            return self._of_whole_batch(step, y_true, y_pred, sample_weight)
        if self._kind == "total":
            return self.loss(y_true, y_pred, sample_weight)
        value, mask = keras_losses.loss_and_mask(loss, y_true, y_pred, sample_weight)
        if value.shape.rank:
            return value
        share = step.part()
        if self.loss.reduction == "sum":
            return divide_by_share(value, share)
        divisor = self._divisor(mask, sample_weight, value.dtype)
        if divisor is None:
            return value
        if step.is_compiled:
            raise ConfigError(
                f"jit_compile=True: the loss {self.loss.name} is a mean over the values that a mask or weights select. The replicas must "
                "count them together, and XLA compiles no collectives; compile the model with jit_compile=False."
            )
        if step.examples is not None:
            divisor = tf.where(step.examples > 0, divisor, 0)
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, divisor)
        context.strategy.decorrelate_random_numbers()  # other replicas were traced while this one waited
        # This replica's part of the mean over all replicas is value * divisor / total. The step will multiply it by the share.
        weight = tf.math.divide_no_nan(divisor, total * gradient_lists.factor(share, total.dtype))
        return value * tf.cast(weight, value.dtype)

    def _find_kind(self, y_true: Structure, y_pred: Structure) -> Kind:
        """Returns "examples" for one value per example, "total" for a number declared by `total`, "whole" if it needs the whole batch.

        "compared" means one value per example that depends on the other examples, which needs the whole batch, too. A custom loss is
        traced apart from the step, because the rank of its result decides, and evaluated there on made-up examples.
        """
        function = getattr(self.loss, "fn", None)
        if type(self.loss).__call__ is not keras.losses.Loss.__call__:
            return "whole"
        implementations = [type(self.loss).call]
        if function is not None:
            implementations.append(function)
        if all((getattr(code, "__module__", None) or "").startswith("keras.") for code in implementations):
            is_batch_loss = isinstance(self.loss, _BATCH_LOSSES) or function in _BATCH_LOSS_FUNCTIONS
            return "whole" if is_batch_loss else "examples"
        if tf.executing_eagerly():  # an eager loss may contain Python code that cannot be traced
            return "examples" if self.loss.reduction in _NONE else "whole"
        rows = tf.nest.map_structure(tf.type_spec_from_value, (y_true, y_pred))
        value, _ = trace_apart(self._values, rows)
        rank = value.shape.rank if tf.is_tensor(value) else np.ndim(value)  # it may return a Python number
        if is_total(value):
            return "total"
        if not rank:
            return "whole"
        return "compared" if compares_examples(self._values, y_true, y_pred) else "examples"

    def _values(self, y_true: Structure, y_pred: Structure) -> Structure:
        rows = (y_true, y_pred)
        rows = tf.nest.map_structure(lambda values: keras.ops.convert_to_tensor(values, self.loss.dtype), rows)
        return self.loss.call(*rows)

    def _of_whole_batch(self, step: StepContext, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        reason = whole_batch.obstacle(step, self.loss.dtype, (y_true, y_pred, sample_weight))
        if reason is not None:
            if self._kind == "compared":
                raise ConfigError(_COMPARED.format(self.loss.name, reason))
            if not self._warned:
                warnings.warn(_MEAN_TRAINED.format(self.loss.name, reason), stacklevel=2)
            self._warned = True
            return self.loss(y_true, y_pred, sample_weight)
        rows = whole_batch.gathered(step, self.loss, y_true, y_pred, sample_weight)
        # `rows` are the whole batch, which needs no correction.
        with step_context.running(StepContext(None, is_alone=True)):
            value = self.loss(*rows)
        if value.shape.rank:
            raise ConfigError(
                f"The loss {self.loss.name} depends on all examples of a batch and returns a value for each (reduction="
                f"{self.loss.reduction!r}); replicas cannot divide such values among them. Give it reduction='sum' or 'mean'."
            )
        return whole_batch.divide_gradient(value, step.part())

    def _divisor(self, mask: Structure, sample_weight: Structure, dtype: tf.DType | str) -> tf.Tensor | None:
        """Returns the divisor of Keras' mean on this replica, or None if it is proportional to the number of examples."""
        reduction = self.loss.reduction
        if mask is None and (sample_weight is None or reduction in _MEANS):
            return None
        wide = sum_dtype(dtype)
        if reduction in _MEANS:
            return tf.reduce_sum(tf.cast(mask, wide))
        weights = None if sample_weight is None else tf.convert_to_tensor(sample_weight)
        return tf.reduce_sum(tf.cast(keras_losses.apply_mask(weights, mask, dtype=wide, reduction=reduction), wide))


class _AddedLoss:
    """The replacement of `Model._aggregate_additional_loss`, which adds a layer's loss, corrected for this replica."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._add = keras_losses.added_loss_method(model)
        self._warned: set[str] = set()

    def __call__(self, loss: keras.losses.Loss) -> Structure:
        total = self._add(loss)
        step = step_context.current()
        if step is None or step.is_alone:
            return total
        if loss.shape.rank:
            return divide_by_share(total, step.part())
        if not is_total(loss):
            self._warn(loss, step)
        return total

    def _warn(self, loss: keras.losses.Loss, step: StepContext) -> None:
        """Warns, once for each layer, that its scalar loss is treated as a mean, unless the loss is independent of the data."""
        for layer in keras_internals.layers(self._model):
            # Keras divides an activity regularizer's loss by the number of examples: a mean, as assumed.
            if layer.activity_regularizer is not None or layer.name in self._warned:
                continue
            if any(added is loss for added in keras_losses.added_losses(layer)) and depends_on(step.data, loss):
                self._warned.add(layer.name)
                warnings.warn(_MEAN_ADDED.format(layer.name), stacklevel=2)


class _WeightedLossTracker:
    """The replacement of `update_state` for a metric that tracks the mean of a loss. Keras' step and custom steps call it."""

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
    """Calls `update`, the original `update_state` of a `keras.metrics.Mean`, and weights a scalar by this replica's share."""
    step = step_context.current()
    rank = values.shape.rank if tf.is_tensor(values) else np.ndim(values)
    if step is not None and sample_weight is None and rank == 0:
        sample_weight = step.part()
    return update(values, sample_weight=sample_weight)

"""Cross entropies of logits of which each worker of a model group has a part, as in Megatron-LM: the workers exchange a few numbers per label."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.compat import call_stack, keras_internals, keras_losses, keras_metrics
from tfdist.layers.group_exchanges import GroupExchanges
from tfdist.replicas import step_context

# Metrics that read only the class of the largest logit, as they are compiled.
_OF_LARGEST = (
    *("accuracy", "acc", "categorical_accuracy", "sparse_categorical_accuracy"),
    *(keras.metrics.CategoricalAccuracy, keras.metrics.SparseCategoricalAccuracy),
)


def takes_parts(model: keras.Model, workers: int) -> bool:
    """Returns whether the caller's call of a model is that of Keras' own step, whose loss can be computed from parts of the output."""
    loss = keras_losses.only_loss(model)
    arguments = keras_losses.arguments(loss) if type(loss) in _FUNCTIONS else {}
    return (
        bool(arguments.get("from_logits"))
        and arguments.get("axis", -1) == -1
        and len(model.outputs) == 1
        and (model.outputs[0].shape[-1] or 0) > workers  # Keras treats one column as a vector
        and all(keras_internals.is_keras_method(model, name) for name in ("compute_loss", "compute_metrics"))
        and call_stack.is_called_by_keras_step(model)
    )


def give_logits_to_metrics(model: keras.Model) -> None:
    """Makes the compiled metrics of a model receive whole logits where the model's output is a part, in place."""
    compiled = keras_metrics.compiled_metrics(model)
    if compiled is not None and "update_state" not in vars(compiled):
        compiled.update_state = functools.partial(_update, compiled, compiled.update_state)


def loss_of(loss: keras.losses.Loss, y_pred: Structure) -> keras.losses.Loss:
    """Returns a compiled loss; a copy that reads parts if `y_pred` is this worker's part of the logits."""
    logits, group = _split_logits()
    if logits is None or y_pred is not logits:
        return loss
    of_parts = copy.copy(loss)
    of_parts.fn = functools.partial(_FUNCTIONS[type(loss)], group)
    return of_parts


def _split_logits() -> tuple[tf.Tensor, GroupExchanges] | tuple[None, None]:
    step = step_context.current()
    return (None, None) if step is None or step.split_logits is None else step.split_logits


def _update(compiled: Any, update: Function, y_true: Structure, y_pred: Structure, sample_weight: Structure) -> None:
    logits, group = _split_logits()
    metrics = keras_metrics.compiled(compiled)

    def whole(value: tf.Tensor) -> tf.Tensor:
        if group is None or value is not logits or not metrics:
            return value
        of_largest = all(each in _OF_LARGEST or type(each) in _OF_LARGEST for each in metrics)
        joined = _largest(group, value) if of_largest else group.whole(value, -1)
        return keras_internals.copy_mask(value, joined)

    update(y_true, tf.nest.map_structure(whole, y_pred), sample_weight)


def _largest(group: GroupExchanges, part: tf.Tensor) -> tf.Tensor:
    """Returns logits that are 1 for the class of the largest logit, the first one of equal ones, and 0 for the others."""
    part = keras.ops.cast(part, "float32")
    size = part.shape[-1]
    index = tf.argmax(part, -1, tf.int32) + group.rank * size
    rows = group.rows(tf.stack([tf.reduce_max(part, -1), tf.cast(index, tf.float32)]))
    is_largest = tf.equal(rows[:, 0], tf.reduce_max(rows[:, 0], 0))
    first = tf.reduce_min(tf.where(is_largest, rows[:, 1], tf.float32.max), 0)
    return tf.one_hot(tf.cast(first, tf.int32), size * group.size)


def _sparse(
    group: GroupExchanges, labels: tf.Tensor, part: tf.Tensor, ignore_class: int | None = None, **_: Any
) -> Any:
    """Returns the values of `keras.losses.sparse_categorical_crossentropy` for the whole logits."""
    labels = tf.cast(labels, tf.int32)
    if labels.shape.rank == part.shape.rank:
        labels = tf.squeeze(labels, -1)
    counts = None if ignore_class is None else tf.not_equal(labels, ignore_class)
    if counts is not None:
        labels = tf.where(counts, labels, 0)
        part = tf.where(counts[..., tf.newaxis], part, 0)
    size = part.shape[-1]
    is_own, position = group.own(labels, size)
    target = tf.gather(part, position, axis=-1, batch_dims=part.shape.rank - 1)
    target = tf.where(is_own, target, 0)
    values = _crossentropy(
        group, part, target, lambda: tf.one_hot(tf.where(is_own, position, -1), size, dtype=part.dtype)
    )
    if counts is not None:
        values = tf.where(counts, values, 0)
        keras_losses.set_mask(values, counts)
    return values


def _categorical(
    group: GroupExchanges, labels: tf.Tensor, part: tf.Tensor, label_smoothing: float = 0, **_: Any
) -> Any:
    """Returns the values of `keras.losses.categorical_crossentropy` for the whole logits."""
    labels = labels * (1 - label_smoothing) + label_smoothing / labels.shape[-1]
    own = group.cut(labels, -1)
    return _crossentropy(group, part, tf.reduce_sum(part * own, -1), lambda: own, tf.reduce_sum(labels, -1))


def _crossentropy(
    group: GroupExchanges, part: tf.Tensor, target: tf.Tensor, labels: Callable[[], tf.Tensor], weight: Any = 1
) -> Any:
    """Returns the cross entropy of each label.

    Args:
        group: The workers that have the logits.
        part: This worker's logits.
        target: The sum of the products of these logits and their labels.
        labels: Returns the labels of these logits.
        weight: The sum of all labels.
    """

    @tf.custom_gradient
    def crossentropy(part: tf.Tensor) -> Structure:
        rows = group.rows(tf.stack([tf.reduce_logsumexp(part, -1), target]))
        total = tf.reduce_logsumexp(rows[:, 0], 0)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # As TensorFlow's: it assumes that the labels add up to 1.
            return upstream[..., tf.newaxis] * (tf.exp(part - total[..., tf.newaxis]) - labels())

        return weight * total - tf.reduce_sum(rows[:, 1], 0), gradient

    return crossentropy(part)


_FUNCTIONS: dict[type, Function] = {
    keras.losses.SparseCategoricalCrossentropy: _sparse,
    keras.losses.CategoricalCrossentropy: _categorical,
}

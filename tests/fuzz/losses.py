"""The losses of the cases as a user writes them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import tfdist
from tests.fuzz import cases
from tests.fuzz.cases import Case
from tfdist.compat import keras_losses


class Own(keras.losses.Loss):
    """A loss of the user's own."""

    def call(self, y: Any, out: Any) -> Any:
        return keras.ops.mean(keras.ops.sqrt(1 + (y - out) ** 2), -1)


class OwnMask(keras.losses.Loss):
    """Counts the examples, or tokens, whose first number is above 0."""

    def call(self, y: Any, out: Any) -> Any:
        values = keras.ops.mean((y - out) ** 2, -1)
        keras_losses.set_mask(values, y[..., 0] > 0)
        return values


class Centre(keras.losses.Loss):
    """The distance from a centre that follows the labels; it counts its calls."""

    def __init__(self, shape: tuple[int, ...], aggregation: str):
        super().__init__()
        kind = {"trainable": False, "aggregation": getattr(tf.VariableAggregation, aggregation)}
        self.centre = tf.Variable(tf.zeros(shape, keras.config.floatx()), **kind)
        self.calls = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def call(self, y: Any, out: Any) -> Any:
        self.calls.assign_add(1.0)
        value = tf.reduce_mean((out - self.centre) ** 2)
        self.centre.assign(0.75 * self.centre + 0.25 * tf.reduce_mean(y, 0))
        return value


def _counted(y: Any, out: Any) -> Any:
    chosen = tf.boolean_mask(tf.reduce_mean((y - out) ** 2, -1), y[..., 0] > 0.5)
    return tf.math.divide_no_nan(tf.reduce_sum(chosen), tf.cast(tf.size(chosen), out.dtype))


def _neighbours(y: Any, out: Any) -> Any:
    error = y - out
    return tf.reduce_sum(tf.square(error[1:] - error[:-1])) / 8


def _dice(y: Any, out: Any) -> Any:
    found = keras.ops.sigmoid(out)
    return 1 - (2 * keras.ops.sum(y * found) + 1) / (keras.ops.sum(y) + keras.ops.sum(found) + 1)


def _softmax(y: Any, out: Any) -> Any:
    """Each row's own key is its class among the keys of the batch."""
    scores = -((y[:, :1] + out[:, :1] - keras.ops.transpose(out[:, 1:])) ** 2)
    return keras.losses.sparse_categorical_crossentropy(keras.ops.arange(keras.ops.shape(out)[0]), scores, True)


class Softmax(keras.losses.Loss):
    """A softmax over the batch."""

    def call(self, y: Any, out: Any) -> Any:
        return _softmax(y, out)


def _pairs(y: Any, out: Any) -> Any:
    return keras.ops.sum(keras.ops.sqrt(1 + (out[:, None] - y[None]) ** 2)) / 16


_FUNCTIONS = {
    "number": lambda y, out: tf.reduce_mean((y - out) ** 2),
    "total": lambda y, out: tf.reduce_sum((y - out) ** 2) / 16,
    "declared": lambda y, out: tfdist.total(tf.reduce_sum((y - out) ** 2) / 8),
    "counted": _counted,
    "hinge": lambda y, out: keras.ops.sum(keras.ops.relu(y * out - 0.5)),
    "neighbours": _neighbours,
    "dice": _dice,
    "pairs": _pairs,
}


def loss_of(case: Case, output: str = "") -> Any:
    """Returns what a case compiles its model, or one of its outputs, with; in the strategy's scope."""
    kind, reduction = case.loss_of(output), case.reduction_of(output)
    if kind == "centre":
        return Centre((cases.TALL, 2) if case.model == "tall" else (2,), case.aggregation)
    if kind in _FUNCTIONS:
        return _FUNCTIONS[kind]
    own = {"own": Own, "own_mask": OwnMask, "softmax": Softmax}
    if kind in own:
        return own[kind](reduction=reduction)
    kinds = {"mse": "MeanSquaredError", "mae": "MeanAbsoluteError", "huber": "Huber"}
    if kind in kinds:
        return getattr(keras.losses, kinds[kind])(reduction=reduction)
    options: dict[str, Any] = {"ignore_class": cases.IGNORED} if kind == "ignored" else {}
    name = {"categorical": "Categorical", "binary": "Binary"}.get(kind, "SparseCategorical")
    return getattr(keras.losses, f"{name}Crossentropy")(from_logits=True, reduction=reduction, **options)

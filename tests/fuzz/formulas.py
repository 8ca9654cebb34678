"""The losses of the cases by plain arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fuzz.cases import CLASSES, IGNORED


@dataclasses.dataclass
class State:
    """What a loss keeps from step to step."""

    centre: Any = 0.0
    calls: int = 0


def huber(error: tf.Tensor) -> tf.Tensor:
    size = tf.abs(error)
    return tf.where(size <= 1, error**2 / 2, size - 0.5)


# Each returns a number for each example, or for each token.
VALUES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "mse": lambda y, out: tf.reduce_mean((y - out) ** 2, -1),
    "mae": lambda y, out: tf.reduce_mean(tf.abs(y - out), -1),
    "huber": lambda y, out: tf.reduce_mean(huber(y - out), -1),
    "own": lambda y, out: tf.reduce_mean(tf.sqrt(1 + (y - out) ** 2), -1),
    "binary": lambda y, out: tf.reduce_mean(tf.math.softplus(out) - y * out, -1),
    "categorical": lambda y, out: tf.reduce_logsumexp(out, -1) - tf.reduce_sum(y * out, -1),
    "sparse": lambda y, out: (
        tf.reduce_logsumexp(out, -1)
        - tf.reduce_sum(tf.one_hot(tf.cast(y, tf.int32), CLASSES, dtype=out.dtype) * out, -1)
    ),
}
VALUES |= {"ignored": VALUES["sparse"], "own_mask": VALUES["mse"]}


def softmax(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    """Returns the negative logarithm of the chance of each row's own key, row by row."""
    queries, keys = y[:, 0] + out[:, 0], out[:, 1]
    distances = [(queries[row] - keys) ** 2 for row in range(len(y))]
    return tf.stack([each[row] + tf.reduce_logsumexp(-each) for row, each in enumerate(distances)])


VALUES["softmax"] = softmax


def mask_of(loss: str, y: np.ndarray) -> np.ndarray | None:
    """Returns what a loss counts of its own values; None if all."""
    return {"ignored": lambda: y != IGNORED, "own_mask": lambda: y[..., 0] > 0}.get(loss, lambda: None)()


def steep(y: tf.Tensor, out: tf.Tensor) -> tf.Tensor:
    """Returns how far each number is beyond 0.5, which few are."""
    return tf.maximum(y * out - 0.5, 0)


def counted(y: tf.Tensor, out: tf.Tensor, state: State) -> tf.Tensor:
    counts = tf.cast(y[..., 0] > 0.5, out.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(VALUES["mse"](y, out) * counts), tf.reduce_sum(counts))


def dice(y: tf.Tensor, out: tf.Tensor, state: State) -> tf.Tensor:
    p = tf.sigmoid(out)
    return 1 - (2 * tf.reduce_sum(y * p) + 1) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1)


def centre(y: tf.Tensor, out: tf.Tensor, state: State) -> tf.Tensor:
    value = tf.reduce_mean((out - state.centre) ** 2)
    state.centre = 0.75 * state.centre + 0.25 * y.numpy().mean(0)
    state.calls += 1
    return value


def pairs(y: tf.Tensor, out: tf.Tensor, state: State) -> tf.Tensor:
    return sum(tf.reduce_sum(tf.sqrt(1 + (row - y) ** 2)) for row in tf.unstack(out)) / 16


# Each returns one number for a batch.
NUMBERS: dict[str, Callable[[tf.Tensor, tf.Tensor, State], tf.Tensor]] = {
    "number": lambda y, out, _: tf.reduce_mean((y - out) ** 2),
    "total": lambda y, out, _: tf.reduce_sum((y - out) ** 2) / 16,
    "declared": lambda y, out, _: tf.reduce_sum((y - out) ** 2) / 8,
    "counted": counted,
    "hinge": lambda y, out, _: tf.reduce_sum(steep(y, out)),
    "neighbours": lambda y, out, _: tf.reduce_sum(((out[1:] - out[:-1]) - (y[1:] - y[:-1])) ** 2) / 8,
    "dice": dice,
    "centre": centre,
    "pairs": pairs,
}

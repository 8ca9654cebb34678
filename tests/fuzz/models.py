"""Models and data of the fuzz test's cases."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.fuzz import overrides, uses
from tests.fuzz.cases import CLASS_LOSSES, CLASSES, SEQUENCES, SEVERAL, TALL, TOKENS, WORDS, Case
from tests.fuzz.kept import Keeps


class Added(keras.layers.Layer):
    """Adds a loss of its own: a vector, or its mean or sum over the batch."""

    def __init__(self, kind: str):
        super().__init__()
        total = lambda x: tfdist.total(keras.ops.sum(x))  # noqa: E731
        self._reduce = {"added_vector": lambda x: x, "added_mean": keras.ops.mean, "added_sum": total}[kind]

    def call(self, x: Any) -> Any:
        squares = keras.ops.mean(x**2, -1)
        self.add_loss(self._reduce(squares))
        return x


class OwnStep(keras.Model):
    """Trains with a step in the style of Keras' guide."""

    scales = False

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
            scaled = self.optimizer.scale_loss(loss) if self.scales else loss
        grads = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        next(metric for metric in self.metrics if metric.name == "loss").update_state(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


class ScaledStep(OwnStep):
    """Scales the loss, as an optimizer with `loss_scale_factor` wants it."""

    scales = True


def build(case: Case) -> keras.Model:
    """Returns the model, not compiled; its numbers are of Keras' `floatx`."""
    keras.utils.set_random_seed(case.seed)
    layers, name = keras.layers, case.model
    first = Keeps(case.assigned) if case.assigned and not case.hidden else lambda x: x
    units = CLASSES if case.loss in CLASS_LOSSES else 2
    if case.ids:
        width = 170 if case.compression else 3  # compressors leave small variables as they are
        x = inputs = layers.Input((TOKENS,), dtype="int32")
        x = layers.Embedding(WORDS, width, mask_zero=name.startswith("masked"))(first(x))
        x = {
            "embedding": layers.Flatten(),
            "tokens": layers.Dense(3, "tanh"),
            "masked_pooling": layers.GlobalAveragePooling1D(),
            "masked_lstm": layers.LSTM(3),
            "masked_tokens": layers.LSTM(3, return_sequences=True),
            "masked_outputs": layers.LSTM(3, return_sequences=True),
        }[name](x)
    elif name == "conv":
        x = inputs = layers.Input((5, 5, 2))
        x = layers.Flatten()(layers.MaxPooling2D()(layers.Conv2D(3, 2, activation="relu")(first(x))))
    else:
        wide = name == "wide" or case.compression
        x = inputs = layers.Input((40 if wide else 5,))
        regularizer = keras.regularizers.L2(0.05) if name == "regularized" else None
        x = layers.Dense(32 if wide else 4, "tanh", kernel_regularizer=regularizer)(first(x))
        if name == "norm":
            x = layers.BatchNormalization(synchronized=True, momentum=0.8)(x)
        elif name.startswith("added"):
            x = Added(name)(x)
    if case.assigned and case.hidden:
        x = Keeps(case.assigned)(x)
    if name == "masked_outputs":
        tokens = layers.TimeDistributed(layers.Dense(2), name="a")(x)
        outputs: Any = {"a": tokens, "b": layers.Dense(2, name="b")(layers.GlobalAveragePooling1D()(x))}
    elif name == "outputs":
        outputs = {each: layers.Dense(2, name=each)(x) for each in "ab"}
    elif name == "tall":
        outputs = layers.Reshape((TALL, 2))(layers.Dense(2 * TALL)(x))
    else:
        head = layers.Dense(units)
        outputs = (layers.TimeDistributed(head) if name == "masked_tokens" else head)(x)
    kind = {"keras": keras.Model, "own": OwnStep, "scaled": ScaledStep}[case.step]
    if case.use:
        kind = uses.of_class(kind, case.use)
    model = overrides.of_class(kind, case.override)(inputs, outputs)
    if case.use == "averages":
        uses.add_averages(model)
    overrides.assign(model, case.override)
    return model


def make_data(case: Case, rows: int, salt: int, weighted: bool) -> tuple[Any, ...]:
    """Returns inputs, targets, and weights if there are any; random numbers, of which no two sets are equal."""
    rng = np.random.default_rng([case.seed, salt])
    if case.ids:
        x = rng.integers(0, WORDS, (rows, TOKENS)).astype(np.int32)
        x[:, 0] = rng.integers(1, WORDS, rows)  # of no word at all there is no mean
    else:
        x = rng.standard_normal(
            {"conv": (rows, 5, 5, 2)}.get(case.model, (rows, 40 if case.compression or case.model == "wide" else 5))
        )
    tokens = {"masked_outputs": "a"}.get(case.model, "" if case.model in SEQUENCES else None)
    shapes = {name: (rows, TOKENS) if name == tokens else (rows,) for name in ("ab" if case.model in SEVERAL else [""])}

    def targets(each: tuple[int, ...]) -> np.ndarray:
        if case.loss in CLASS_LOSSES:
            classes = rng.integers(0, CLASSES, each)
            return np.eye(CLASSES)[classes] if case.loss == "categorical" else classes
        numbers = rng.standard_normal((*each, *([TALL] if case.model == "tall" else []), 2))
        return (numbers > 0).astype(float) if case.loss in ("binary", "dice") else numbers

    def weights(each: tuple[int, ...]) -> np.ndarray:
        shape = (rows, 1) if case.weights == "column" else each
        return rng.uniform(0.2, 2, shape) * (rng.random(shape) > (0.4 if case.weights in ("zeros", "tokens") else 0))

    y = {name: targets(each) for name, each in shapes.items()}
    w = {name: weights(each) for name, each in shapes.items()}
    if case.model not in SEVERAL:
        return (x, y[""], w[""]) if weighted else (x, y[""])
    return (x, y, w if case.weights == "outputs" else w["b"]) if weighted else (x, y)

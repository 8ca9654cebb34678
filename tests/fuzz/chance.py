"""Random layers: what each example met is found in the weights, and judged by its moments and by its likeness to others'.

Each example has a row of its own in an embedding, multiplied by the layer's numbers, of which the loss is the sum: SGD moves the row
by just these numbers, over the size of the batch.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz.cases import Case

WIDTH, EPOCHS, SIGMAS = 256, 2, 7.0


class Noise(keras.layers.Layer):
    """Multiplies by random numbers."""

    def __init__(self, kind: str):
        super().__init__()
        self._kind = kind
        self._seeds = keras.random.SeedGenerator(3)
        self._dropout = keras.layers.Dropout(0.25)

    def call(self, x: Any, training: bool = False) -> Any:
        kinds = {
            "dropout": lambda: self._dropout(x, training=training),
            "tf.dropout": lambda: tf.nn.dropout(x, 0.25),
            "tf.normal": lambda: x * tf.random.normal(tf.shape(x), dtype=x.dtype),
            "tf.uniform": lambda: x * tf.random.uniform(tf.shape(x), dtype=x.dtype),
            "keras.normal": lambda: x * keras.random.normal(tf.shape(x), dtype=x.dtype, seed=self._seeds),
            "keras.uniform": lambda: x * keras.random.uniform(tf.shape(x), dtype=x.dtype),
        }
        return kinds[self._kind]()


# Of each kind the mean and the variance.
MOMENTS = {"dropout": (1, 1 / 3), "normal": (0, 1), "uniform": (0.5, 1 / 12)}


def draws(case: Case, trainer: Any, fit_data: Any) -> np.ndarray:
    """Trains, and returns the numbers that each example met, `[epochs, examples, WIDTH]`."""
    keras.utils.set_random_seed(case.seed)
    with trainer.scope():
        table = keras.layers.Embedding(case.rows, WIDTH, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((), dtype="int32"), table, Noise(case.noise)])
        model.compile(
            keras.optimizers.SGD(1.0),
            lambda y, out: tf.reduce_sum(out, -1),
            steps_per_execution=case.steps_per_execution,
        )
    tables = [model.get_weights()[0]]
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: tables.append(model.get_weights()[0]))
    x, given = fit_data(case, (np.arange(case.rows), np.zeros(case.rows)))
    trainer.fit(model, x, **given, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[keep])
    moved = -np.diff(tables, axis=0)
    for rows in case.steps():
        moved[:, rows] *= len(rows)
    return moved


def differences(case: Case, found: np.ndarray) -> list[str]:
    """Returns what no such random numbers would be, a sentence for each."""
    mean, variance = MOMENTS[case.noise.rpartition(".")[2]]
    deviation = (found - mean).astype(np.float64)
    wrong = []
    for name, values, right in (("mean", deviation, 0), ("variance", deviation**2, variance)):
        if abs(values.mean() - right) > SIGMAS * (values.std() + 1e-6) / np.sqrt(values.size):
            wrong.append(f"the {name} of {case.noise} is off by {values.mean() - right:.3g}")
    rows = deviation.reshape(-1, WIDTH) / np.sqrt(variance)
    alike = rows @ rows.T / WIDTH - np.diag((rows**2).mean(1))
    epoch, example = np.divmod(np.unravel_index(np.abs(alike).argmax(), alike.shape), case.rows)
    if np.abs(alike).max() > SIGMAS / np.sqrt(WIDTH):
        wrong.append(f"{case.noise}: alike by {np.abs(alike).max():.3g} are examples {example} in epochs {epoch}")
    return wrong

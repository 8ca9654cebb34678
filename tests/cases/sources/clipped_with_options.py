"""Steps that clip their gradients, with accumulation, split slots, loss scales and executions of several steps."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, WORKERS
from tests.cases.case import case
from tests.cases.sources import split_tables
from tests.cases.sources.used_gradients import RATE, Step, X, Y, changed, gradient, trained
from tests.helpers.options import options_set
from tfdist.layers import Embedding

SHIFTED = (np.concatenate([X, X / 2, -X]), np.concatenate([Y, Y / 4, Y]))  # three batches, of unlike gradients


def clipped_slopes():
    """Returns a function for each batch of `SHIFTED`, which returns the clipped gradient at a weight."""

    def of(x, y):
        return lambda w: float(np.clip(gradient(w, x, y), -9, 9))

    return [of(*batch) for batch in zip(*(np.split(each, 3) for each in SHIFTED), strict=True)]


def limited(grads):
    return tf.clip_by_global_norm(grads, 9.0)[0]


def split(world):
    return options_set(world.trainer.strategy, shard_optimizer=True)


def with_momentum(epochs, momentum):
    w, velocity = 1.0, 0.0
    for slope in clipped_slopes() * epochs:
        velocity = momentum * velocity - RATE * slope(w)
        w += velocity
    return w


def accumulating():
    return keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)


@case(MIRRORED, WORKERS, full=(MIRRORED,))
def clipped_gradients_of_several_steps_are_accumulated(world):
    """Also where slots are split, so that each worker updates its pieces."""
    pairs, w = {}, 1.0
    parts = clipped_slopes() * 2
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        w -= RATE * (first(w) + second(w)) / 2
    for name, context in (("whole", contextlib.nullcontext()), ("split", split(world))):
        with context:
            pairs[name] = trained(world, changed(limited), epochs=2, optimizer=accumulating, data=SHIFTED)[0], w
    return pairs


@case(MIRRORED, WORKERS, full=True)
def clipped_gradients_update_split_slots(world):
    with split(world):
        found = trained(world, changed(limited), momentum=0.75, epochs=2, data=SHIFTED)[0]
    return {"weight": (found, with_momentum(2, 0.75))}


@case(MIRRORED, WORKERS, full=True)
def clipped_gradients_in_executions_of_several_steps(world):
    found = trained(world, changed(limited), momentum=0.75, epochs=2, data=SHIFTED, steps_per_execution=3)[0]
    return {"weight": (found, with_momentum(2, 0.75))}


class Scaled(Step):
    """A step that clips the gradients of a scaled loss, and so clips them by a limit that is scaled, too."""

    def _gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), tf.float32) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        return tape.gradient(scaled, self.trainable_variables), loss

    change = staticmethod(lambda grads: tf.clip_by_global_norm(grads, 16.0)[0])


@case(MIRRORED, WORKERS, full=(WORKERS,))
def clipped_gradients_of_a_scaled_loss(world):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=8.0)

    pairs = {"float32": (trained(world, Scaled, epochs=2, optimizer=optimizer)[0], 1 + 2 * RATE * 2)}
    keras.config.set_dtype_policy("mixed_float16")
    try:
        pairs["mixed"] = trained(world, Scaled, epochs=2, optimizer=optimizer)[0], 1 + 2 * RATE * 2
    finally:
        keras.config.set_dtype_policy("float32")
    return pairs


class LogsKernel(Step):
    """A step that logs the norm of its last gradient."""

    def train_step(self, data):
        grads, _ = self._gradients(data)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"norm": tf.norm(grads[-1])}


@case(WORKERS, full=True)
def gradients_of_rows_on_workers_count_once_beside_a_logged_norm(world):
    """The table's gradient is summed where its rows are."""
    ids, y, table = split_tables.IDS[:4], split_tables.Y[:4, :1], split_tables.TABLE
    with world.scope():
        entry = keras.Input((4,), dtype="int32")
        layer = Embedding(split_tables.ROWS, split_tables.COLUMNS, shards=2, weights=table)
        rows = split_tables.Sum()(layer(entry))
        model = LogsKernel(entry, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(rows))
        model.compile(keras.optimizers.SGD(RATE))
    norm = model.fit(ids, y, batch_size=4, verbose=0).history["norm"]
    sums = table[ids].sum(1).astype("float64")
    slope = 2 * (sums.sum(1, keepdims=True) - y) / len(y)
    grad = np.zeros(table.shape)
    np.add.at(grad, ids, np.repeat(slope[:, None] * np.ones((1, 1, table.shape[1])), 4, 1))
    ((part, found),) = layer.table.own_rows(range(split_tables.ROWS))
    return {"rows": (found, (table - RATE * grad)[part]), "norm": (norm, [np.linalg.norm(sums.T @ slope)])}

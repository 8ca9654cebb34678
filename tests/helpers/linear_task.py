"""A linear model on examples in one order, and the same by plain arithmetic: what commands are compared with."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.tasks.base import Task

BATCH, STEPS = 8, 8
rng = np.random.default_rng(3)
X = rng.standard_normal((BATCH * STEPS, 3)).astype(np.float32)
Y = rng.standard_normal((BATCH * STEPS, 1)).astype(np.float32)


@dataclasses.dataclass
class Options:
    """Which step of an epoch has a NaN, from 0, or -1 for none; whether there are no examples."""

    nan_step: int = -1
    empty: bool = False


class Linear(Task):
    """One dense layer without its own choice of batches: each replica has its part of each batch."""

    Options = Options

    def build_model(self):
        import keras

        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5))]
        )

    def compile_arguments(self):
        return {"loss": "mse"}

    def steps_per_epoch(self, global_batch_size):
        return STEPS * BATCH // global_batch_size

    def train_data(self, context, global_batch_size, seed):
        import tensorflow as tf

        x = X.copy()
        if self.options.nan_step >= 0:
            x[self.options.nan_step * global_batch_size] = np.nan
        # A pipeline under parameter_server makes all batches: there is one worker.
        parts = 1 if context.num_replicas_in_sync == 1 else context.num_input_pipelines
        mine, part = global_batch_size // parts, context.input_pipeline_id if parts > 1 else 0
        if self.options.empty:
            return tf.data.Dataset.from_tensor_slices((x[:0], Y[:0])).batch(mine)
        batches = tf.data.Dataset.from_tensor_slices((x, Y)).batch(global_batch_size)
        return batches.map(lambda *xy: tuple(v[part * mine : (part + 1) * mine] for v in xy)).repeat()


def trained_plainly(rates, batch=BATCH, left_out=()):
    """Returns weights and bias after SGD with these rates.

    Args:
        rates: One for each update.
        batch: Examples of an update.
        left_out: The numbers of batches that make no update, from 0.
    """
    w, b = np.full((3, 1), 0.5), np.zeros(1)
    for number, rate in enumerate(rates):
        rows = slice(number * batch % len(X), number * batch % len(X) + batch)
        error = X[rows] @ w + b - Y[rows]
        if number not in left_out:
            w, b = w - rate * 2 * X[rows].T @ error / batch, b - rate * 2 * error.mean(0)
    return w, b

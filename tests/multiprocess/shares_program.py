"""Trains with `batch_shares="by_speed"` and a slow first worker. Arguments: output folder, the step at which the last worker kills itself once, or 0.

The backups are in `backup` of the output folder. Stores the weights, the shares and the step at which this life began.
"""

import os
import signal
import sys
import time

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"  # sums depend on it

import tfdist
from tests.multiprocess import harness
from tfdist.runtime.report import progress

out, kill_at = sys.argv[1], int(sys.argv[2])
backup = tfdist.BackupAndRestore(f"{out}/backup", save_freq=10, delete_checkpoint=False)
trainer = tfdist.Trainer("multi_worker_mirrored", backup=backup, batch_shares="by_speed")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

RANK = trainer.task.index
keras.utils.set_random_seed(1)


class Slow(keras.layers.Layer):
    """Takes a time in proportion to its rows."""

    def call(self, x):
        def wait(value):
            time.sleep((0.0002 if RANK else 0.0006) * len(value))
            return value

        result = tf.numpy_function(wait, [x], x.dtype)
        result.set_shape(x.shape)
        return tf.stop_gradient(result - x) + x


class Death(keras.callbacks.Callback):
    only_observes = True

    begun = None

    def on_train_batch_end(self, batch, logs=None):
        done = int(self.model.optimizer.iterations.numpy())
        if self.begun is None:
            self.begun = done - 1
        if RANK and not progress.restarts() and done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


with trainer.scope():
    layers = [Slow(), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
death = Death()
trainer.fit(model, rows, rows.sum(1), batch_size=20, epochs=10, verbose=0, callbacks=[death])
shares = trainer.strategy.batch_shares.numbers
harness.store(out, RANK, {"weights": model.get_weights(), "shares": shares, "begun": death.begun})

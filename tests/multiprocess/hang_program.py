"""A worker that hangs, or is slow, in a training of two. Arguments: what happens, on which rank, and the limit in seconds or `-`."""

import os
import signal
import sys
import time

import tfdist
from tests.multiprocess import harness

how, rank, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
trainer = tfdist.Trainer("multi_worker_mirrored", timeout_seconds=limit, **harness.transport())

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

here = trainer.task.index == rank
LONG = 600.0 if how in ("callback", "map", "absent") else 2.5 * limit


def sleep(seconds):
    print("it happens", flush=True)
    time.sleep(seconds)


class AtStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if here and batch == 5:
            if how == "callback":
                sleep(LONG)
            if how == "stop":
                print("it happens", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)


def endless(x, if_value):
    """Returns x; never if its first number is `if_value`."""
    number = tf.reshape(x, [-1])[0]
    return tf.while_loop(lambda x, number: tf.equal(number, if_value), lambda x, number: (x, number), [x, number])[0]


class Slow(keras.layers.Layer):
    def call(self, x):
        if how == "loop" and here and started:
            x = endless(x, 30.0)  # the first row of this rank in a batch
        if how == "first" and here and started:
            sleep(LONG)
        return x

    def save_own_variables(self, store):
        if how == "saving" and here and started:
            sleep(LONG)
        super().save_own_variables(store)


def load_batch(x):
    if how == "map" and here and started and x[0] == 30:
        sleep(LONG)
    return x


class Evaluates(keras.callbacks.Callback):
    """Evaluates another model, on the chief alone."""

    def on_epoch_end(self, epoch, logs=None):
        if how == "evaluating" and here and started:
            data = tf.data.Dataset.range(10).map(lambda x: tf.py_function(self.late, [x], tf.float32))
            data = data.map(lambda x: (tf.ensure_shape(x, [1, 8]), tf.zeros([1, 1])))
            other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            other.compile(loss="mse")
            other.evaluate(data, verbose=0)

    def late(self, x):
        if x == 0:
            print("it happens", flush=True)
        time.sleep(LONG / 10)
        return np.zeros((1, 8), np.float32)


class Saves(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if how == "saving":
            self.model.save(os.path.join(sys.argv[4], "model.keras"))


started = False
with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), Slow(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(64, dtype=np.float32).repeat(8).reshape(64, 8)
data = tf.data.Dataset.from_tensor_slices(x)
data = data.map(lambda x: tf.ensure_shape(tf.numpy_function(load_batch, [x], tf.float32), [8]))
data = data.map(lambda x: (x, x[:1])).batch(4)
if how == "map_loop" and here:
    data = data.map(lambda x, y: (endless(x, 32.0), y))
started = True
trainer.fit(model, data, epochs=2, callbacks=[AtStep(), Evaluates(), Saves()], verbose=0)
if how == "absent":
    if here:
        sleep(LONG)
    else:
        trainer.evaluate(model, data, verbose=0)
print("the end", flush=True)

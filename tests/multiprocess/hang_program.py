"""A worker that hangs, or work that takes long, in a training of two. Arguments: what happens, and the limit in seconds.

The times of the watch are a sixtieth of the real ones, except those of `real`.
"""

import os
import signal
import sys
import time

import tfdist
from tests.multiprocess import harness
from tfdist.runtime.report import phase
from tfdist.training import hangs, lost_workers

how, limit = sys.argv[1], float(sys.argv[2])
if how != "real":
    hangs.timing = hangs.Timing(look_every=0.1, report_every=0.5, warn_after=1.0)
    lost_workers.LOST_AFTER = 6.0
trainer = tfdist.Trainer("multi_worker_mirrored", timeout_seconds=limit, **harness.transport())

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

FOREVER = 600.0
LONG = 70.0 if how == "real" else 3.0  # longer than the time after which a wait is warned about
rank = trainer.task.index
now = ""  # what happens in this part of the healthy program


def sleep(seconds):
    print("it happens", flush=True)
    time.sleep(seconds)


class AtStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch != 5 or rank != 1:
            return
        if how == "callback":
            sleep(FOREVER)
        elif how == "stop":
            print("it happens", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif now == "callback":
            sleep(LONG)
        elif now == "section":
            with tfdist.slow("upload", seconds=FOREVER):
                sleep(LONG)
        elif now == "writing":
            with open(os.devnull, "w") as file:
                for _ in range(20):
                    time.sleep(0.6)
                    file.write("a byte now and then")
                    file.flush()


def endless(x, if_value):
    """Returns x; never if its first number is `if_value`."""
    number = tf.reshape(x, [-1])[0]
    return tf.while_loop(lambda x, number: tf.equal(number, if_value), lambda x, number: (x, number), [x, number])[0]


def wait_briefly(x):
    if now == "execution":
        time.sleep(0.2)
    return x


class Layer(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(wait_briefly, [x], tf.float32), x.shape) if now == "execution" else x


class Different(keras.layers.Layer):
    """A layer that sums with the other worker, which takes part in another sum."""

    def call(self, x):
        if isinstance(x, keras.KerasTensor):
            return x
        keys = {"group_size": 2, "group_key": 999, "instance_key": rank, "ordering_token": []}
        return x + 0 * tf.raw_ops.CollectiveReduceV2(input=x, merge_op="Add", final_op="Id", **keys)


def load_batch(x):
    if how == "map" and rank == 1 and x[0] == 30:
        sleep(FOREVER)
    if (now == "batch" or (now == "validation" and rank == 1)) and x[0] == 30:
        sleep(LONG)
    return x


def make_model():
    with trainer.scope():
        layer = Different() if how == "different" else Layer()
        model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=16 if now == "execution" else 1)
    return model


x = np.arange(64, dtype=np.float32).repeat(8).reshape(64, 8)
data = tf.data.Dataset.from_tensor_slices(x)
data = data.map(lambda x: tf.ensure_shape(tf.numpy_function(load_batch, [x], tf.float32), [8]))
data = data.map(lambda x: (x, x[:1])).batch(4)
if how == "map_loop" and rank == 1:
    data = data.map(lambda x, y: (endless(x, 32.0), y))

if how in ("healthy", "real"):
    if rank == 1:  # before the first `fit`
        sleep(LONG)
    model = make_model()
    for now in ("callback", "section", "batch", "validation", "writing") if how == "healthy" else ("callback",):
        print(f"now: {now}", flush=True)
        phase.main.longest = 0.0  # a wait is long from five times the longest
        validation = {"validation_data": data} if now == "validation" else {}
        fitted = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4) if now == "validation" else data
        trainer.fit(model, fitted, callbacks=[AtStep()], verbose=0, **validation)
        if now == "callback" and rank == 0:  # between two calls of `fit`
            sleep(LONG)
    now = "execution"
    if how == "healthy":
        print("now: execution", flush=True)
        trainer.fit(make_model(), data, verbose=0)
else:
    model = make_model()
    trainer.fit(model, data, epochs=2, callbacks=[AtStep()], verbose=0)
    if how == "absent":
        if rank == 1:
            sleep(FOREVER)
        trainer.evaluate(model, data, verbose=0)
print("the end", flush=True)

"""A step, or its data, that does not end, under `parameter_server`. Arguments: where, and the limit in seconds."""

import sys
import time

import tfdist
from tfdist.parameter_server import watch

how, limit = sys.argv[1], float(sys.argv[2])
watch.WARN_AFTER = 1.0
trainer = tfdist.Trainer("parameter_server", timeout_seconds=limit)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


def endless(x, if_value):
    """Returns x; never if its first number is `if_value`."""
    number = tf.reshape(x, [-1])[0]
    return tf.while_loop(lambda x, number: tf.equal(number, if_value), lambda x, number: (x, number), [x, number])[0]


class Loop(keras.layers.Layer):
    def call(self, x):
        return endless(x, 32.0) if how == "step" else x


def load_batch(x):
    if how in ("map", "slow") and x[0] == 32:
        print("it happens", flush=True)
        time.sleep(3 if how == "slow" else 600)
    return x


def create(context):
    data = tf.data.Dataset.range(100).map(lambda x: tf.fill([4, 8], tf.cast(x, tf.float32)))
    if context.input_pipeline_id == 1:
        data = data.map(lambda x: endless(x, 5.0))
    return data.map(lambda x: (x, x[:, :1])).repeat()


with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), Loop(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if how == "pipeline":
    trainer.fit(model, create, epochs=2, steps_per_epoch=100, verbose=0)
else:
    data = tf.data.Dataset.from_tensor_slices(np.arange(64, dtype=np.float32).repeat(8).reshape(64, 8))
    data = data.map(lambda x: tf.ensure_shape(tf.numpy_function(load_batch, [x], tf.float32), [8]))
    trainer.fit(model, data.map(lambda x: (x, x[:1])).batch(4), epochs=2, verbose=0)
print("the end", flush=True)

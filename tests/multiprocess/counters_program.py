"""Layers that count in integers. Arguments: strategy, folder for the results, names of cases."""

import functools
import sys

import tfdist
from tests.multiprocess import harness

options = {"devices": 2} if sys.argv[1] == "mirrored" else {}
trainer = tfdist.Trainer(sys.argv[1], **options)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

RANK = trainer.task.index
x = np.arange(29, dtype=np.float32)[:, None]


class Counts(keras.layers.Layer):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        self.plain = tf.Variable(0, trainable=False, dtype=tf.int64)

    def call(self, x, training=False):
        if training:
            self.how(self, x)
        return x


def examples(layer, x):
    layer.count.assign_add(tf.shape(x)[0])


def numbers(layer, x):
    layer.count.assign(3 + layer.count - tf.cast(tf.reduce_sum(x), tf.int32))


def direct(layer, x):
    layer.count.value.assign_add(tf.cast(tf.reduce_sum(x), tf.int32))


def plain(layer, x):
    layer.plain.assign(tf.cast(tf.reduce_max(x), tf.int64))


def calls(layer, x):
    layer.count.assign_add(1)
    layer.plain.assign_add(1)


def sometimes(layer, x):
    tf.cond(layer.count < 4, lambda: layer.count.assign(layer.count + 1), lambda: layer.count.value)


def largest(layer, x):
    layer.count.assign(tf.maximum(layer.count, tf.cast(tf.reduce_max(x), tf.int32)))


def hidden(layer, x):
    tf.cond(tf.equal(tf.reduce_min(x), 2.0), lambda: layer.count.assign(layer.count + 1), lambda: layer.count.value)


def trained(how, size=29, **options):
    with trainer.scope():
        layer = Counts(how)
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    try:
        # 8 steps of 4, but for the last one's 1, of which the second replica has none
        trainer.fit(model, x[:size], x[:size] * 0, batch_size=4, epochs=1, shuffle=False, verbose=0)
    except (tfdist.ConfigError, tfdist.ClusterError) as e:
        return str(e)
    return int(layer.count.numpy())


CASES = {how.__name__: functools.partial(trained, how) for how in (examples, numbers, direct, plain, calls, sometimes)}
CASES |= {how.__name__: functools.partial(trained, how) for how in (largest, hidden)}
CASES["in executions"] = functools.partial(trained, examples, steps_per_execution=3)
CASES["full batches"] = functools.partial(trained, examples, 28)
harness.store(sys.argv[2], RANK, {case: CASES[case]() for case in sys.argv[3:]})

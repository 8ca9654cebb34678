"""An integer variable holds what one process would count, or a sentence says why it cannot."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, ONE_DEVICE, WORKERS
from tests.cases.case import case

X = np.arange(29, dtype="float32")[:, None]


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
    """No batch begins with 2."""
    tf.cond(tf.equal(tf.reduce_min(x), 2.0), lambda: layer.count.assign(layer.count + 1), lambda: layer.count.value)


def counted(world, how, size=29, **compiled):
    """Returns the count of 8 steps of 4 examples; the last one has 1 of 29, of which the second replica has none."""
    with world.scope():
        layer = Counts(how)
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compiled)
    model.fit(X[:size], 0 * X[:size], batch_size=4, shuffle=False, verbose=0)
    return layer.count.numpy()


for how, right in ((plain, 0), (calls, 8), (sometimes, 4)):  # "plain" counts by another variable, which is left alone

    @case(ONE_DEVICE, MIRRORED, WORKERS, name=how.__name__)
    def _(world, how=how, right=right):
        return {"count": (counted(world, how), right)}


SENTENCE = r"The integer weight \S*/count is assigned a value that depends on the data"
# Function, examples, options of compile, what one process counts. The last three go the way of the first;
# tests/replicas/test_equal_weights.py has full batches, too.
OF_DATA = {
    "examples": (examples, 29, {}, 29),
    "in executions": (examples, 29, {"steps_per_execution": 3}, 29),
    "direct": (direct, 29, {}, sum(range(29))),
    "hidden": (hidden, 29, {}, 0),
    "full batches": (examples, 28, {}, 28),
    "numbers": (numbers, 29, {}, 8 * 3 - sum(range(29))),
    "largest": (largest, 29, {}, 28),
}
ALSO = ("full batches", "numbers", "largest")
for name, (how, size, compiled, right) in OF_DATA.items():

    @case(ONE_DEVICE, full=name in ALSO, name=f"{name} in one process")
    def _(world, how=how, size=size, compiled=compiled, right=right):
        return {"count": (counted(world, how, size, **compiled), right)}

    @case(MIRRORED, WORKERS, full=name in ALSO or None, name=name, error="/count" if how is hidden else SENTENCE)
    def _(world, how=how, size=size, compiled=compiled):
        counted(world, how, size, **compiled)

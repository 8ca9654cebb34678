"""`train_on_batch` and `test_on_batch` are one step of `fit`: each replica has its part of the batch.

The model is y = x with the targets 0, so that a loss and its gradient are sums over the rows.
"""

import re

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdist
from tests.cases.arms import MIRRORED, SERVERS, TWO_EACH, WORKERS
from tests.cases.case import case

SYNCHRONOUS = (MIRRORED, WORKERS, TWO_EACH)
X = np.array([[1.0], [2.0], [3.0]], "float32")
RATE = 0.001


class Rows(keras.metrics.Metric):
    """Counts rows."""

    sums_examples = True

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.rows


class Counts(keras.layers.Layer):
    """Passes rows on, and counts those of training."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x


def pairs_of_rows(y_true, y_pred):
    return ops.sum(ops.abs(y_pred - ops.transpose(y_pred)))


def line(world, loss, kind=keras.Model, **compiled):
    """Returns a model that multiplies by 1, and its layer that counts."""
    with world.scope():
        counts, inputs = Counts(), keras.Input((1,))
        model = kind(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(counts(inputs)))
        model.compile(keras.optimizers.SGD(RATE), loss, metrics=[Rows()], **compiled)
    return model, counts


def kernel(model):
    return next(value for value in model.get_weights() if value.ndim)


def summed(world):
    with world.scope():
        return keras.losses.MeanSquaredError(reduction="sum")


@case(*SYNCHRONOUS, SERVERS, full=())
def sums_of_rows(world):
    model, counts = line(world, summed(world))
    tested = model.test_on_batch(X, 0 * X, return_dict=True)
    trained = model.train_on_batch(X, 0 * X, return_dict=True)
    return {
        "tested": ([tested["loss"], tested["rows"]], [14, 3]),
        "trained": ([trained["loss"], trained["rows"]], [14, 3]),
        "kernel": (kernel(model), [[0.972]]),
        "seen": (counts.seen.numpy(), 3),
    }


@case(*SYNCHRONOUS, SERVERS)
def a_loss_of_pairs_of_rows(world):
    model, _ = line(world, pairs_of_rows)
    return {"loss": (model.test_on_batch(X, 0 * X, return_dict=True)["loss"], 8)}


@case(*SYNCHRONOUS)
def one_row(world):
    """Replicas without rows change nothing."""
    model, counts = line(world, summed(world))
    logs = model.train_on_batch(X[:1], 0 * X[:1], return_dict=True)
    return {"logs": ([logs["loss"], logs["rows"], counts.seen.numpy()], [1, 1, 1])}


@case(*SYNCHRONOUS, SERVERS)
def weights_of_rows_and_classes(world):
    model, _ = line(world, summed(world))
    by_row = model.test_on_batch(X, 0 * X, sample_weight=np.array([1.0, 0.0, 2.0], "float32"), return_dict=True)
    labels = np.array([[0], [1], [0]])
    by_class = model.train_on_batch(X, labels, class_weight={0: 2.0, 1: 3.0}, return_dict=True)
    return {"by row": (by_row["loss"], 1 + 2 * 9), "by class": (by_class["loss"], 2 * 1 + 3 * 1 + 2 * 9)}


@case(*SYNCHRONOUS)
def batches_of_several_sizes(world):
    model, counts = line(world, summed(world))
    losses, right, w = [], [], 1.0
    for rows in (3, 2, 1, 3, 2):
        losses.append(model.train_on_batch(X[:rows], 0 * X[:rows], return_dict=True)["loss"])
        right.append(float(((w * X[:rows]) ** 2).sum()))
        w -= RATE * 2 * w * float((X[:rows] ** 2).sum())
    return {"losses": (losses, right), "kernel": (kernel(model), [[w]]), "seen": (counts.seen.numpy(), 11)}


@case(*SYNCHRONOUS, full=True)
def without_graphs(world):
    model, counts = line(world, summed(world), run_eagerly=True)
    logs = model.train_on_batch(X, 0 * X, return_dict=True)
    return {"logs": ([logs["loss"], logs["rows"], counts.seen.numpy()], [14, 3, 3])}


@case(*SYNCHRONOUS)
def a_function_of_the_users_around_keras_own(world):
    class Wrapped(keras.Model):
        def make_train_function(self, force=False):
            super().make_train_function(force)
            run = self.train_function
            self.train_function = lambda iterator: run(iterator)

    model, counts = line(world, summed(world), Wrapped)
    logs = model.train_on_batch(X, 0 * X, return_dict=True)
    return {"logs": ([logs["loss"], logs["rows"], counts.seen.numpy()], [14, 3, 3])}


@case(*SYNCHRONOUS)
def tensors(world):
    model, counts = line(world, summed(world))
    logs = model.train_on_batch(tf.constant(X), tf.constant(0 * X), return_dict=True)
    return {"loss": (logs["loss"], 14), "kernel": (kernel(model), [[0.972]]), "seen": (counts.seen.numpy(), 3)}


@case(*SYNCHRONOUS)
def dicts_and_ragged_rows(world):
    class Lengths(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return self.scale * tf.reduce_sum(x["ragged"], axis=1, keepdims=True) + x["dense"]

    with world.scope():
        model = Lengths()
        model.compile(keras.optimizers.SGD(RATE), keras.losses.MeanSquaredError(reduction="sum"))
    x = {"ragged": tf.ragged.constant([[1.0], [], [1.0, 2.0]]), "dense": X}  # 2, 2 and 6
    return {"loss": (model.train_on_batch(x, 0 * X), 4 + 4 + 36), "scale": (model.get_weights()[0], 1 - RATE * 2 * 20)}


@case(WORKERS, TWO_EACH)
def parts_of_workers(world):
    """With `auto_shard_dataset=False` each worker passes its part of the batch: one row, or the other two."""
    with keras.distribution.DataParallel(auto_shard_dataset=False).scope():
        model, counts = line(world, summed(world))
        own = X[1:] if world.rank else X[:1]
        logs = model.train_on_batch(own, 0 * own, return_dict=True)
        predicted = model.predict_on_batch(own)
    return {
        "logs": ([logs["loss"], logs["rows"], counts.seen.numpy()], [14, 3, 3]),
        "kernel": (kernel(model), [[0.972]]),
        "predicted": (predicted, 0.972 * X),
    }


SAME_BATCH = (
    r"must be the same on all tasks.* on worker:0, .* on worker:1.*pass the same global batch.*auto_shard_dataset=False"
)


def rejected(method, *arrays):
    """Returns 1 if the method rejects the batch of this worker."""
    try:
        method(*arrays)
    except tfdist.ConfigError as error:
        return int(bool(re.search(f"The batch of {method.__name__} {SAME_BATCH}", str(error))))
    return 0


@case(WORKERS, TWO_EACH)
def other_batches_on_each_worker(world):
    """Rows of a worker, another number of rows that are 0, and a later batch; each raises an error, and the weights stay."""
    model, counts = line(world, summed(world))
    mine = X[world.rank :: 2][:1]
    found = [rejected(method, mine, 0 * mine) for method in (model.train_on_batch, model.test_on_batch)]
    found.append(rejected(model.predict_on_batch, mine))
    model, counts = line(world, summed(world))
    loss = model.train_on_batch(X, 0 * X, return_dict=True)["loss"]
    empty = np.zeros((2 + world.rank, 1), "float32")
    found.append(rejected(model.train_on_batch, empty, empty))
    return {"rejected": (found, [1] * 4), "first": ([loss, counts.seen.numpy()], [14, 3])}


@case(WORKERS, TWO_EACH)
def batches_that_differ_by_rounding(world):
    model, _ = line(world, summed(world))
    near = X * np.float32(1 + 1e-7 * world.rank)
    losses = [model.test_on_batch(near, 0 * near)[0] for _ in range(4)]
    return {"losses": (losses, [14] * 4)}

"""`batch_shares="by_speed"`: workers take unequal parts of each batch."""

import contextlib
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import THREE_WORKERS, WORKERS
from tests.cases.case import case
from tests.cases.sources import split_tables
from tests.cases.sources.local_steps import EPOCHS, SIZE, Adam, X, Y, is_near, linear, local
from tests.helpers.options import options_set


@contextlib.contextmanager
def shares(world, *numbers):
    """Divides batches by these numbers, or by speed."""
    strategy = world.trainer.strategy
    try:
        with options_set(strategy, batch_shares="by_speed"):
            if numbers:
                strategy.batch_shares.assign(numbers)
                strategy.batch_shares.is_settled = True
            yield strategy.batch_shares
    finally:
        strategy.batch_shares = None


def descend(numbers, every=1):
    """Returns the weights of a plain loop of SGD: each worker descends alone, and an exchange takes the mean, weighted by examples."""
    anchor = [np.full((3, 1), 0.5), np.zeros(1)]
    own = [list(anchor) for _ in numbers]
    examples = np.zeros(len(numbers))
    batches = [(X[begin : begin + SIZE], Y[begin : begin + SIZE]) for begin in range(0, len(X), SIZE)] * EPOCHS
    for step, (x, y) in enumerate(batches, 1):
        ends = len(x) * np.cumsum(numbers) // sum(numbers)
        for rank, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
            if a == b:
                continue
            error = x[a:b].astype("float64") @ own[rank][0] + own[rank][1] - y[a:b]
            gradients = [2 * x[a:b].T @ error / (b - a), 2 * error.mean(0)]
            own[rank] = [w - 0.05 * g for w, g in zip(own[rank], gradients, strict=True)]
            examples[rank] += b - a
        if step % every == 0 or step == len(batches):
            anchor = [sum(n * w[i] for n, w in zip(examples, own, strict=True)) / examples.sum() for i in range(2)]
            own = [list(anchor) for _ in numbers]
            examples[:] = 0
    return anchor


def descend_together(optimizer, epochs):
    """Returns the weights of a plain loop on one device."""
    weights = [np.full((3, 1), 0.5), np.zeros(1)]
    for begin in [*range(0, len(X), SIZE)] * epochs:
        x, y = X[begin : begin + SIZE].astype("float64"), Y[begin : begin + SIZE]
        error = x @ weights[0] + weights[1] - y
        optimizer(weights, [2 * x.T @ error / len(x), 2 * error.mean(0)])
    return weights


def trained_by_parts(world, every):
    """Compares a training, an evaluation and a prediction with a plain loop that exchanges weights after so many steps."""
    how = {"batch_size": SIZE, "verbose": 0}
    numbers = [7, 3, 2][: world.workers]
    with local(world, every), shares(world, *numbers):
        model = linear(world, keras.optimizers.SGD, steps_per_execution=3, metrics=["mae"])
        model.fit(X, Y, epochs=EPOCHS, shuffle=False, validation_data=(X, Y), **how)
        weights = model.get_weights()
        predicted = X @ weights[0] + weights[1]
        errors = predicted - Y
        return {
            "weights": (is_near(weights, descend(numbers, max(every, 1))), True),
            "evaluated": (model.evaluate(X, Y, **how), [np.mean(errors**2), np.mean(np.abs(errors))]),
            "predicted": (np.abs(model.predict(X, **how) - predicted).max() < 1e-6, True),
        }


@case(WORKERS, THREE_WORKERS, full=(THREE_WORKERS,))
def unequal_parts_train_what_a_plain_loop_does(world):
    return trained_by_parts(world, every=0)


@case(WORKERS, THREE_WORKERS, full=(THREE_WORKERS,))
def unequal_parts_that_train_alone_do_so_too(world):
    return trained_by_parts(world, every=5)


@case(WORKERS)
def data_from_storage_and_batches_of_a_loop(world):
    """The least share of a batch may have no example."""
    numbers = [20, 3, 1][: world.workers]
    folder = world.folder / f"arrays-{world.rank}"
    folder.mkdir()
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    batches = tfdist.data.arrays_from(folder, batch_size=SIZE, shuffle=False)
    seen = {}
    with shares(world, *numbers):
        model = linear(world, keras.optimizers.SGD)
        model.fit(batches, epochs=EPOCHS, verbose=0)
        seen["stored"] = is_near(model.get_weights(), descend(numbers)), True
        model = linear(world, keras.optimizers.SGD, run_eagerly=True)
        for begin in [*range(0, len(X), SIZE)] * EPOCHS:
            model.train_on_batch(X[begin : begin + SIZE], Y[begin : begin + SIZE])
        seen["by hand"] = is_near(model.get_weights(), descend(numbers)), True
    return seen


@case(WORKERS)
def a_loss_of_the_whole_batch_knows_each_part(world):
    """One number of all examples, with dropout, BatchNormalization and accumulation beside."""

    def spread(y, predicted):
        return tf.math.reduce_std(y - predicted)

    with shares(world, *[3, 1, 1][: world.workers]):
        with world.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), spread)
        model.set_weights([np.full((3, 1), 0.5), np.zeros(1)])
        found = model.fit(X, Y, batch_size=len(X), verbose=0).history["loss"]
    return {"loss": (found, [float(np.std(Y - X @ np.full((3, 1), 0.5)))])}


class Slow(keras.layers.Layer):
    """Takes a time in proportion to its rows: six times as long on the first worker, which a busy machine does not hide."""

    def call(self, x):
        def wait(value):
            seconds = 0.001 if json.loads(os.environ["TF_CONFIG"])["task"]["index"] else 0.006
            time.sleep(seconds * len(value))
            return value

        result = tf.numpy_function(wait, [x], x.dtype)
        result.set_shape(x.shape)
        return tf.stop_gradient(result - x) + x


@case(WORKERS)
def a_slow_worker_gets_a_small_share(world):
    with shares(world) as chosen:
        with world.scope():
            model = keras.Sequential([keras.Input((3,)), Slow(), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.001), "mse")
        model.fit(X[:24], Y[:24], batch_size=24, epochs=60, verbose=0)
    slow, *others = chosen.numbers
    agreed = world.gather(chosen.numbers)
    return {
        "settled": (chosen.is_settled, True),
        "agreed": (agreed, [agreed[0]] * world.workers),
        "smaller": (all(slow < 0.8 * other for other in others), True),
    }


@case(WORKERS)
def rows_of_tables_and_slots_in_pieces(world):
    """A table in shards, one of unknown ids, and an optimizer whose slots are in pieces train what a plain loop does."""

    def table(number):
        columns = split_tables.COLUMNS
        return tfdist.layers.Embedding(split_tables.ROWS, columns, shards=number, weights=split_tables.TABLE)

    seen = {}
    with shares(world, 5, 2):
        for number in (2, 3):  # a shard for each worker, and shards on both
            model = split_tables.train(world, lambda n=number: table(n))
            sums = split_tables.right()[split_tables.IDS].sum(1)
            seen[f"{number} shards"] = model.predict(split_tables.IDS, verbose=0), sums
        with options_set(world.trainer.strategy, shard_optimizer=True):
            model = linear(world, keras.optimizers.Adam)
            model.fit(X, Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
        seen["slots in pieces"] = is_near(model.get_weights(), descend_together(Adam(), EPOCHS)), True
    return seen


@case(WORKERS)
def data_of_python(world):
    """All workers pass the same batches."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = slice(index * SIZE, (index + 1) * SIZE)
            return X[rows], Y[rows]

    def generate():
        while True:
            for begin in range(0, len(X), SIZE):
                yield X[begin : begin + SIZE], Y[begin : begin + SIZE]

    seen = {}
    for name, data, steps in (("PyDataset", Batches(), None), ("generator", generate(), 4)):
        with shares(world, 7, 2):
            model = linear(world, keras.optimizers.SGD)
            model.fit(data, epochs=EPOCHS, steps_per_epoch=steps, shuffle=False, verbose=0)
        seen[name] = is_near(model.get_weights(), descend([7, 2])), True
    return seen


@case(WORKERS)
def moving_statistics(world):
    """Those of the whole batch if the layer is synchronized, else the mean of both workers' parts."""
    seen = {}
    for synchronized in (True, False):
        with shares(world, 2, 1):
            with world.scope():
                layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=synchronized)
                model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.05), "mse")
            model.fit(X, Y, batch_size=len(X), shuffle=False, verbose=0)
            found = [layer.moving_mean.numpy(), layer.moving_variance.numpy()]
        parts = [X] if synchronized else [X[:18], X[18:]]
        right = [np.mean([part.mean(0) for part in parts], 0), np.mean([part.var(0) for part in parts], 0)]
        seen["synchronized" if synchronized else "by part"] = found, right
    return seen


@case(WORKERS, error="batch_shares='by_speed' divides batches that all workers pass whole")
def separate_data_have_no_shares(world):
    with shares(world):
        model = linear(world, keras.optimizers.SGD)
        model.fit(tfdist.data.own_rows(X, Y), batch_size=SIZE, verbose=0)

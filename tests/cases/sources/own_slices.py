"""A worker's own slice of the data, given as arrays: refused, or declared by `tfdist.data.own_rows`."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, TWO_EACH, WORKERS
from tests.cases.case import case
from tests.cases.sources.policies import ZEROS, X, linear, parts_of, steps_of, trained
from tfdist.data import own_rows

BOTH = r"must be the same on all tasks\. .* Each worker trains on its share .* give all workers the same data.*tfdist\.data\.own_rows\(x, y\)"

NUMBERS = np.arange(64, dtype="float32")[:, np.newaxis] / 8


@case(full=True)
def slices_that_are_declared(world):
    model = linear(world, 0.0)
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
    mine = slice(world.rank, None, world.workers)
    own, right = own_rows(ZEROS[mine], X[mine]), np.mean(X.astype("float64") ** 2)
    return {
        "fit": (model.fit(own, batch_size=8, verbose=0).history["loss"], [right]),
        "evaluate": (model.evaluate(own, batch_size=8, verbose=0), right),
        "rows": (len(model.predict(own, batch_size=8, verbose=0)), 24),
    }


def check_lengths(world, lengths, **compiled):
    parts = parts_of(world, lengths)
    own, model = own_rows(*parts[world.rank]), linear(world, metrics=["mae"], **compiled)
    how = {"batch_size": 8, "verbose": 0}
    history = model.fit(own, shuffle=False, epochs=2, validation_data=own, **how).history
    pairs = trained(model, history, steps_of(parts, 8 // world.workers), epochs=2)
    x, y = (np.concatenate(each).astype("float64") for each in zip(*parts, strict=True))
    w, b = (each.item() for each in model.get_weights())
    predicted, squares = x * w + b, np.mean((x * w + b - y) ** 2)
    return pairs | {
        "evaluate": (model.evaluate(own, **how), [squares, np.mean(np.abs(predicted - y))]),
        "validation": (history["val_loss"][-1], squares),
        "predict": (model.predict(own_rows(parts[world.rank][0]), **how), predicted),
    }


@case(full=True)
def own_rows_of_equal_lengths(world):
    return check_lengths(world, (12, 12))


@case(WORKERS)
def own_rows_of_unequal_lengths(world):
    return check_lengths(world, (17, 7))


@case(WORKERS, full=True)
def own_rows_of_one_row_in_executions(world):
    return check_lengths(world, (1, 23), steps_per_execution=2)


@case()
def own_rows_with_weights_and_shuffled(world):
    """A whole epoch is one step, so that the order does not matter."""
    parts = parts_of(world, (10, 14))
    weights = [np.float32(y[:, 0] > 1) + 1 for _, y in parts]
    own = own_rows(*parts[world.rank], weights[world.rank])
    model = linear(world)
    history = model.fit(own, batch_size=28, epochs=3, verbose=0).history
    return trained(model, history, steps_of(parts, 24), epochs=3, weigh=lambda y: 1 + (y > 1))


@case(full=True)
def own_rows_weighted_by_classes(world):
    parts = [(x, np.float32(x > 1)) for x, _ in parts_of(world, (10, 14))]
    model = linear(world)
    how = {"batch_size": 8, "shuffle": False, "class_weight": {0: 1.0, 1: 2.0}, "verbose": 0}
    history = model.fit(own_rows(*parts[world.rank]), **how).history
    return trained(model, history, steps_of(parts, 8 // world.workers), weigh=lambda y: 1 + y)


@case(WORKERS, full=True)
def own_rows_of_several_inputs(world):
    parts = parts_of(world, (9, 6))
    with world.scope():
        inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
        model = keras.Model(inputs, keras.layers.Add()(list(inputs.values())))
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = parts[world.rank]
    whole = [np.concatenate(each) for each in zip(*parts, strict=True)]
    own = {"a": x, "b": 2 * x}
    return {
        "evaluate": (model.evaluate(own_rows(own, y), verbose=0), np.mean((3 * whole[0] - whole[1]) ** 2)),
        "predict": (model.predict(own_rows(own), batch_size=4, verbose=0), 3 * whole[0]),
    }


@case(full=True)
def equal_arrays_of_all_kinds(world):
    """Arrays that are equal, or that rounding has made differ, are no slices."""
    near = X / 10 * (1 + 1e-7 * world.rank)
    near[3] = np.nan
    found = [
        len(linear(world).predict(each, verbose=0))
        for each in (near, [X], X.astype("float16"), X.astype("int64"), X[::2], np.broadcast_to(X, (24, 1)))
    ]
    return {"rows": (found, [24, 24, 24, 24, 12, 24])}


@case(WORKERS, error=rf"The arrays in x {BOTH}")
def slices(world):
    mine = slice(world.rank, None, 2)
    linear(world).fit(X[mine], X[mine], batch_size=8, verbose=0)


@case(WORKERS, error=rf"The arrays in y {BOTH}")
def slices_of_targets(world):
    linear(world).fit(ZEROS[:12], X[world.rank :: 2], batch_size=8, verbose=0)


@case(WORKERS, error=rf"The arrays in validation_data {BOTH}")
def slices_for_validation(world):
    mine = slice(world.rank, None, 2)
    linear(world).fit(X, X, validation_data=(X[mine], X[mine]), verbose=0)


@case(WORKERS, error=rf"The arrays in x {BOTH}")
def slices_of_unequal_lengths(world):
    mine = slice(world.rank * 10, 10 + world.rank * 20)
    linear(world).fit(X[mine], X[mine], batch_size=8, verbose=0)


@case(WORKERS, error=rf"The arrays in x {BOTH}")
def slices_to_evaluate(world):
    linear(world).evaluate(X[world.rank :: 2], X[world.rank :: 2], verbose=0)


@case(WORKERS, error=rf"The arrays in x {BOTH}")
def slices_to_predict(world):
    linear(world).predict(X[world.rank :: 2], verbose=0)


SAME_TENSORS = r"must be the same on all tasks.*from 0.* on worker:0, .*from 0\.125.* on worker:1.*tfdist\.data\.own_rows\(x, y\).*AutoShardPolicy\.OFF"


def numbered(rows):
    """Returns a dataset of rows and zeros."""
    return tf.data.Dataset.from_tensor_slices((rows, np.zeros_like(rows)))


@case(WORKERS, TWO_EACH, error=rf"The dataset in x {SAME_TENSORS}")
def slices_in_a_dataset(world):
    mine = NUMBERS[world.rank :: 2]
    linear(world).fit(numbered(mine).shuffle(4, seed=1).map(lambda x, y: (x + 1, y)).batch(4).prefetch(1), verbose=0)


@case(WORKERS, error=rf"The dataset in x {SAME_TENSORS}")
def slices_in_a_dataset_to_evaluate(world):
    linear(world).evaluate(numbered(NUMBERS[world.rank :: 2]).batch(4), verbose=0)


@case(WORKERS, error=rf"The dataset in validation_data {SAME_TENSORS}")
def slices_in_a_dataset_for_validation(world):
    mine = numbered(NUMBERS[world.rank :: 2]).batch(4)
    linear(world).fit(X, X, validation_data=tf.data.Dataset.zip(mine, mine).map(lambda one, other: one), verbose=0)


@case(WORKERS, error=rf"The dataset in x {SAME_TENSORS}")
def slices_that_map_gathers_from(world):
    mine = NUMBERS[world.rank :: 2]
    rows = tf.data.Dataset.range(len(mine)).map(lambda index: (tf.gather(mine, index), tf.gather(mine, index)))
    linear(world).fit(rows.batch(4), verbose=0)


@case(WORKERS, error=rf"The dataset in x {SAME_TENSORS}")
def slices_that_map_captures(world):
    mine = tf.constant(NUMBERS[world.rank :: 2])
    rows = tf.data.Dataset.range(len(mine)).map(lambda index: (tf.gather(mine, index), tf.gather(mine, index)))
    linear(world).fit(rows.batch(4), verbose=0)


@case(MIRRORED, WORKERS, TWO_EACH)
def equal_tensors_in_a_dataset(world):
    """Nearly equal rows, names of files in folders of each worker, seeds of a worker, and workers' own rows raise no error."""
    near = NUMBERS * np.float32(1 + 1e-7 * world.rank)
    names = tf.constant([f"/scratch/{world.rank}/{number}.png" for number in range(len(near))])
    seed = tf.constant([world.rank, 3])
    rows = tf.data.Dataset.zip(numbered(near), tf.data.Dataset.from_tensor_slices(names))

    def noisy(row, name):
        x, y = row
        return x + 0 * tf.random.stateless_uniform(tf.shape(x), seed), y

    own = tf.data.Options()
    own.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with world.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    mine = numbered(NUMBERS[world.rank :: world.workers]).batch(4 * world.workers).with_options(own)
    right = np.mean(NUMBERS.astype("float64") ** 2)
    losses = [model.fit(data, verbose=0).history["loss"][0] for data in (rows.map(noisy).batch(4), mine)]
    return {"loss": (losses, [right, right])}


@case(WORKERS, error=rf"The arrays in x {BOTH}")
def another_order(world):
    order = np.random.default_rng(world.rank).permutation(24)
    linear(world).fit(X[order], X[order], verbose=0)


@case(WORKERS, error=r"The arrays in x .*float32 \(24, 1\).* on worker:0, float64 \(24, 1\).* on worker:1")
def arrays_of_two_types(world):
    linear(world).fit(X.astype(["float32", "float64"][world.rank]), X, verbose=0)


@case(
    WORKERS,
    error=r"The kind of own_rows in x must be the same on all tasks.*\(1,\).*on worker:0, .*\(2,\).* arrays of the same types",
)
def own_rows_of_two_shapes(world):
    linear(world).fit(own_rows(X.reshape(-1, 1 + world.rank), X), verbose=0)


@case(error=r"own_rows\(x, y, sample_weight\) holds targets and weights\. Received y beside it")
def targets_beside_own_rows(world):
    linear(world).fit(own_rows(X), X, verbose=0)

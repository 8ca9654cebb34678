"""Datasets whose options say how workers share them: `AutoShardPolicy.OFF` and `FILE`; and data that are distributed already."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, WORKERS
from tests.cases.case import case

X = np.arange(24, dtype="float32")[:, None]
ZEROS = np.zeros_like(X)
RATE = 1e-3


def linear(world, rate=RATE, metrics=None, **compiled):
    with world.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse", metrics=metrics, **compiled)
    model.set_weights([np.full((1, 1), 0.5), np.full(1, 0.25)])
    return model


def off(dataset, policy="OFF"):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return dataset.with_options(options)


def descend(steps, rate=RATE, epochs=1, weigh=None):
    """Returns weight, bias and each epoch's loss of a plain loop. Steps are (x, y) of all workers together."""
    w, b, losses = 0.5, 0.25, []
    for _ in range(epochs):
        total, count = 0.0, 0
        for x, y in steps:
            error = x * w + b - y
            weight = np.ones_like(x) if weigh is None else weigh(y)
            w, b = w - rate * np.mean(2 * weight * error * x), b - rate * np.mean(2 * weight * error)
            total, count = total + (weight * error**2).sum(), count + len(x)
        losses.append(total / count)
    return w, b, losses


def steps_of(parts, size):
    """Returns the steps of a loop in which each worker takes `size` of its own rows, until all have ended."""
    longest = max(len(x) for x, _ in parts)
    return [
        tuple(np.concatenate([each[k][i : i + size] for each in parts]).astype("float64") for k in (0, 1))
        for i in range(0, longest, size)
    ]


def trained(model, history, steps, **how):
    w, b, losses = descend(steps, **how)
    return {"weights": ([each.item() for each in model.get_weights()], [w, b]), "loss": (history["loss"], losses)}


def parts_of(world, lengths=(12, 12)):
    """Returns each worker's own x and y; in one process there is one worker."""
    ends = np.cumsum((0, *lengths[: world.workers]))
    return [(X[a:b] / 10, 3 - X[a:b] / 5) for a, b in itertools.pairwise(ends)]


def batched(part, size=8):
    return off(tf.data.Dataset.from_tensor_slices(part).batch(size))


@case(full=True)
def policy_off(world):
    model = linear(world, 0.0)
    model.set_weights([np.zeros((1, 1)), np.zeros(1)])
    dataset = off(tf.data.Dataset.from_tensor_slices((ZEROS, X)).batch(8))
    right = np.mean(X.astype("float64") ** 2)
    return {
        "fit": (model.fit(dataset, verbose=0).history["loss"], [right]),
        "evaluate": (model.evaluate(dataset, verbose=0), right),
        "rows": (len(model.predict(dataset, verbose=0)), 24 * world.workers),
    }


def check_lengths(world, lengths, **compiled):
    parts = parts_of(world, lengths)
    model, own = linear(world, metrics=["mae"], **compiled), batched(parts[world.rank])
    history = model.fit(own, epochs=2, validation_data=own, verbose=0).history
    pairs = trained(model, history, steps_of(parts, 8 // world.workers), epochs=2)
    x, y = (np.concatenate(each).astype("float64") for each in zip(*parts, strict=True))
    w, b = (each.item() for each in model.get_weights())
    predicted, squares = x * w + b, np.mean((x * w + b - y) ** 2)
    return pairs | {
        "evaluate": (model.evaluate(own, verbose=0), [squares, np.mean(np.abs(predicted - y))]),
        "validation": (history["val_loss"][-1], squares),
        "predict": (model.predict(own, verbose=0), predicted),
    }


@case(full=True)
def off_of_equal_lengths(world):
    return check_lengths(world, (12, 12))


@case(WORKERS, full=True)  # own_slices.py has such lengths, too
def off_of_unequal_lengths(world):
    return check_lengths(world, (17, 7))


@case(WORKERS, full=True)
def off_of_one_row_beside_many(world):
    return check_lengths(world, (1, 23))


@case(WORKERS, full=True)
def off_in_executions(world):
    return check_lengths(world, (17, 7), steps_per_execution=2)


@case(WORKERS, full=True)
def off_eagerly(world):
    return check_lengths(world, (7, 17), run_eagerly=True)


@case(full=True)
def off_repeated_for_steps(world):
    parts = parts_of(world)
    own = off(tf.data.Dataset.from_tensor_slices(parts[world.rank]).batch(8).repeat())
    model, steps = linear(world), steps_of(parts, 8 // world.workers)
    each = len(steps)
    history = model.fit(own, steps_per_epoch=each, epochs=3, verbose=0).history
    w, b = (each.item() for each in model.get_weights())
    return trained(model, history, steps, epochs=3) | {
        "evaluate": (
            model.evaluate(own, steps=each, verbose=0),
            np.mean(np.concatenate([(x * w + b - y) ** 2 for x, y in steps])),
        ),
        "rows": (len(model.predict(own, steps=each, verbose=0)), 12 * world.workers),
    }


@case(full=True)
def off_weighted_by_classes(world):
    parts = [(x, np.float32(x > 1)) for x, _ in parts_of(world, (10, 14))]
    model = linear(world)
    history = model.fit(batched(parts[world.rank]), class_weight={0: 1.0, 1: 2.0}, verbose=0).history
    return trained(model, history, steps_of(parts, 8 // world.workers), weigh=lambda y: 1 + y)


@case(WORKERS, full=True)
def off_in_a_callback(world):
    parts, found = parts_of(world, (9, 15)), []
    model = linear(world, 0.0)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            found.append(self.model.evaluate(batched(parts[world.rank]), verbose=0))

    model.fit(X, X, batch_size=8, callbacks=[Evaluate()], verbose=0)
    errors = np.concatenate([x * 0.5 + 0.25 - y for x, y in parts])
    return {"evaluate": (found, [np.mean(errors**2)])}


@case(WORKERS, full=True)
def off_of_padded_batches(world):
    """Pieces of a batch have its length; no piece joins batches of two lengths."""
    model = keras.Sequential([keras.Input((None, 1)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    with world.scope():
        model = keras.models.clone_model(model)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.set_weights([np.ones((1, 1)), np.zeros(1)])
    lengths = [[1, 1, 1, 1, 3, 3], [2, 2, 2, 2, 4]]

    def rows(rank):
        for length in lengths[rank]:
            yield np.full((length, 1), float(length), "float32"), np.float32([0.0])

    flat = [tf.RaggedTensor.from_row_lengths(np.concatenate([x for x, _ in rows(k)]), lengths[k]) for k in (0, 1)]
    dataset = tf.data.Dataset.from_tensor_slices((flat[world.rank], np.zeros((len(lengths[world.rank]), 1), "float32")))
    own = off(dataset.map(lambda x, y: (tf.reshape(x, [-1, 1]), y)).padded_batch(4, ([None, 1], [1])))
    right = np.mean(np.square(np.float64(lengths[0] + lengths[1])))
    return {
        "evaluate": (model.evaluate(own, verbose=0), right),
        "fit": (model.fit(own, verbose=0).history["loss"], [right]),
    }


@case(
    WORKERS, error=r"The dataset in x must be the same on all tasks\. Received: finite on worker:0, endless on worker:1"
)
def off_that_ends_on_one_worker_only(world):
    own = batched(parts_of(world)[world.rank])
    linear(world).fit(own.repeat() if world.rank else own, steps_per_epoch=2, verbose=0)


@case(
    WORKERS,
    error=r"The arguments of the call must be .* Received: x: 'own rows' on worker:0, x: 'a shared dataset' on worker:1",
)
def off_on_one_worker_only(world):
    dataset = tf.data.Dataset.from_tensor_slices((X, X)).batch(8)
    linear(world).fit(dataset if world.rank else off(dataset), verbose=0)


@case(
    WORKERS,
    error=r"AutoShardPolicy.FILE gives each worker whole files, and TensorFlow finds no files .* Leave the policy out",
)
def files_of_no_files(world):
    linear(world).fit(off(tf.data.Dataset.from_tensor_slices((X, X)).batch(8), "FILE"), verbose=0)


@case(error="class_weight cannot weight data that are distributed already .* Give fit the tf.data.Dataset itself")
def weighted(world):
    dataset = tf.data.Dataset.from_tensor_slices((X, X)).batch(8)
    distributed = world.trainer.strategy.experimental_distribute_dataset(dataset)
    linear(world).fit(distributed, class_weight={0: 1.0, 1: 2.0}, verbose=0)


@case(MIRRORED)
def files_in_one_process(world):
    model = linear(world, 0.0)
    return {"rows": (len(model.predict(off(tf.data.Dataset.from_tensor_slices(X).batch(7), "FILE"), verbose=0)), 24)}

"""What workers must be given alike is compared before training, on all of them."""

import re
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import WORKERS
from tests.cases.case import case

X, Y = np.zeros((64, 8), np.float32), np.zeros((64, 1), np.float32)
SAME = "must be the same on all tasks. Received:"


def linear(world):
    with world.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def dataset(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def shuffled(world):
    if world.rank == 0:
        tf.random.uniform([3])
    return dataset().shuffle(64).batch(16)


def sampled(world):
    if world.rank == 0:
        tf.random.uniform([3])
    halves = [dataset(X[part::2], Y[part::2]) for part in (0, 1)]
    return tf.data.Dataset.sample_from_datasets(halves, [0.5, 0.5]).batch(16)


def harmless(world):
    """What a worker may do alone: functions traced more often, threads, files of a cache, numbers that `map` draws."""
    rank = world.rank
    if rank == 0:
        tf.data.Dataset.range(3).map(lambda i: i + 1).filter(lambda i: i > 0)
    data = dataset().shuffle(64, seed=3)
    data = data.map(lambda a, b: (a + tf.random.normal([8], seed=rank), b), num_parallel_calls=rank + 1)
    data = data.interleave(lambda *each: tf.data.Dataset.from_tensors(each).shuffle(1), cycle_length=1)
    return (data.cache() if rank else data).batch(16).prefetch(rank + 1)


class Own(keras.Model):
    """A model whose configuration holds an object with an address, and which says nothing of its layers."""

    def __init__(self, helper):
        super().__init__()
        self.helper, self.dense = helper, keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def fit_compiled(world, width=4, rate=0.2, loss="mse", learning_rate=0.1, argument="0.5"):
    """Fits a model that is built with its first batch, in a script that was started with an argument."""
    rank, words = world.rank, sys.argv[3:]
    with world.scope():
        layers = [keras.layers.Dense(width, kernel_initializer="zeros"), keras.layers.Dropout(rate)]
        model = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(learning_rate), loss)
    sys.argv[3:] = [f"--scale={argument}", f"--rank={rank}", f"--out=/tmp/{rank}", str(rank)]
    try:
        model.fit(X, Y, verbose=0)
    finally:
        sys.argv[3:] = words
    return model


# What workers are given, by a function of the world -> arguments of `fit`, and the error on both.
GIVEN = {
    "lengths": (
        lambda world: {"x": X[: 64 - 16 * world.rank], "y": Y[: 64 - 16 * world.rank], "batch_size": 16},
        f"The arrays in x {SAME} float32 (64, 8) on worker:0, float32 (48, 8) on worker:1.",
    ),
    "epochs": (
        lambda world: {"x": X, "y": Y, "epochs": 1 + world.rank},
        f"The arguments of the call {SAME} epochs: 1 on worker:0, epochs: 2 on worker:1.",
    ),
    "validation": (
        lambda world: {"x": X, "y": Y, "validation_data": (X, Y) if world.rank else None},
        f"The arguments of the call {SAME} validation_data: None on worker:0, validation_data: 'shared",
    ),
    "batches": (
        lambda world: {"x": dataset(X[: 64 - 16 * world.rank], Y[: 64 - 16 * world.rank]).batch(16)},
        f"The dataset in x {SAME} 4 batches on worker:0, 3 batches on worker:1.",
    ),
    "shuffled": (lambda world: {"x": shuffled(world)}, f"The dataset in x {SAME} shuffle(buffer_size=64, seed="),
    "batched": (
        lambda world: {"x": dataset().batch(16 + world.rank)},
        f"The dataset in x {SAME} batch(batch_size=16) on worker:0, batch(batch_size=17) on worker:1. Each",
    ),
    "sampled": (lambda world: {"x": sampled(world)}, f"The dataset in x {SAME} random(seed="),
}
for name, (given, sentence) in GIVEN.items():

    @case(WORKERS, error=f"^ConfigError: {re.escape(sentence)}", name=name)
    def _(world, given=given):
        linear(world).fit(verbose=0, **given(world))


# Arguments of `fit_compiled` on each worker.
COMPILED = {
    "width": (
        {"width": (4, 5)},
        f"The model {SAME} layers[1].Dense.units: 4 on worker:0, layers[1].Dense.units: 5 on worker:1. Start",
    ),
    "dropout": (
        {"rate": (0.2, 0.5)},
        f"The model {SAME} layers[2].Dropout.rate: 0.2 on worker:0, layers[2].Dropout.rate: 0.5 on worker:1.",
    ),
    "loss": (
        {"loss": ("mse", "mae")},
        f"The arguments of compile {SAME} loss: 'mse' on worker:0, loss: 'mae' on worker:1.",
    ),
    "learning_rate": (
        {"learning_rate": (0.1, 0.01)},
        f"The learning rate {SAME} 0.1 on worker:0, 0.01 on worker:1.",
    ),
    "argument": (
        {"argument": ("0.5", "0.7")},
        f"The arguments of the script {SAME} --scale 0.5 on worker:0, --scale 0.7 on worker:1.",
    ),
}
for name, (arguments, sentence) in COMPILED.items():

    @case(WORKERS, error=f"^ConfigError: {re.escape(sentence)}", name=name)
    def _(world, arguments=arguments):
        fit_compiled(world, **{key: values[world.rank] for key, values in arguments.items()})


def same_weights(world, model):
    chief, worker = world.gather(model.get_weights())
    return {"weights": (worker, chief)}


@case(WORKERS)
def data_that_differ_where_they_may(world):
    model = linear(world)
    model.fit(harmless(world), verbose=0)
    model.fit(dataset().shuffle(64, seed=3).batch(16), verbose=0)
    return same_weights(world, model)


@case(WORKERS)
def models_that_differ_where_they_may(world):
    same = same_weights(world, fit_compiled(world))
    for _ in range(world.rank):
        keras.layers.Dense(1)  # outside of the scope: its name is taken in this process alone
    with world.scope():
        own = Own(object())
        loss = lambda y, p: keras.ops.mean((y - p) ** 2)  # noqa: E731
        own.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)), loss, metrics=[loss])
    is_chief = world.trainer.is_chief
    chief_alone = [keras.callbacks.ModelCheckpoint(world.folder / "none.keras", save_freq=1000)] if is_chief else []
    own.fit(X, Y, verbose=2 * is_chief, callbacks=chief_alone, class_weight={1: 2.0, 0: 1.0})
    return {**same, "own weights": same_weights(world, own)["weights"]}

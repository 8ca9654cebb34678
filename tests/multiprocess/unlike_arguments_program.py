"""What workers are given to `fit` differs. Arguments: strategy, folder for the results."""

import sys

import tfdist
from tests.multiprocess import harness

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

RANK = trainer.task.index
x, y = np.zeros((64, 8), np.float32), np.zeros((64, 1), np.float32)
with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


def shuffled():
    if RANK == 0:
        tf.random.uniform([3])
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).batch(16)


def sampled():
    if RANK == 0:
        tf.random.uniform([3])
    halves = [tf.data.Dataset.from_tensor_slices((x[part::2], y[part::2])) for part in (0, 1)]
    return tf.data.Dataset.sample_from_datasets(halves, [0.5, 0.5]).batch(16)


def harmless():
    """What a worker may do alone: functions traced more often, threads, files of a cache, numbers that `map` draws."""
    if RANK == 0:
        tf.data.Dataset.range(3).map(lambda i: i + 1).filter(lambda i: i > 0)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=3)
    dataset = dataset.map(lambda a, b: (a + tf.random.normal([8], seed=RANK), b), num_parallel_calls=RANK + 1)
    dataset = dataset.interleave(lambda *each: tf.data.Dataset.from_tensors(each).shuffle(1), cycle_length=1)
    return (dataset.cache() if RANK else dataset).batch(16).prefetch(RANK + 1)


def refused(*data, **options):
    try:
        trainer.fit(model, *data, verbose=0, **options)
    except tfdist.ConfigError as e:
        return str(e)
    return ""


class Own(keras.Model):
    """A model whose configuration holds an object with an address, and which says nothing of its layers."""

    def __init__(self, helper):
        super().__init__()
        self.helper, self.dense = helper, keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def compiled(width=4, rate=0.2, loss="mse", learning_rate=0.1, argument="0.5"):
    """What `fit` says to a model that is built with its first batch, in a script that was started with an argument."""
    sys.argv[3:] = [f"--scale={argument}", f"--rank={RANK}", f"--out=/tmp/{RANK}", str(RANK)]
    with trainer.scope():
        layers = [keras.layers.Dense(width, kernel_initializer="zeros"), keras.layers.Dropout(rate)]
        other = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer="zeros")])
        other.compile(keras.optimizers.SGD(learning_rate), loss)
    try:
        trainer.fit(other, x, y, verbose=0)
    except tfdist.ConfigError as e:
        return str(e)
    return ""


def alike():
    """What may differ between workers that run the same program."""
    for _ in range(RANK):
        keras.layers.Dense(1)  # outside of the scope: its name is taken in this process alone
    with trainer.scope():
        own = Own(object())
        loss = lambda y, p: keras.ops.mean((y - p) ** 2)  # noqa: E731
        own.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)), loss, metrics=[loss])
    chief_alone = [keras.callbacks.ModelCheckpoint("none.keras", save_freq=1000)] if trainer.is_chief else []
    try:
        trainer.fit(own, x, y, verbose=2 * trainer.is_chief, callbacks=chief_alone, class_weight={1: 2.0, 0: 1.0})
    except tfdist.ConfigError as e:
        return str(e)
    return ""


def pick(first, second):
    return second if RANK else first


if sys.argv[3:] == ["width"]:
    with trainer.scope():
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(4 + RANK)])
n = 64 - 16 * RANK
results = {
    "lengths": refused(x[:n], y[:n], batch_size=16),
    "epochs": refused(x, y, epochs=1 + RANK),
    "validation": refused(x, y, validation_data=(x, y) if RANK else None),
    "batches": refused(tf.data.Dataset.from_tensor_slices((x[:n], y[:n])).batch(16)),
    "shuffled": refused(shuffled()),
    "batched": refused(tf.data.Dataset.from_tensor_slices((x, y)).batch(16 + RANK)),
    "sampled": refused(sampled()),
    "harmless": refused(harmless()),
    "width": compiled(width=pick(4, 5)),
    "dropout": compiled(rate=pick(0.2, 0.5)),
    "loss": compiled(loss=pick("mse", "mae")),
    "learning_rate": compiled(learning_rate=pick(0.1, 0.01)),
    "argument": compiled(argument=pick("0.5", "0.7")),
    "alike": compiled() or alike(),
    "seeded": refused(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=3).batch(16)),
}
harness.store(sys.argv[2], RANK, results)

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
    "seeded": refused(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=3).batch(16)),
}
harness.store(sys.argv[2], RANK, results)

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
    "seeded": refused(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=3).batch(16)),
}
harness.store(sys.argv[2], RANK, results)

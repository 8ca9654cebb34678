"""Trains on arrays or records in files of several sizes. Arguments: strategy, such as `mirrored:2`, output folder, folder for the files,
"arrays" and "records" or one of them, and the rank that is to end because it cannot read its data; of records, any rank.

Stores for each size: the weights, the losses, an evaluation and the predictions of the training, and of a plain loop in NumPy.
"""

import pathlib
import sys

import tfdist
from tests.multiprocess import harness

name, out, folder, kinds, *bad = sys.argv[1:]
strategy, _, devices = name.partition(":")
trainer = tfdist.Trainer(strategy, **({"devices": int(devices)} if devices else {}))

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdist.data  # noqa: E402

BATCH, RATE, RANK = 8, 0.05, trainer.task.index
SIZES = (1, 2, 3, 7, 8, 9, 27)
CASES = [(kind, size) for kind in kinds.split("+") for size in SIZES]
rng = np.random.default_rng(0)
X = rng.standard_normal((max(SIZES), 3)).astype(np.float32)
Y = abs(X.sum(1, keepdims=True))


def write(size):
    path = pathlib.Path(folder, str(size))
    path.mkdir()
    ends = [0, size // 3, size]  # the first shard may be empty
    for shard in range(2):
        rows = slice(ends[shard], ends[shard + 1])
        np.savez(path / f"{shard}.npz", x=X[rows], y=Y[rows])
        records = path / "records" / f"{shard}.tfrecord"
        records.parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(str(records)) as writer:
            writer.write(b"to be damaged")
            for row in np.concatenate([X[rows], Y[rows]], 1):
                writer.write(row.tobytes())
        flip(records, 12)


def flip(path, position):
    """Damages one byte of a file."""
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)


def parse(record):
    row = tf.io.decode_raw(record, tf.float32)
    return tf.ensure_shape(row[:3], [3]), tf.ensure_shape(row[3:], [1])


def open_data(kind, size, seed=4):
    if kind == "arrays":
        return tfdist.data.arrays_from(f"{folder}/{size}", BATCH, seed, window=5)
    return tfdist.data.records_from(f"{folder}/{size}/records", parse, BATCH, seed, window=5, on_corrupt="skip")


with trainer.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(RATE), "mse")


def fit(stored, **arguments):
    """Trains the model from its first weights."""
    model.set_weights([np.ones((3, 1)), np.zeros(1)])
    return model.fit(stored, verbose=0, **arguments).history


def plain(stored, size, epochs, per_epoch):
    """Returns what the training must come to, by the batches of `dataset` and NumPy."""
    weights, bias, losses, validation = np.ones((3, 1)), np.zeros(1), [], []
    steps = stored.dataset(epochs=None).take(epochs * per_epoch).as_numpy_iterator()
    for _ in range(epochs):
        total = 0.0, 0
        for _ in range(per_epoch):
            x, y = next(steps)
            error = x @ weights + bias - y
            total = total[0] + float((error**2).sum()), total[1] + len(x)
            weights, bias = weights - RATE * 2 * x.T @ error / len(x), bias - RATE * 2 * error.mean(0)
        losses.append(total[0] / total[1])
        validation.append(float(((X[:size] @ weights + bias - Y[:size]) ** 2).mean()))
    return [weights, bias, losses, validation, validation[-1], X[:size] @ weights + bias]


results = {}
if RANK == 0:
    for size in SIZES:
        write(size)
trainer._context.ranks.barrier()
for kind, size in CASES:
    stored = open_data(kind, size)
    for steps in (None, 3) if size > 8 else (None,):
        fitted = fit(stored, epochs=3, steps_per_epoch=steps, validation_data=stored)
        found = [*model.get_weights(), fitted["loss"], fitted["val_loss"]]
        found += [model.evaluate(stored, verbose=0), model.predict(stored, verbose=0)]
        results[kind, size, steps] = found, plain(stored, size, 3, steps or stored.steps_per_epoch)
fit(stored, class_weight=dict.fromkeys(range(10), 0.0))
results["no weight"] = model.get_weights()
stored = open_data(kind, 9, seed=RANK)
if trainer._context.ranks.size > 1:
    try:
        fit(stored)
    except tfdist.ConfigError as e:
        results["unlike"] = str(e)
if bad and kind == "records":
    path = pathlib.Path(folder, "27", "records", "1.tfrecord")
    if RANK == 0:
        flip(path, path.stat().st_size - 1)
    trainer._context.ranks.barrier()
    stored = tfdist.data.records_from(path, parse, BATCH)
elif bad:
    stored = open_data(kind, 27)
    if int(bad[0]) == RANK:
        object.__setattr__(stored.source._shards[1][0], "version", (1, 0, 0))  # as if the file had changed
if bad:
    try:
        fit(stored, epochs=9)
    except tfdist.DataError as e:
        results["bad"] = str(e)
harness.store(out, RANK, results)

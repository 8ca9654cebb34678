"""Trains on a sparse file that is larger than the memory that this process may use, or on records. Arguments: folder for the files,
folder of the backups, step at which to end by SIGKILL, or 0, and "arrays" or "records".

Prints the weights' hash at the end, after the number of steps that this process has run.
"""

import hashlib
import os
import resource
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
import tfdist.data

folder, backups, dies_at, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
ROWS, WIDTH, BATCH = 5_000_000, 4096, 64  # 20 GB of zeros with some numbers among them


def write():
    x = np.lib.format.open_memmap(f"{folder}/x.npy", "w+", np.uint8, (ROWS, WIDTH))
    x[:: ROWS // 997, :8] = 200  # the other pages stay holes of the file
    y = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", np.float32, (ROWS,))
    y[:: ROWS // 997] = 1


def write_records():
    """Writes 400 records, of which one is damaged."""
    for number in range(4):
        path = f"{folder}/{number}.tfrecord"
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(100):
                writer.write(np.random.default_rng((number, row)).bytes(WIDTH))
    with open(path, "r+b") as file:
        file.seek(12)
        file.write(b"damaged")


def parse(record):
    values = tf.ensure_shape(tf.io.decode_raw(record, tf.uint8), [WIDTH])
    return values, tf.cast(values[:1], tf.float32)


class Death(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if dies_at and self.model.optimizer.iterations == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


trainer = tfdist.Trainer("one_device", backup=tfdist.BackupAndRestore(backups, 5))
if not os.path.exists(folder):
    os.mkdir(folder)
    write() if kind == "arrays" else write_records()
keras.utils.set_random_seed(2)
with trainer.scope():
    scale = keras.layers.Rescaling(1 / 255)
    model = keras.Sequential([keras.Input((WIDTH,)), scale, keras.layers.Dense(1)])
    model.compile("adam", "mse")
if kind == "arrays":
    tenth = ROWS * WIDTH // 10
    resource.setrlimit(resource.RLIMIT_DATA, (tenth, tenth))
    data = tfdist.data.arrays_from(f"{folder}", BATCH, seed=5)
else:
    data = tfdist.data.records_from(folder, parse, BATCH, seed=5, on_corrupt="skip")
model.fit(data, epochs=3, steps_per_epoch=8, verbose=0, callbacks=[death := Death()])
print(
    death.steps,
    "steps, weights",
    hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest(),
)

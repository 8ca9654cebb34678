"""Trains on arrays in files with a cache and a map. Arguments: folder for the files, folder of the backups, cache, step at which to end by
SIGKILL, or 0.

Prints the weights' hash at the end, after the number of steps that this process has run.
"""

import glob
import hashlib
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
import tfdist.data
from tfdist.data import array_files

folder, backups, cache, dies_at = *sys.argv[1:4], int(sys.argv[4])
ROWS, WIDTH, BATCH = 120, 64, 8
array_files._BLOCK_ROWS = 10


class Death(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if dies_at and self.model.optimizer.iterations == dies_at:
            while not glob.glob(f"{backups}/step-*/manifest.json"):  # a thread writes the backup
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


if not os.path.exists(folder):
    os.mkdir(folder)
    rng = np.random.default_rng(0)
    np.savez(f"{folder}/0.npz", x=rng.standard_normal((ROWS, WIDTH), np.float32), y=np.ones(ROWS, np.float32))
PROJECTION = tf.constant(np.random.default_rng(1).standard_normal((WIDTH, 5), np.float32))
keras.utils.set_random_seed(2)
trainer = tfdist.Trainer("one_device", backup=tfdist.BackupAndRestore(backups, 5))
with trainer.scope():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
data = tfdist.data.arrays_from(folder, BATCH, seed=5, map=lambda x, y: (x @ PROJECTION, y), cache=cache)
model.fit(data, epochs=2, verbose=0, callbacks=[death := Death()])
weights = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
print(death.steps, "steps, weights", weights)

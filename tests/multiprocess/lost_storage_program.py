"""A training whose storage goes away when it is killed. Argument: a folder."""

import os
import pathlib
import signal
import sys
import time

import tfdist
from tfdist.runtime.report import progress

trainer = tfdist.Trainer("one_device", cluster=False, backup_dir=pathlib.Path(sys.argv[1], "backup"))

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

FOLDER = pathlib.Path(sys.argv[1], "backup")


class GoesAway(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pathlib.Path(sys.argv[1], f"steps-{progress.restarts()}").touch()
        if len(list(FOLDER.glob("step-*/manifest.json"))):
            ends = time.monotonic() + 60
            while not progress.had_backup(str(FOLDER)):  # it is noted a moment later
                assert time.monotonic() < ends
                time.sleep(0.02)
            FOLDER.rename(FOLDER.with_name("elsewhere"))
            os.kill(os.getpid(), signal.SIGKILL)


with trainer.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
trainer.fit(model, np.zeros((32, 4)), np.zeros((32, 1)), batch_size=8, epochs=500, verbose=0, callbacks=[GoesAway()])

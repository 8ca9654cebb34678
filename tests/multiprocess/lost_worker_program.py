"""A worker that fails or ends alone amid training. Arguments: which rank, and how (`error`, `kill`, `stop`, `exit`; or
`save`: killed as it writes what the others wait for, and then where to save; or `again`: killed, and started again alone,
while the others do something else; or
`finish`: finished, while the others evaluate)."""

import os
import pathlib
import signal
import sys
import time

import tfdist
from tests.multiprocess import harness
from tests.multiprocess.roles import ask

rank, how = int(sys.argv[1]), sys.argv[2]
SAVES = pathlib.Path(os.environ.get("ROLES", ""), "saves")
trainer = tfdist.Trainer("multi_worker_mirrored", **harness.transport())

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402


class AtStep(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (0, 20) and trainer.task.index == rank:
            print("it happens", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            if how == "exit":
                sys.exit(0)
            raise RuntimeError("cannot read shard 7")


class KilledInExport(keras.layers.Layer):
    def call(self, x):
        if how == "save" and trained and trainer.task.index == rank:
            SAVES.touch()
            time.sleep(5)
            print("it happens", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return x


trained = False
with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1), KilledInExport()])
    model.compile("sgd", "mse")
x = np.zeros((1000, 8), np.float32)
if how == "again":
    model.fit(x, x[:, :1], verbose=0)
    if trainer.task.index == rank:
        time.sleep(120)  # until it is killed
    ask("kill", f"worker:{rank}")
    ask("start", f"worker:{rank}")
    print("it happens", flush=True)
    time.sleep(15)  # it starts meanwhile
if how == "finish":
    trainer.fit(model, x, x[:, :1], batch_size=500, verbose=0)
    print("it happens", flush=True)
    if trainer.task.index != rank:
        trainer.evaluate(model, x, x[:, :1], batch_size=500, verbose=0)
    sys.exit(0)
if how == "save":
    model.fit(x, x[:, :1], verbose=0)
    trained = True
    while trainer.task.index != rank and not SAVES.exists():  # the others come second
        time.sleep(0.05)
    model.export(sys.argv[3], verbose=False)
    print("the export is there", flush=True)
    sys.exit(0)
trainer.fit(model, x, x[:, :1], batch_size=4, epochs=2 if how == "stop" else 1000, callbacks=[AtStep()], verbose=0)

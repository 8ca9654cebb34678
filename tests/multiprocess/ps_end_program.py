"""How a parameter-server cluster ends. Arguments: what happens at step 20, one of `servers`, `workers`, `error`, `interrupt`, `chief`,
`exit`."""

import os
import signal
import sys

import tfdist
from tests.multiprocess.roles import ask
from tfdist.parameter_server import scheduler

trainer = tfdist.Trainer("parameter_server")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

scheduler.NO_WORKER_TIMEOUT = 3.0
HAPPENS = {
    "servers": lambda: ask("kill", "ps:1"),
    "workers": lambda: [ask("kill", f"worker:{index}") for index in range(2)],
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "error": lambda: None,
    "chief": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(3),
}


class AtStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print("it happens", flush=True)
            HAPPENS[sys.argv[1]]()


def dataset(context):
    x, y = np.zeros((20, 8), np.float32), np.zeros(20, np.int32)
    y[7] = 9 if sys.argv[1] == "error" else 1  # of 3 classes
    good = tf.data.Dataset.from_tensor_slices((x, np.zeros(20, np.int32))).batch(4).repeat(10)
    return good.concatenate(tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat())


with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
trainer.fit(model, dataset, steps_per_epoch=100_000, callbacks=[AtStep()], verbose=0)
